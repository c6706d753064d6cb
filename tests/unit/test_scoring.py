"""How long a round is scored again: the time counts from the first fault, since one answer may take longer than that."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from orchestrator.drafting import PLAIN
from orchestrator.errors import Unavailable
from orchestrator.prefix import Prefix
from orchestrator.scoring import TARGET, Scoring, ScoringPolicy, TargetPool
from tandem import wire
from tandem.acceptance import TargetRow
from tandem.v1 import sampling_pb2

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
    """A round whose first answer doesn't come for so long, and whose next ones fail at once."""
    pool = TargetPool((), TARGET, lambda info: None, lambda: None)
    policy = ScoringPolicy(timeout=60.0, retry=0.3)
    scoring, record, asked = Scoring("r", pool, sampling_pb2.Sampling(), policy, 512), Record(), 0

    async def verify_once(*_: Any) -> list[TargetRow]:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(first_fault_after)
        if asked <= faults:
            raise TimeoutError("no answer")
        return [ROW]

    monkeypatch.setattr(scoring, "_verify_once", verify_once)
    # A pool without replicas waits for one; here one is back at once.
    monkeypatch.setattr(pool, "wait_for_change", lambda seconds: asyncio.sleep(min(seconds, 0.01)))
    return await scoring.verify(Prefix(wire.encode_ids([1])), 0, PLAIN, record), record  # type: ignore[arg-type]


async def test_a_late_fault_leaves_all_of_the_time_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, record = await scored(monkeypatch, first_fault_after=0.5, faults=1)
    assert rows == [ROW]
    assert record.rescored == 1


async def test_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"within 0\.3 s") as ended:
        await scored(monkeypatch, first_fault_after=0.0, faults=10**9)
    assert ended.value.reason == "TARGET_UNAVAILABLE"
