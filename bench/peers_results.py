"""What `python -m bench peers` finds out, and how it follows from what each way made of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .statistic import median
from .tables import Goal, results_table

PLAIN, PEER = "Tandem 0", "transformers, assisted"
GOAL = 1.25
"""Times the tokens a second of transformers' assisted generation, for the best of Tandem's ways."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One prompt decoded in one way."""

    token_ids: tuple[int, ...]
    arrivals: tuple[float, ...]
    """Seconds from the call on, of each response."""
    tokens: tuple[int, ...]
    """Tokens of each response."""

    @property
    def tokens_per_second(self) -> float:
        """Of the whole request, the prompt's reading included."""
        return sum(self.tokens) / self.arrivals[-1]


@dataclass(frozen=True, slots=True)
class PeersRow:
    """One way to decode one class of prompts at one temperature. Speed-ups are medians of the turns' own ratios."""

    prompts: str
    temperature: float
    way: str
    turns: int
    tokens_per_second: float
    first_token: float
    """Milliseconds."""
    tokens_per_step: float
    """Of a response."""
    over_plain: float
    """Speed-up over plain decoding through Tandem."""
    over_peer: float
    """Speed-up over transformers' assisted generation."""
    same_output: bool | None
    """Greedy: whether all its outputs are those of plain decoding; None where outputs are drawn."""


@dataclass(frozen=True, slots=True)
class PeersResult:
    """All that was measured."""

    models: str
    peer_threads: int
    max_tokens: int
    rows: list[PeersRow]


def peers_rows(prompts: str, temperature: float, turns: Sequence[dict[str, Decoded]]) -> list[PeersRow]:
    """A row for each way."""
    return [_row(prompts, temperature, way, turns) for way in turns[0]]


def _row(prompts: str, temperature: float, way: str, turns: Sequence[dict[str, Decoded]]) -> PeersRow:
    mine = [turn[way] for turn in turns]

    def over(other: str) -> float:
        return median([turn[way].tokens_per_second / turn[other].tokens_per_second for turn in turns])

    same = all(turn[way].token_ids == turn[PLAIN].token_ids for turn in turns) if temperature == 0 else None
    return PeersRow(
        prompts=prompts,
        temperature=temperature,
        way=way,
        turns=len(turns),
        tokens_per_second=median([each.tokens_per_second for each in mine]),
        first_token=1000 * median([each.arrivals[0] for each in mine]),
        tokens_per_step=sum(sum(each.tokens) for each in mine) / sum(len(each.tokens) for each in mine),
        over_plain=over(PLAIN),
        over_peer=over(PEER),
        same_output=same,
    )


def peers_tables(result: PeersResult) -> list[Table]:
    """Every way beside the others, and each way over all cases."""
    title = (
        f"Tandem beside transformers: {result.models} (transformers {result.peer_threads}), {result.max_tokens} tokens"
    )
    columns = ("prompts", "T", "way", "tok/s", "TTFT ms", "tok/step", "x plain Tandem", "x assisted", "output")
    table = results_table(title, columns)
    outputs = {None: "drawn", True: "same", False: "OTHER"}
    for row in result.rows:
        table.add_row(
            row.prompts,
            f"{row.temperature:g}",
            row.way,
            f"{row.tokens_per_second:.1f}",
            f"{row.first_token:.0f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.over_plain:.2f}",
            f"{row.over_peer:.2f}",
            outputs[row.same_output],
            style="red" if row.same_output is False else "",
        )
    table.caption = (
        "tok/s: of the whole request. x: medians of the ratios within a turn. Tandem 0: plain decoding; a number: gamma. "
        "assisted: generate(assistant_model=...) with its own schedule. output: beside that of Tandem 0."
    )
    overall = results_table("All prompts: medians", ("way", "x plain Tandem", "x assisted", "slower than assisted"))
    for way in dict.fromkeys(row.way for row in result.rows):
        chosen = [row for row in result.rows if row.way == way]
        losing = [f"{row.prompts} T={row.temperature:g} {row.over_peer:.2f}x" for row in chosen if row.over_peer < 1]
        overall.add_row(
            way,
            f"{median([row.over_plain for row in chosen]):.2f}",
            f"{median([row.over_peer for row in chosen]):.2f}",
            ", ".join(losing) or "none",
        )
    return [table, overall]


def peers_goals(result: PeersResult) -> list[Goal]:
    """Faster than the peer by the issue's figure, and the same greedy output in every way."""
    best = max(
        median([row.over_peer for row in result.rows if row.way == way])
        for way in {row.way for row in result.rows if row.way.startswith("Tandem")}
    )
    compared = [row.same_output for row in result.rows if row.same_output is not None]
    return [
        Goal("best way of Tandem over assisted generation", f"{best:.2f}x", f">= {GOAL}x", best >= GOAL),
        Goal("same greedy output", f"{sum(compared)} of {len(compared)}", "all", all(compared)),
    ]
