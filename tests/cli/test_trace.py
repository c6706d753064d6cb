"""`tandem trace`: from OTLP in JSON, and from a server that answers as Jaeger's query API does."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tandem.cli.main import main

TRACE = "0af7651916cd43dd8448eb211c80319c"
START = 1_700_000_000_000_000_000
# name, id, parent, start and length in ms, attributes, events
SPANS: list[tuple[str, str, str, int, int, dict[str, Any], list[tuple[str, dict[str, str]]]]] = [
    (
        "generate", "a1", "ff", 0, 100,
        {"tandem.request_id": "why", "tandem.status": "OK", "gen_ai.usage.output_tokens": 5, "gen_ai.request.seed": 2**60,
         "gen_ai.response.finish_reasons": ["length"]},
        [("tandem.first_token", {})],
    ),
    (
        "tandem.round", "b1", "a1", 0, 60,
        {"tandem.gamma": 4, "tandem.accepted": 3, "tandem.expected_acceptance": 2.5},
        [],
    ),
    ("draft.propose", "c1", "b1", 5, 20, {"tandem.steps": 4}, []),
    ("target.verify", "c2", "b1", 30, 25, {"tandem.batch_size": 1.0}, []),
    (
        "tandem.round", "b2", "a1", 60, 40,
        {"tandem.gamma": 0, "tandem.accepted": 0, "tandem.degraded_reason": "draft_timeout"},
        [("tandem.fallback", {"tandem.reason": "draft_timeout"})],
    ),
]  # fmt: skip
DRAWN = """\
why  OK
generate          |████████████████████████████████████████████|    100.0 ms  output_tokens=5 finish_reasons=length
  tandem.round    |██████████████████████████                  |     60.0 ms  gamma=4 accepted=3 expected_acceptance=2.50
    draft.propose |  █████████                                 |     20.0 ms  steps=4
    target.verify |             ███████████                    |     25.0 ms  batch_size=1.00
  tandem.round    |                          ██████████████████|     40.0 ms  gamma=0 accepted=0 degraded_reason=draft_timeout (fallback)
"""


def otlp() -> dict[str, Any]:
    """The spans as an exporter writes them in JSON."""

    def value(content: Any) -> dict[str, Any]:
        if isinstance(content, list):
            return {"arrayValue": {"values": [value(each) for each in content]}}
        if isinstance(content, int):
            return {"intValue": str(content)}
        return {"doubleValue": content} if isinstance(content, float) else {"stringValue": content}

    def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"key": key, "value": value(content)} for key, content in attributes.items()]

    spans = [
        {
            "traceId": TRACE,
            "spanId": own,
            "parentSpanId": parent,
            "name": name,
            "startTimeUnixNano": str(START + begin * 1_000_000),
            "endTimeUnixNano": str(START + (begin + length) * 1_000_000),
            "attributes": pairs(attributes),
            "events": [{"name": event, "attributes": pairs(fields)} for event, fields in events],
        }
        for name, own, parent, begin, length, attributes, events in SPANS
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def tag(key: str, value: Any) -> dict[str, Any]:
    """An attribute as Jaeger has it: lists are JSON in strings, and so are integers that JavaScript can't hold."""
    if isinstance(value, list):
        return {"key": key, "type": "string", "value": json.dumps(value, separators=(",", ":"))}
    if isinstance(value, float):
        return {"key": key, "type": "float64", "value": int(value) if value.is_integer() else value}
    if isinstance(value, int):
        return {"key": key, "type": "int64", "value": value if abs(value) < 2**53 else str(value)}
    return {"key": key, "type": "string", "value": value}


def jaeger() -> dict[str, Any]:
    """The same as `/api/traces` answers it, in every field: microseconds, links as references, the span's kind and scope among its
    tags. After Jaeger's `internal/uimodel/model.go`, its converter `from_domain.go`, and the pair `fixture/otlp2jaeger-{in,out}.json`
    of its query service."""
    spans = [
        {
            "traceID": TRACE,
            "spanID": own,
            "operationName": name,
            "references": [
                {"refType": "CHILD_OF", "traceID": TRACE, "spanID": parent},
                *([{"refType": "FOLLOWS_FROM", "traceID": "9" * 32, "spanID": "a1"}] if name == "tandem.round" else []),
            ],
            "startTime": START // 1000 + begin * 1000,
            "duration": length * 1000,
            "tags": [
                tag("otel.scope.name", "tandem"),
                *(tag(key, content) for key, content in attributes.items()),
                tag("span.kind", "internal"),
            ],
            "logs": [
                {
                    "timestamp": START // 1000 + begin * 1000,
                    "fields": [tag("event", event), *(tag(key, content) for key, content in f.items())],
                }
                for event, f in events
            ],
            "processID": "p1",
            "warnings": None,
        }
        for name, own, parent, begin, length, attributes, events in SPANS
    ]
    processes = {"p1": {"serviceName": "tandem-orchestrator", "tags": [tag("service.version", "1")]}}
    trace = {"traceID": TRACE, "spans": spans, "processes": processes, "warnings": None}
    return {"data": [trace], "total": 0, "limit": 0, "offset": 0, "errors": None}


SEARCH = {
    "service",
    "operation",
    "start",
    "end",
    "minDuration",
    "maxDuration",
    "limit",
    "tag",
    "tags",
    "raw",
    "traceID",
}
"""The parameters that `/api/traces` reads; others it ignores."""


@pytest.fixture
def query_api() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            by_id = url.path.removeprefix("/api/traces/")
            if url.path == "/api/traces":
                assert set(query) <= SEARCH
                assert (query["service"], query["operation"]) == ("tandem-orchestrator", "generate")
                assert int(query["limit"]) > 0
                found = json.loads(query["tags"]) == {"tandem.request_id": "why"}
                self._answer(200, jaeger() if found else {**jaeger(), "data": []})
            elif by_id == TRACE:
                self._answer(200, jaeger())
            else:
                errors = [{"code": 404, "msg": "trace not found"}]
                self._answer(404, {"data": None, "total": 0, "limit": 0, "offset": 0, "errors": errors})

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("lines", [False, True])
def test_a_file_of_otlp(lines: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = otlp()
    [[group]] = [each["scopeSpans"] for each in document["resourceSpans"]]
    one_each = [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]} for span in group["spans"]]
    path = tmp_path / "spans.json"
    path.write_text("\n".join(map(json.dumps, one_each)) if lines else json.dumps(document, indent=1))
    assert main(["trace", str(path)], {}) == 0
    assert capsys.readouterr().out == DRAWN


@pytest.mark.parametrize("wanted", [TRACE, "why"])
def test_jaeger(wanted: str, query_api: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", wanted], {"TANDEM_JAEGER_URL": query_api + "/"}) == 0
    assert capsys.readouterr().out == DRAWN


@pytest.mark.parametrize("answer", [jaeger, lambda: {"result": otlp()}])
def test_what_jaeger_answered_can_be_kept_in_a_file(
    answer: Callable[[], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `/api/traces`, which the UI saves too, and of `/api/v3/traces`."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(answer()))
    assert main(["trace", str(path)], {}) == 0
    assert capsys.readouterr().out == DRAWN


def test_svg(query_api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "trace.svg"
    assert main(["trace", "why", "--jaeger", query_api, "--svg", str(picture)], {}) == 0
    assert capsys.readouterr().out == ""
    namespace = "{http://www.w3.org/2000/svg}"
    drawn = ET.fromstring(picture.read_text())
    bars = drawn.findall(f"{namespace}rect")[1:]
    assert len(bars) == len(SPANS)
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == pytest.approx([520.0 * length / 100 for _, _, _, _, length, _, _ in SPANS])
    assert "draft_timeout" in picture.read_text()


@pytest.mark.parametrize("wanted", ["f" * 32, "nobody"])
def test_no_such_trace(wanted: str, query_api: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", wanted, "--jaeger", query_api], {}) == 1
    assert "no request of Tandem in" in capsys.readouterr().err


def test_nobody_answers(free_port: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", TRACE, "--jaeger", f"http://127.0.0.1:{free_port()}"], {}) == 1
    said = capsys.readouterr().err
    assert "no Jaeger answers at http://127.0.0.1" in said
    assert "urlopen" not in said
    assert "`make up TRACING=1`" in said
    assert main(["trace", TRACE, "--jaeger", "file:///etc/passwd"], {}) == 1
    assert "is no http address" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "not json", '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}']
)
def test_a_file_of_something_else(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["trace", str(path)], {}) == 1
    error = capsys.readouterr().err
    assert "holds no spans" in error or "no request of Tandem" in error
    assert main(["trace", str(tmp_path / "missing.json")], {}) == 1
    assert "can't read" in capsys.readouterr().err
