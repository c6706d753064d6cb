"""Rank 0 of a target in parts, without the others: what it sends them, and when it must not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tandem import config
from tandem.engine import loading, rank_group
from tandem.engine.causal_lm import CausalLM
from tandem.engine.faults import PieceNotFinite
from tandem.engine.feed import Feed
from tandem.engine.rank_group import LeadingLM, RankGroup, RankLost
from tandem.engine.ranks import Ranks
from target_service import preparation
from target_service.config import TargetConfig
from tests.engine.harness import GREEDY, Client, Engines, reason, verify_item
from tests.engine.models import over_slots, random_ids, random_model

FORWARD, CLEAR, SELF_TEST, END = 0, 2, 3, 4


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What rank 0 tells the others from now on: no process is there to hear it."""
    messages: list[list[int]] = []
    monkeypatch.setattr(rank_group.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rank_group.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(rank_group.dist, "broadcast", lambda numbers, *_, **__: messages.append(numbers.tolist()))
    return messages


@pytest.fixture
def group(sent: list[list[int]]) -> RankGroup:
    return RankGroup(Ranks(2), torch.device("cpu"))


def fail(lm: CausalLM, error: Exception) -> None:
    """The model's forwards raise it from now on."""

    def forward(_feeds: Sequence[Feed]) -> Any:
        raise error

    lm.forward = forward  # type: ignore[method-assign]


def test_nothing_is_sent_once_a_forward_failed_on_this_rank_alone(group: RankGroup, sent: list[list[int]]) -> None:
    lm = over_slots(random_model())
    leading = LeadingLM(lm, group)
    feeds = [Feed(0, 0, random_ids(1, 3), 1)]
    leading.forward(feeds)
    assert len(sent) == 2, "a command, and its numbers"
    fail(lm, MemoryError())
    with pytest.raises(RankLost, match="rank 0 failed"):
        leading.forward(feeds)
    assert len(sent) == 4
    for later in (
        lambda: leading.forward(feeds),
        lambda: leading.copy_tokens(0, 1, 0, 1),
        lambda: leading.clear_slot(0),
        leading.self_test,
    ):
        with pytest.raises(RankLost):
            later()
    group.end(in_step=True)
    assert len(sent) == 4


def test_nothing_is_sent_once_the_self_test_failed(group: RankGroup, sent: list[list[int]]) -> None:
    lm = over_slots(random_model())
    lm.self_test = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    for _ in range(2):
        with pytest.raises(RankLost):
            LeadingLM(lm, group).self_test()
    assert [message[0] for message in sent] == [SELF_TEST]


async def test_an_engine_ends_where_its_ranks_are_out_of_step(
    engines: Engines, group: RankGroup, sent: list[list[int]]
) -> None:
    """One alone may try two items of a failed forward again, each by itself: not this one."""
    lm = over_slots(random_model())
    fail(lm, torch.OutOfMemoryError("out of memory"))
    client = Client(engines.target(LeadingLM(lm, group)))  # type: ignore[arg-type]
    items = [verify_item(name, 0, random_ids(1, 9), 0, sampling=GREEDY) for name in ("a", "b")]
    client.engine.submit(client.stream, items)
    for _ in range(3000):
        await asyncio.sleep(0.02)
        if engines.deaths:
            break
    assert engines.deaths == 1
    assert len(sent) == 2
    assert sent[0][:2] == [FORWARD, 2]


async def test_what_fails_on_all_ranks_at_its_end_fails_an_item_alone(
    engines: Engines, group: RankGroup, sent: list[list[int]]
) -> None:
    lm = over_slots(random_model())
    healthy = lm.forward
    client = Client(engines.target(LeadingLM(lm, group)))  # type: ignore[arg-type]
    fail(lm, PieceNotFinite())
    assert reason(await client.ask(verify_item("a", 0, random_ids(1, 9), 0, sampling=GREEDY))) == "INTERNAL"
    lm.forward = healthy  # type: ignore[method-assign]
    assert reason(await client.ask(verify_item("b", 0, random_ids(1, 9), 0, sampling=GREEDY))) == ""
    assert [message[0] for message in sent if len(message) == 5] == [FORWARD, CLEAR, SELF_TEST, FORWARD]
    assert engines.deaths == 0


@pytest.mark.parametrize("in_step", [True, False])
def test_the_others_are_told_of_the_end_where_they_listen(
    group: RankGroup, sent: list[list[int]], in_step: bool
) -> None:
    group.end(in_step=in_step)
    assert [message[0] for message in sent] == [END] * in_step


def test_the_end_waits_for_nobody_for_long(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for_ever = threading.Event()
    monkeypatch.setattr(rank_group.dist, "broadcast", lambda *_, **__: for_ever.wait(600))
    monkeypatch.setattr(rank_group, "_END_SECONDS", 0.01)
    ended = threading.Thread(target=lambda: group.end(in_step=True), daemon=True)
    ended.start()
    ended.join(60)
    assert not ended.is_alive()
    for_ever.set()


def test_a_part_that_breaks_ends_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of `main` by an exception, the interpreter would take torch down in order, and may wait for rank 0 in it."""
    started = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)

    def broken(_options: object) -> Any:
        raise KeyError("layer")

    monkeypatch.setattr(loading, "load_part", broken)
    settings = config.load(TargetConfig, ["--model", "any", "--tensor-parallel", "2"], {})
    assert preparation.run_part(settings) == 1
