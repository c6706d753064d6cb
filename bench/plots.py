"""`python -m bench plot FILE...`: pictures of what other commands wrote with --json. The only module that needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SIZE = (8.0, 5.0)
"""Inches."""
DOTS_PER_INCH = 120
Results = Mapping[str, Any]


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Writes a PNG for all that `results` has numbers for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (command, rows, picture) in PICTURES.items():
        if not results.get(command, {}).get(rows):
            continue
        figure = Figure(SIZE, layout="constrained")
        FigureCanvasAgg(figure)  # of its own, so that no display and no state of the process is touched
        picture(figure.subplots(), results[command])
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        yield path


def _speedup_over_gamma(axes: Axes, pair: Results) -> None:
    for number, (case, rows) in enumerate(_by_case(pair["rows"])):
        gammas = [row["gamma"] for row in rows]
        axes.plot(gammas, [row["speedup"] for row in rows], "o-", color=f"C{number}", label=case)
        axes.plot(gammas, [row["predicted_speedup"] for row in rows], ":", color=f"C{number}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _finish(axes, pair["models"], "gamma", "speed-up over plain decoding (dotted: predicted)")


def _acceptance_per_position(axes: Axes, pair: Results) -> None:
    for case, rows in _by_case(pair["rows"]):
        rates = max((row["acceptance_per_position"] for row in rows), key=len)
        axes.plot(range(1, len(rates) + 1), rates, "o-", label=case)
    axes.set_ylim(0, 1)
    _finish(axes, pair["models"], "position in the block", "accepted, of all blocks")


def _predicted_against_measured(axes: Axes, pair: Results) -> None:
    rows = [row for row in pair["rows"] if row["of_prediction"] is not None]
    for case, chosen in _by_case(rows):
        axes.plot([row["predicted_speedup"] for row in chosen], [row["speedup"] for row in chosen], "o", label=case)
    axes.axline((1.0, 1.0), slope=1.0, color="grey", linewidth=0.8)
    _finish(axes, pair["models"], "predicted speed-up", "measured")


def _simulated_against_measured(axes: Axes, simulated: Results) -> None:
    cases = simulated["checked"]
    for source in dict.fromkeys(case["source"] for case in cases):
        chosen = [case for case in cases if case["source"] == source]
        nearer = [case["measured"] * (1.0 + case["error"]) for case in chosen]
        axes.plot(nearer, [case["measured"] for case in chosen], "o", label=source)
    axes.axline((1.0, 1.0), (10.0, 10.0), color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _finish(axes, "The simulation beside what was measured", "simulated tokens/s", "measured tokens/s")


def _latency_over_concurrency(axes: Axes, serving: Results) -> None:
    styles = {"p50": "-", "p95": "--", "p99": ":"}
    for number, (gamma, cases) in enumerate(_by(serving["cases"], "gamma")):
        for quantile, style in styles.items():
            times = [case["per_output_token"][quantile] for case in cases]
            label = f"gamma {gamma}, {quantile}"
            axes.plot(
                [case["concurrency"] for case in cases], times, style, marker="o", color=f"C{number}", label=label
            )
    axes.set_xscale("log", base=2)
    _finish(axes, serving["models"], "requests at the same time", "ms for a token after the first")


def _throughput_over_concurrency(axes: Axes, serving: Results) -> None:
    for gamma, cases in _by(serving["cases"], "gamma"):
        rates = [case["tokens_per_second"] for case in cases]
        axes.plot([case["concurrency"] for case in cases], rates, "o-", label=f"gamma {gamma}")
    axes.set_xscale("log", base=2)
    _finish(axes, serving["models"], "requests at the same time", "tokens/s, all requests")


def _beside_transformers(axes: Axes, peers: Results) -> None:
    cases = list(_by_case(peers["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in peers["rows"]))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        rates = [next(row["over_peer"] for row in rows if row["way"] == way) for _, rows in cases]
        axes.bar([place + number * width for place in range(len(cases))], rates, width, label=way)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks([place + 0.4 for place in range(len(cases))], [case for case, _ in cases])
    _finish(axes, peers["models"], "", "tokens/s over transformers' assisted generation")


def _speedup_over_distance(axes: Axes, network: Results) -> None:
    for gamma, rows in _by(network["rows"], "gamma"):
        if gamma:
            axes.plot(
                [row["round_trip"] for row in rows], [row["speedup"] for row in rows], "o-", label=f"gamma {gamma}"
            )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=0.3)
    _finish(
        axes, f"{network['models']}; {network['case']}", "round trip to each worker, ms", "speed-up over plain decoding"
    )


def _by_case(rows: Sequence[Results]) -> Iterator[tuple[str, list[Results]]]:
    for case in dict.fromkeys((row["prompts"], row["temperature"]) for row in rows):
        yield f"{case[0]}, T = {case[1]:g}", [row for row in rows if (row["prompts"], row["temperature"]) == case]


def _by(rows: Sequence[Results], key: str) -> Iterator[tuple[Any, list[Results]]]:
    for value in dict.fromkeys(row[key] for row in rows):
        yield value, [row for row in rows if row[key] == value]


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


PICTURES: dict[str, tuple[str, str, Callable[[Axes, Any], None]]] = {
    "speedup-over-gamma": ("pair", "rows", _speedup_over_gamma),
    "acceptance-per-position": ("pair", "rows", _acceptance_per_position),
    "predicted-against-measured": ("pair", "rows", _predicted_against_measured),
    "simulated-against-measured": ("simulate", "checked", _simulated_against_measured),
    "latency-over-concurrency": ("serving", "cases", _latency_over_concurrency),
    "throughput-over-concurrency": ("serving", "cases", _throughput_over_concurrency),
    "beside-transformers": ("peers", "rows", _beside_transformers),
    "speedup-over-distance": ("network", "rows", _speedup_over_distance),
}
"""By name: the command whose numbers a picture shows, where in its result they are, and how they are drawn."""
