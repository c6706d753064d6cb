"""The tables of `generate --stats` and `demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tandem.cli.completion import Completion

_Cell = Callable[[Completion], str]


def statistics_table(columns: Sequence[tuple[str, Completion]]) -> Table:
    """A row for each measure, a column for each completion."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for name, cell in _rows([completion for _, completion in columns]):
        table.add_row(name, *(cell(completion) for _, completion in columns))
    return table


def speed_up(speculative: Completion, plain: Completion) -> float:
    """How many times as many tokens a second speculation gave."""
    return speculative.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def _rows(completions: Sequence[Completion]) -> list[tuple[str, _Cell]]:
    rows: list[tuple[str, _Cell]] = [
        ("tokens", lambda done: str(len(done.tokens))),
        ("rounds (target passes)", lambda done: str(done.finish.speculation.rounds)),
        ("drafted", lambda done: _when_drafted(done, str(done.finish.speculation.draft_tokens))),
        ("accepted", lambda done: _when_drafted(done, str(done.finish.speculation.accepted_tokens))),
    ]
    positions = max(len(done.acceptance_per_position()) for done in completions)
    rows += [(f"acceptance at position {index + 1}", _acceptance_at(index)) for index in range(positions)]
    rows += [
        ("mean acceptance length", lambda done: f"{done.finish.speculation.mean_acceptance_length:.2f}"),
        ("tokens per round", lambda done: f"{done.tokens_per_round:.2f}"),
        ("time to first token", lambda done: f"{done.first_token_seconds * 1000:.0f} ms"),
        ("time per output token", lambda done: f"{done.seconds_per_output_token * 1000:.1f} ms"),
        ("tokens/s", lambda done: f"{done.tokens_per_second:.1f}"),
    ]
    if any(done.finish.speculation.degraded_rounds for done in completions):
        rows.append(("rounds without a draft", _degraded))
    return rows


def _acceptance_at(index: int) -> _Cell:
    def cell(done: Completion) -> str:
        rates = done.acceptance_per_position()
        return f"{rates[index]:.2f}" if index < len(rates) else "-"

    return cell


def _when_drafted(done: Completion, value: str) -> str:
    return value if done.finish.speculation.draft_tokens else "-"


def _degraded(done: Completion) -> str:
    stats = done.finish.speculation
    why = f" ({', '.join(stats.degraded_reasons)})" if stats.degraded_reasons else ""
    return f"{stats.degraded_rounds}{why}"
