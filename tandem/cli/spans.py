"""Spans as files and Jaeger give them: OTLP in JSON, one object or one a line, and the answers of Jaeger's query API.

That API comes in two forms. `/api/traces`, which Jaeger's UI uses and all its versions have, answers in a form of its own
(`internal/uimodel` and `model/json` in Jaeger's sources); `/api/v3/traces` answers in OTLP below a `result`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cli.errors import CliError

ROOT = "generate"
SERVICE = "tandem-orchestrator"
FETCH_SECONDS = 10.0
MOST_TRACES = 20
"""A request that was resumed is in several."""
_MISSING = 404


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """One span. Times in nanoseconds since the epoch; events are (name, attributes)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def read_file(path: Path) -> list[ReadSpan]:
    """The spans of an OTLP JSON file, or of one that Jaeger's UI saved. Raises CliError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise CliError(f"can't read {path}: {error.strerror}") from error
    try:
        return [span for document in _documents(text) for span in _spans(document)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"{path} holds no spans as OTLP JSON or Jaeger's JSON") from error


def fetch(jaeger: str, wanted: str) -> list[ReadSpan]:
    """The spans of a trace, by its id or, in the last two days, by the request's, from Jaeger's query API. Raises CliError."""
    if _is_trace_id(wanted):
        answer = _get(f"{jaeger}/api/traces/{wanted}")
    else:
        tags = json.dumps({"tandem.request_id": wanted})
        query = urllib.parse.urlencode({"service": SERVICE, "operation": ROOT, "tags": tags, "limit": MOST_TRACES})
        answer = _get(f"{jaeger}/api/traces?{query}")
    try:
        return list(_spans(answer))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"what answers at {jaeger} is no query API of Jaeger") from error


def _is_trace_id(text: str) -> bool:
    return len(text) == 32 and all(character in "0123456789abcdef" for character in text)


def _get(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise CliError(f"{url.partition('/api/')[0]!r} is no http address")
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as response:  # noqa: S310 - checked above
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code == _MISSING:
            return {"data": []}
        raise CliError(f"Jaeger answered {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise CliError(
            f"no Jaeger answers at {url.partition('/api/')[0]} ({getattr(error, 'reason', None) or error}): start one and trace "
            "into it with `make up TRACING=1`, or name another one's query API by --jaeger; a trace in a file needs none"
        ) from error


def _documents(text: str) -> Iterable[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _spans(document: Any) -> Iterator[ReadSpan]:
    if "data" in document:
        for trace in document["data"] or ():
            yield from map(_from_jaeger, trace["spans"])
        return
    for group in document.get("result", document)["resourceSpans"]:
        for scope in group["scopeSpans"]:
            yield from map(_from_otlp, scope["spans"])


def _from_otlp(span: Mapping[str, Any]) -> ReadSpan:
    return ReadSpan(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span["name"],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_otlp_attributes(span),
        events=tuple((event["name"], _otlp_attributes(event)) for event in span.get("events", ())),
    )


def _otlp_attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _otlp_value(pair["value"]) for pair in holder.get("attributes", ())}


def _otlp_value(value: Mapping[str, Any]) -> Any:
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        return [_otlp_value(each) for each in content.get("values", ())]
    if kind == "doubleValue":
        return float(content)  # a whole one may come as an integer
    return int(content) if kind == "intValue" else content  # 64-bit numbers are strings in JSON


def _from_jaeger(span: Mapping[str, Any]) -> ReadSpan:
    start_ns = span["startTime"] * 1000
    parents = [each["spanID"] for each in span.get("references", ()) if each["refType"] == "CHILD_OF"]
    return ReadSpan(
        trace_id=span["traceID"],
        span_id=span["spanID"],
        parent_id=parents[0] if parents else "",
        name=span["operationName"],
        start_ns=start_ns,
        end_ns=start_ns + span["duration"] * 1000,
        attributes=_tags(span.get("tags", ())),
        events=tuple(_jaeger_event(each) for each in span.get("logs", ())),
    )


def _tags(tags: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {tag["key"]: _tag_value(tag) for tag in tags}


def _tag_value(tag: Mapping[str, Any]) -> Any:
    """Jaeger has no lists, which come as JSON in a string; nor integers that JavaScript could not hold."""
    value, kind = tag["value"], tag.get("type")
    if kind == "int64":
        return int(value)
    if kind == "float64":
        return float(value)
    if isinstance(value, str) and value.startswith('["'):
        return json.loads(value)
    return value


def _jaeger_event(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    fields = _tags(entry["fields"])
    return str(fields.pop("event", "")), fields
