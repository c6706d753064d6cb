"""`tandem trace`: a request's rounds as a waterfall, from Jaeger or from a file, without a UI."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tandem.cli import waterfall
from tandem.cli.errors import CliError
from tandem.cli.interruptions import Interruptions
from tandem.cli.spans import fetch, read_file


def run(arguments: argparse.Namespace, environment: Mapping[str, str], _: Interruptions) -> int:
    """Draws each request of the trace. Raises CliError."""
    wanted: str = arguments.trace
    path = Path(wanted)
    if path.suffix == ".json" or path.is_file():
        spans = read_file(path)
    else:
        jaeger = arguments.jaeger or environment.get("TANDEM_JAEGER_URL") or "http://127.0.0.1:16686"
        spans = fetch(jaeger.rstrip("/"), wanted)
    requests = sorted(waterfall.roots(spans), key=lambda each: each.start_ns)
    if not requests:
        raise CliError(f"no request of Tandem in {wanted!r}: not sampled, not exported yet, or another id")
    if arguments.svg:
        if len(requests) > 1:
            raise CliError(f"{wanted!r} holds {len(requests)} requests; an SVG shows one")
        Path(arguments.svg).write_text(waterfall.draw_svg(requests[0], spans))
        return 0
    for request in requests:
        request_id = request.attributes.get("tandem.request_id", "a request that was refused")
        print(f"{request_id}  {request.attributes.get('tandem.status', '')}")
        print("\n".join(waterfall.draw(request, spans)))
    return 0
