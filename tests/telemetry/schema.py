"""docs/trace-schema.json, the source of truth for spans: checks against it, and its tables for the documentation."""

from __future__ import annotations

import json
from typing import Any

from tests.support.services import REPOSITORY
from tests.telemetry.collector import Span

SCHEMA: dict[str, Any] = json.loads((REPOSITORY / "docs" / "trace-schema.json").read_text())

_TYPES: dict[str, type] = {"string": str, "int": int, "double": float, "bool": bool, "string[]": list}


def check(span: Span) -> None:
    """Fails if the span has a name, a kind, an attribute or an event that the schema doesn't have, or lacks one."""
    declared = SCHEMA["spans"][span.name]
    assert span.kind == declared["kind"]
    assert span.service == f"tandem-{declared['service']}"
    assert set(SCHEMA["resource"]) <= set(span.resource)
    for key, value in span.attributes.items():
        assert key in declared["attributes"], f"{span.name}: {key} is not in the schema"
        assert type(value) is _TYPES[declared["attributes"][key][0]], f"{span.name}: {key} is {value!r}"
    for key, (_, presence, _meaning) in declared["attributes"].items():
        if presence == "always" or (presence in ("planned", "accepted") and _went_well(span)):
            assert key in span.attributes, f"{span.name} lacks {key}"
    for name, attributes in span.events:
        assert set(attributes) == set(declared["events"][name]["attributes"]), f"{span.name}: {name}"


def _went_well(span: Span) -> bool:
    return span.attributes.get("tandem.status") == "OK" or span.attributes.get("tandem.outcome") == "committed"


def tables() -> str:
    """The schema as the documentation shows it."""
    parts = []
    for name, span in SCHEMA["spans"].items():
        parts.append(f"#### `{name}`\n")
        parts.append(f"{span['service']}, {span['kind']}, child of {span['parent']}: {span['meaning']}.\n")
        parts.append("| attribute | type | present | meaning |\n|---|---|---|---|")
        for key, (kind, presence, meaning) in span["attributes"].items():
            parts.append(f"| `{key}` | {kind} | {presence} | {meaning} |")
        for event, declared in span["events"].items():
            keys = ", ".join(f"`{key}` ({meaning})" for key, meaning in declared["attributes"].items())
            parts.append(f"| event `{event}` | | sometimes | {declared['meaning']}{': ' + keys if keys else ''} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(tables())
