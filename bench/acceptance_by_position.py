"""How often the draft tokens of each position are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from .caller import Heard


def acceptance_by_position(heard: Sequence[Heard]) -> tuple[float, ...]:
    """Accepted there over drafted there, a position behind a rejection counted as not accepted."""
    statistics = [each.finish.speculation for each in heard]
    depth = max((len(each.draft_tokens_per_position) for each in statistics), default=0)
    drafted, accepted = [0] * depth, [0] * depth
    for each in statistics:
        for position, count in enumerate(each.draft_tokens_per_position):
            drafted[position] += count
            accepted[position] += each.accepted_tokens_per_position[position]
    return tuple(hits / tries if tries else 0.0 for hits, tries in zip(accepted, drafted, strict=True))


def conditional(by_position: Sequence[float]) -> tuple[float, ...]:
    """The same of the positions that were reached: what a cost model multiplies up; 0 from the first one on that none reached."""
    before = (1.0, *by_position)
    return tuple(now / earlier if earlier else 0.0 for now, earlier in zip(by_position, before, strict=False))
