"""A trace as a waterfall: one line per span, children below their parents, bars to scale. As text, or as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Protocol

WIDTH = 44
ORDINARY_EVENTS = {"tandem.first_token", "tandem.rollback"}
"""Of every request: not worth a word in the picture."""
SHOWN = {
    "generate": ("gen_ai.usage.output_tokens", "gen_ai.response.finish_reasons"),
    "tandem.round": ("tandem.gamma", "tandem.accepted", "tandem.expected_acceptance", "tandem.degraded_reason"),
    "draft.propose": ("tandem.steps", "tandem.batch_size", "tandem.prefill_tokens"),
    "target.verify": ("tandem.batch_size", "tandem.prefill_tokens"),
}
COLOURS = {"generate": "#8a8f98", "tandem.round": "#b9bec6", "draft.propose": "#4c9f70", "target.verify": "#3b6fb5",
           "tandem.accept": "#d08c2e", "tandem.commit": "#a05195"}  # fmt: skip
ROW, LABEL, BARS, TEXT = 18, 130, 520, 420  # pixels


class Span(Protocol):
    """What is drawn of a span."""

    @property
    def name(self) -> str: ...
    @property
    def span_id(self) -> str: ...
    @property
    def parent_id(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...
    @property
    def events(self) -> Sequence[tuple[str, Mapping[str, Any]]]: ...


def roots(spans: Sequence[Span]) -> list[Span]:
    """The requests of a trace: a caller's trace may hold several, and spans of the caller's own."""
    return [span for span in spans if span.name == "generate"]


def draw(root: Span, spans: Sequence[Span], width: int = WIDTH) -> Iterator[str]:
    """The lines of one request."""
    for depth, span, start, length in _bars(root, spans):
        begin = round(start * width)
        bar = (" " * min(begin, width - 1) + "█" * max(1, round(length * width)))[:width]
        label = "  " * depth + span.name
        yield f"{label:<18}|{bar:<{width}}| {_milliseconds(span):8.1f} ms  {_details(span)}".rstrip()


def draw_svg(root: Span, spans: Sequence[Span]) -> str:
    """One request as an SVG document."""
    rows = list(_bars(root, spans))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + BARS + TEXT}" height="{ROW * len(rows) + 8}" '
        'font-family="monospace" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (depth, span, start, length) in enumerate(rows):
        top = ROW * index + 4
        parts += [
            f'<text x="{4 + 10 * depth}" y="{top + 12}">{escape(span.name)}</text>',
            f'<rect x="{LABEL + start * BARS:.1f}" y="{top + 2}" width="{max(1.0, length * BARS):.1f}" '
            f'height="{ROW - 5}" fill="{COLOURS.get(span.name, "#cccccc")}"/>',
            f'<text x="{LABEL + BARS + 8}" y="{top + 12}">{_milliseconds(span):.1f} ms {escape(_details(span))}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _bars(root: Span, spans: Sequence[Span]) -> Iterator[tuple[int, Span, float, float]]:
    """Depth, span, and where its bar begins and how long it is, as shares of the whole."""
    below = list(_walk(root, spans, 0))
    whole = max(max(span.end_ns for _, span in below) - root.start_ns, 1)
    for depth, span in below:
        yield depth, span, max(0, span.start_ns - root.start_ns) / whole, (span.end_ns - span.start_ns) / whole


def _walk(span: Span, spans: Sequence[Span], depth: int) -> Iterator[tuple[int, Span]]:
    yield depth, span
    children = (each for each in spans if each.parent_id == span.span_id)
    for child in sorted(children, key=lambda each: each.start_ns):
        yield from _walk(child, spans, depth + 1)


def _milliseconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) / 1e6


def _details(span: Span) -> str:
    shown = [
        f"{key.rpartition('.')[2]}={_short(span.attributes[key])}"
        for key in SHOWN.get(span.name, ())
        if key in span.attributes
    ]
    events = [f"({name.removeprefix('tandem.')})" for name, _ in span.events if name not in ORDINARY_EVENTS]
    return " ".join(shown + events)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
