"""How long a round is scored again: the time counts from the first fault, since one answer may take longer than that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.drafting import PLAIN
from orchestrator.errors import Unavailable
from orchestrator.prefix import Prefix
from orchestrator.scoring import TARGET, Scoring, ScoringPolicy, TargetContractError, TargetPool
from orchestrator.verdicts import ReceivedVerdict
from tandem import wire
from tandem.acceptance import TargetRow
from tandem.v1 import sampling_pb2, target_pb2

ROW = TargetRow(np.empty(0, np.float32), 1.0, 7)


class Record:
    """Counts."""

    traceparent = ""
    trace_id = None
    rescored = 0

    def rescoring(self, _reason: str) -> None:
        self.rescored += 1


async def scored(
    monkeypatch: pytest.MonkeyPatch, first_fault_after: float, faults: int
) -> tuple[list[TargetRow], Record]:
    """A round whose first answer doesn't come for so long, and whose next ones fail at once; time passes as it is told."""
    pool = TargetPool((), TARGET, lambda info: None, lambda: None)
    policy = ScoringPolicy(timeout=60.0, retry=0.3)
    scoring, record, asked, now = Scoring("r", pool, sampling_pb2.Sampling(), policy, 512), Record(), 0, 100.0

    async def verify_once(*_: Any) -> list[TargetRow]:
        nonlocal asked, now
        asked += 1
        if asked == 1:
            now += first_fault_after
        if asked <= faults:
            raise TimeoutError("no answer")
        return [ROW]

    async def one_is_back(seconds: float) -> None:
        """A pool without replicas waits for one."""
        nonlocal now
        now += min(seconds, 0.01)

    monkeypatch.setattr(scoring, "_verify_once", verify_once)
    monkeypatch.setattr(pool, "wait_for_change", one_is_back)
    monkeypatch.setattr("orchestrator.scoring.time", SimpleNamespace(monotonic=lambda: now))
    return await scoring.verify(Prefix(wire.encode_ids([1])), 0, PLAIN, record), record  # type: ignore[arg-type]


async def test_a_late_fault_leaves_all_of_the_time_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, record = await scored(monkeypatch, first_fault_after=0.5, faults=1)
    assert rows == [ROW]
    assert record.rescored == 1


async def test_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"within 0\.3 s") as ended:
        await scored(monkeypatch, first_fault_after=0.0, faults=10**9)
    assert ended.value.reason == "TARGET_UNAVAILABLE"


VOCABULARY = 512
POLICY = ScoringPolicy(timeout=60.0, retry=0.3)
THREE = [[0.5, 0.25, 0.125], [0.0, 0.0, 1.0], [0.25, 0.0, 0.0]]


def verdict(*rows: tuple[list[float], float, int, bool]) -> target_pb2.Verdict:
    return target_pb2.Verdict(
        rows=[
            target_pb2.TargetRow(
                support_probs=wire.encode_probs(p), outside_mass=mass, outside_token_id=token, dead_end=dead
            )
            for p, mass, token, dead in rows
        ]
    )


def checked(answer: target_pb2.Verdict, sizes: list[int]) -> list[TargetRow]:
    pool = TargetPool((), TARGET, lambda info: None, lambda: None)
    scoring = Scoring("r", pool, sampling_pb2.Sampling(), POLICY, VOCABULARY)
    return scoring._checked(ReceivedVerdict.alone(answer), sizes, len(answer.rows))


@pytest.mark.parametrize("highest", [VOCABULARY - 1, VOCABULARY + 1])
async def test_rows_are_read_as_they_were_sent(highest: int) -> None:
    """Together, and one by one, as they are where an id is too high that says nothing."""
    outside = [(0.125, 7), (0.0, highest), (0.75, 8)]
    sent = [(p, *rest, index == 1) for index, (p, rest) in enumerate(zip(THREE, outside, strict=True))]
    for row, (p, mass, token, dead) in zip(checked(verdict(*sent), [3, 3, 3]), sent, strict=True):
        assert row.p.tolist() == p
        assert (row.outside_mass, row.outside_token_id, row.dead_end, row.logprobs) == (mass, token, dead, None)


@pytest.mark.parametrize("sizes", [[3, 2, 3, 3], [2, 2, 3], [3, 3, 0], [2, 3, 0], [3], [0]])
async def test_supports_may_differ_in_size(sizes: list[int]) -> None:
    rows = [([0.25] * size, 1.0 - 0.25 * size, 7, False) for size in sizes]
    assert [row.p.size for row in checked(verdict(*rows), sizes)] == sizes
    for place, size in enumerate(sizes):
        wrong = [*rows]
        wrong[place] = ([0.25] * (size + 1), 0.75 - 0.25 * size, 7, False)
        with pytest.raises(TargetContractError, match=f"{size} probabilities"):
            checked(verdict(*wrong), sizes)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (([0.5, 0.25, 0.0], 0.125, 7), "sums to"),
        (([0.5, 0.25, 0.5], 0.125, 7), "sums to"),
        (([0.5, 0.25, float("nan")], 0.125, 7), "sums to"),
        (([0.5, 0.25, 0.125], float("nan"), 7), "sums to"),
        (([0.5, 0.25, 0.5], -0.25, 7), "sums to"),
        (([0.5, 0.25, 0.125], 0.125, VOCABULARY), "outside of the vocabulary"),
        (([0.5, 0.375], 0.125, 7), "3 probabilities"),
    ],
)
async def test_a_lie_in_any_row_of_a_block_is_found(
    place: int, lie: tuple[list[float], float, int], message: str
) -> None:
    rows = [([0.5, 0.25, 0.125], 0.125, 7, False)] * 3
    rows[place] = (*lie, False)
    with pytest.raises(TargetContractError, match=message):
        checked(verdict(*rows), [3, 3, 3])
