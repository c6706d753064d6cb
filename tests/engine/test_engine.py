"""Continuous batching end to end, without gRPC: exactness, retries, cancels, faults, limits."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafter import ModelDrafter
from tandem.engine.engine import Engine
from tandem.engine.feed import Feed
from tandem.engine.waiting_line import WaitingLimits
from tandem.v1 import sampling_pb2
from tests.engine.harness import (
    GREEDY,
    Client,
    Engines,
    Gate,
    plain_greedy_by_engine,
    propose_item,
    reason,
    sampled,
    settled,
    speculative,
    verify_item,
)
from tests.engine.models import VOCABULARY, over_slots, plain_greedy, random_ids, random_model


async def used(engine: Engine[Any]) -> tuple[int, int, int]:
    """Sessions, slots and running jobs."""
    await settled(engine)
    return engine.stats.sessions, engine.stats.slots_used, engine.stats.running


async def test_plain_decoding_equals_generate(engines: Engines) -> None:
    model = random_model()
    client = Client(engines.target(over_slots(model)))
    for seed in range(3):
        prompt = random_ids(seed, 5 + 10 * seed)
        assert await plain_greedy_by_engine(client, f"r{seed}", prompt, 20) == plain_greedy(model, prompt, 20)


@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("look_ahead", [False, True])
async def test_a_draft_that_is_the_target_is_always_accepted(engines: Engines, gamma: int, look_ahead: bool) -> None:
    model = random_model()
    target = Client(engines.target(over_slots(model, max_length=250)))
    # The support is the vocabulary: a coupled draw may fall on any token.
    draft = Client(engines.draft(over_slots(model, max_length=250), support_size=VOCABULARY))
    rounds = [gamma] * (120 // (gamma + 1))
    for request, sampling in {"greedy": GREEDY, "coupled": sampled(5, coupled=True)}.items():
        tokens, accepted = await speculative(
            target, draft, request, random_ids(1, 9), rounds, sampling, look_ahead=look_ahead
        )
        assert accepted == rounds
        if sampling is GREEDY:
            assert tokens == plain_greedy(model, random_ids(1, 9), len(tokens))


async def test_another_draft_changes_nothing_but_the_speed(engines: Engines) -> None:
    model = random_model()
    target = Client(engines.target(over_slots(model, max_length=250)))
    draft = Client(engines.draft(over_slots(random_model(seed=9), max_length=250)))
    prompt = random_ids(1, 9)
    for gamma in (1, 3, 8):
        tokens, accepted = await speculative(target, draft, f"g{gamma}", prompt, [gamma] * 25, GREEDY, look_ahead=True)
        assert sum(accepted) < 25 * gamma / 2
        assert tokens == plain_greedy(model, prompt, len(tokens))


async def test_the_draft_catches_up_after_rounds_without_it(engines: Engines) -> None:
    model = random_model()
    target = Client(engines.target(over_slots(model, max_length=250)))
    draft = Client(engines.draft(over_slots(model, max_length=250)))
    rounds = [3, 3, *[0] * 40, 3, 0, 3]
    _, accepted = await speculative(target, draft, "a", random_ids(1, 9), rounds, GREEDY)
    assert accepted == rounds
    assert [answer.work.steps for answer in draft.answers if answer.work] == [3] * 4, "the prefill is the first step"


async def test_solo_equals_crowd(engines: Engines) -> None:
    """Greedy and seeded requests give the same tokens alone and among others that come, go and are cancelled."""
    model, other = random_model(), random_model(seed=4)
    engine = engines.target(over_slots(model, slots=17, max_length=120), prefill_chunk=32)
    drafter = engines.draft(over_slots(other, slots=17, max_length=120), prefill_chunk=32)
    target, draft = Client(engine), Client(drafter)
    chooser = random.Random(1)

    def request(index: int) -> tuple[np.ndarray, list[int], sampling_pb2.Sampling]:
        prompt = random_ids(index, chooser.choice([2, 9, 30, 60]))
        rounds = [chooser.choice([0, 1, 3, 5]) for _ in range(5)]
        sampling = GREEDY if index % 3 == 0 else sampled(index, 0.8, coupled=index % 3 == 1)
        return prompt, rounds, sampling

    requests = [request(index) for index in range(16)]
    solo = []
    for index, (prompt, rounds, sampling) in enumerate(requests):
        solo.append(await speculative(target, draft, f"solo{index}", prompt, rounds, sampling))
        engine.release(target.stream, [f"solo{index}"])
        drafter.release(draft.stream, [f"solo{index}"])

    async def cancelled(name: str) -> None:
        client = Client(engine)
        for _ in range(5):
            engine.submit(client.stream, [verify_item(name, 0, random_ids(5, 50), 0, sampling=GREEDY)])
            await asyncio.sleep(chooser.random() * 0.01)
        engine.close(client.stream)

    for _ in range(20):
        runs = [
            speculative(target, draft, f"crowd{index}", prompt, rounds, sampling)
            for index, (prompt, rounds, sampling) in enumerate(requests)
        ]
        *crowd, _ = await asyncio.gather(*runs, cancelled("gone"))
        assert crowd == solo
        engine.release(target.stream, [f"crowd{index}" for index in range(16)])
        drafter.release(draft.stream, [f"crowd{index}" for index in range(16)])
    assert await used(engine) == (0, 0, 0)
    assert await used(drafter) == (0, 0, 0)


async def test_long_prefills_do_not_hold_up_decoding(engines: Engines) -> None:
    lm = over_slots(random_model(), max_length=250)
    batches: list[list[int]] = []
    forward, asked = lm.forward, threading.Semaphore(0)

    def recorded(feeds: Sequence[Feed]) -> torch.Tensor:
        batches.append([feed.token_ids.size for feed in feeds])
        if max(batches[-1]) > 17:
            asked.acquire(timeout=60)  # so that the client's next item is there before the next step
        return forward(feeds)

    lm.forward = recorded  # type: ignore[method-assign]
    client = Client(engines.target(lm, prefill_chunk=32))
    await client.ask(verify_item("short", 0, random_ids(1, 8), 0, sampling=GREEDY))
    batches.clear()
    long = asyncio.create_task(client.ask(verify_item("long", 0, random_ids(2, 240), 0, sampling=GREEDY)))
    await asyncio.sleep(0)
    rounds = 0
    while not long.done():
        rounds += 1
        short = asyncio.create_task(client.ask(verify_item("short", rounds, random_ids(1, 8), 7)))
        await asyncio.sleep(0)
        asked.release()
        await short
    assert [1] in batches
    assert all(max(sizes) <= 17 or (len(sizes) == 1 and sizes[0] <= 32) for sizes in batches)
    assert rounds >= 3


async def test_an_answer_does_not_depend_on_what_was_run_before(engines: Engines) -> None:
    """The same item twice, and after a detour, has the same rows."""
    client = Client(engines.target(over_slots(random_model())))
    tokens = random_ids(1, 20)
    supports = [list(range(10, 20)), list(range(30, 40)), list(range(50, 60))]

    async def rows(epoch: int, base: int) -> list[Any]:
        item = verify_item("a", epoch, tokens, base, [12, 33], supports, sampled(7))
        return (await client.ask(item)).result

    first = await rows(0, 0)
    for epoch, base in ((0, 19), (1, 19), (2, 4), (3, 0)):
        for row, expected in zip(await rows(epoch, base), first, strict=True):
            np.testing.assert_allclose(row.p, expected.p, atol=1e-6)
            assert row.outside_mass == pytest.approx(expected.outside_mass, abs=1e-5)
            assert row.outside_token_id == expected.outside_token_id


async def test_a_newer_item_takes_over_and_a_retry_is_answered_once(engines: Engines) -> None:
    lm = over_slots(random_model(), max_length=120)
    gate = Gate(lm)
    engine = engines.draft(lm, prefill_chunk=32)
    client = Client(engine)
    long = random_ids(1, 100)
    running = asyncio.create_task(client.ask(propose_item("a", 0, long, 0, 8, sampling=GREEDY)))
    await asyncio.sleep(0)
    newer = asyncio.create_task(client.ask(propose_item("a", 1, long[:50], 0, 2)))
    await asyncio.sleep(0)
    gate.open()
    assert reason(await newer) == ""
    assert reason(await running) == "CANCELLED"

    client.answers.clear()
    gate.close()
    retried = [propose_item("a", 2, long, 0, 8), propose_item("a", 2, long, 0, 8)]
    engine.submit(client.stream, retried[:1])
    answer = asyncio.create_task(client.ask(retried[1]))
    await asyncio.sleep(0)
    gate.open()
    assert reason(await answer) == ""
    assert [given.result is None for given in client.answers] == [True, False]


async def test_stale_proposals_cost_no_step(engines: Engines) -> None:
    """Three epochs of a session that come together: only the newest is run."""
    engine = engines.draft(over_slots(random_model(), max_length=120))
    client = Client(engine)
    prompts = [random_ids(seed, 12) for seed in range(3)]
    items = [propose_item("a", epoch, prompts[epoch], 0, 4, sampling=GREEDY) for epoch in range(3)]
    answers = await client.ask_all(items)
    assert [reason(answer) for answer in answers] == ["CANCELLED", "CANCELLED", ""]
    assert (engine.stats.forwards, engine.stats.tokens) == (4, 12 + 3)
    stale = await client.ask(propose_item("a", 1, prompts[1], 0, 4))
    assert reason(stale) == "STALE_CACHE_EPOCH"
    assert engine.stats.forwards == 4


async def test_errors_of_a_session(engines: Engines) -> None:
    engine = engines.target(over_slots(random_model(), slots=2, max_length=40))
    client = Client(engine)
    tokens = random_ids(1, 20)
    ask = client.ask
    assert reason(await ask(verify_item("a", 0, tokens, 0))) == "INVALID_ARGUMENT"  # no sampling
    assert reason(await ask(verify_item("a", 1, tokens, 5, sampling=GREEDY))) == "CACHE_MISS"
    assert reason(await ask(verify_item("", 0, tokens, 0, sampling=GREEDY))) == "INVALID_ARGUMENT"
    assert reason(await ask(verify_item("x" * 161, 0, tokens, 0, sampling=GREEDY))) == "INVALID_ARGUMENT"
    assert await used(engine) == (0, 0, 0)

    assert reason(await ask(verify_item("a", 4, tokens, 0, sampling=GREEDY))) == ""
    stale = await ask(verify_item("a", 3, tokens, 19))
    assert reason(stale) == "STALE_CACHE_EPOCH"
    assert stale.error is not None
    assert (stale.error.cache_epoch, stale.error.cached_length) == (4, 20)
    assert reason(await ask(verify_item("a", 5, random_ids(2, 41), 0))) == "CONTEXT_EXCEEDED"
    assert reason(await ask(verify_item("a", 6, tokens, 19))) == ""  # the cache is as it was
    diverged = verify_item("a", 7, tokens, 19)
    diverged.prefix.digest = b"00000000"
    assert reason(await ask(diverged)) == "PREFIX_DIVERGED"
    assert reason(await ask(verify_item("a", 8, tokens, 19))) == "CACHE_MISS"
    assert reason(await ask(verify_item("a", 9, tokens, 0))) == ""

    assert reason(await ask(verify_item("b", 0, tokens, 0, sampling=GREEDY))) == ""
    assert reason(await ask(verify_item("c", 0, tokens, 0, sampling=GREEDY))) == "RESOURCE_EXHAUSTED"
    engine.release(client.stream, ["a", "unknown"])
    assert reason(await ask(verify_item("c", 1, tokens, 0, sampling=GREEDY))) == ""


def asking(**fields: Any) -> sampling_pb2.Sampling:
    return sampling_pb2.Sampling(temperature=1, top_p=1, acceptance_method=1, **fields)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"draft": list(range(3, 20))}, "draft_token_ids"),
        ({"draft": [VOCABULARY]}, "draft_token_ids"),
        ({"draft": [3, 4], "supports": [[3]]}, "support_ids"),
        ({"draft": [3], "supports": [[3], [4], [5]]}, "support_ids"),
        ({"draft": [3], "supports": [[3, 4, 3]]}, "support_ids"),
        ({"draft": [3], "supports": [[3, VOCABULARY]]}, "support_ids"),
        ({"draft": [3, 4], "supports": [[3], [4, 4]]}, "support_ids"),
        ({"sampling": sampling_pb2.Sampling(temperature=-1, top_p=1, acceptance_method=1)}, "temperature"),
        ({"sampling": sampling_pb2.Sampling(temperature=1, top_p=0, acceptance_method=1)}, "top_p"),
        ({"sampling": sampling_pb2.Sampling(temperature=1, top_p=1)}, "acceptance_method"),
        ({"sampling": asking(banned_token_ids=range(1025))}, "banned_token_ids"),
        ({"sampling": asking(allowed_token_ids=[VOCABULARY])}, "leaves no token"),
        ({"sampling": asking(bad_words=[sampling_pb2.TokenSequence()])}, "bad_words"),
        ({"sampling": asking(repetition_penalty=float("nan"))}, "repetition_penalty"),
        ({"sampling": asking(bias_token_ids=[1], biases=[float("inf")])}, "biases"),
        ({"sampling": asking(logprobs=True, logprobs_mode=1, top_logprobs=10**9)}, "top_logprobs"),
    ],
)
async def test_a_broken_verification_names_its_field(engines: Engines, change: dict[str, Any], field: str) -> None:
    client = Client(engines.target(over_slots(random_model())))
    item = verify_item("a", 0, random_ids(1, 9), 0, **{"sampling": GREEDY, **change})
    answer = await client.ask(item)
    assert reason(answer) == "INVALID_ARGUMENT"
    assert answer.error is not None
    assert field in answer.error.message
    assert len(answer.error.message) < 300
    assert await used(client.engine) == (0, 0, 0)


async def test_supports_of_half_an_id_are_invalid(engines: Engines) -> None:
    client = Client(engines.target(over_slots(random_model())))
    item = verify_item("a", 0, random_ids(1, 9), 0, [3], sampling=GREEDY)
    item.support_ids[:] = [b"\x03\x00", b"\x04\x00"]
    assert reason(await client.ask(item)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("gamma", [0, 17, 2**32 - 1])
async def test_a_proposal_of_no_size_or_too_large_is_invalid(engines: Engines, gamma: int) -> None:
    client = Client(engines.draft(over_slots(random_model())))
    answer = await client.ask(propose_item("a", 0, random_ids(1, 9), 0, gamma, sampling=GREEDY))
    assert reason(answer) == "INVALID_ARGUMENT"
    assert answer.error is not None
    assert "num_speculative_tokens" in answer.error.message


async def test_the_context_is_usable_to_its_end(engines: Engines) -> None:
    lm = over_slots(random_model(), max_length=40)
    target, draft = Client(engines.target(lm)), Client(engines.draft(over_slots(random_model(), max_length=40)))
    for gamma in (1, 4):
        prompt = random_ids(1, 40 - gamma)
        block = await draft.ask(propose_item(f"g{gamma}", 0, prompt, 0, gamma, look_ahead=True, sampling=GREEDY))
        assert len(block.result) == gamma + 1
        verdict = await target.ask(verify_item(f"g{gamma}", 0, prompt, 0, [5] * gamma, sampling=GREEDY))
        assert (len(verdict.result), verdict.cached_length) == (gamma + 1, 40)
        too_long = await target.ask(verify_item(f"g{gamma}", 1, prompt, 0, [5] * (gamma + 1)))
        assert reason(too_long) == "CONTEXT_EXCEEDED"


async def test_sessions_belong_to_their_stream(engines: Engines) -> None:
    engine = engines.target(over_slots(random_model(), slots=3))
    one, other = Client(engine), Client(engine)
    tokens = random_ids(1, 20)
    assert reason(await one.ask(verify_item("same", 5, tokens, 0, sampling=GREEDY))) == ""
    assert reason(await other.ask(verify_item("same", 0, tokens, 19, sampling=GREEDY))) == "CACHE_MISS"
    assert reason(await other.ask(verify_item("same", 0, tokens, 0, sampling=GREEDY))) == ""
    engine.release(other.stream, ["same"])
    assert reason(await one.ask(verify_item("same", 6, tokens, 19))) == ""
    engine.close(one.stream)
    assert await used(engine) == (0, 0, 0)


async def test_release_and_close_end_what_runs(engines: Engines) -> None:
    lm = over_slots(random_model(), max_length=250)
    gate = Gate(lm)
    engine = engines.draft(lm, prefill_chunk=32)
    client, leaver = Client(engine), Client(engine)
    running = asyncio.create_task(client.ask(propose_item("a", 0, random_ids(1, 200), 0, 16, sampling=GREEDY)))
    engine.submit(leaver.stream, [propose_item("a", 0, random_ids(2, 200), 0, 16, sampling=GREEDY)])
    await asyncio.sleep(0)
    engine.release(client.stream, ["a"])
    engine.close(leaver.stream)
    gate.open()
    assert reason(await running) == "CANCELLED"
    assert await used(engine) == (0, 0, 0)
    assert leaver.answers == []


class Sick(ModelDrafter):
    """Fails for one request, as rows without a finite logit would."""

    def consume(self, jobs: Sequence[Any], logits: torch.Tensor) -> None:
        if any(job.session.request_id == "sick" for job in jobs):
            raise ValueError("row 3: the logits make no distribution")
        super().consume(jobs, logits)


async def test_one_bad_item_fails_alone(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model()
    engine = engines.custom(over_slots(model), Sick(VOCABULARY, 64, 16))
    client = Client(engine)
    prompts = {name: random_ids(index, 12) for index, name in enumerate(["a", "sick", "b"])}
    items = [propose_item(name, 0, prompt, 0, 4, sampling=GREEDY) for name, prompt in prompts.items()]
    a, sick, b = await client.ask_all(items)
    assert reason(sick) == "INTERNAL"
    assert sick.error is not None
    assert "distribution" not in sick.error.message
    assert any("no distribution" in str(record.exc_info) for record in caplog.records)
    for answer, name in ((a, "a"), (b, "b")):
        assert [each.token_id for each in answer.result] == plain_greedy(model, prompts[name], 4)
    assert reason(await client.ask(propose_item("sick", 1, prompts["sick"], 11, 4))) == "CACHE_MISS"
    assert engines.deaths == 0


async def test_a_forward_that_fails_is_survived(engines: Engines) -> None:
    lm = over_slots(random_model())
    healthy, failures = lm.forward, iter(range(3))

    def forward(feeds: Sequence[Feed]) -> torch.Tensor:
        if next(failures, None) is not None:
            raise RuntimeError("out of memory")
        return healthy(feeds)

    lm.forward = forward  # type: ignore[method-assign]
    client = Client(engines.target(lm))
    tokens = random_ids(1, 9)
    items = [verify_item(name, 0, tokens, 0, sampling=GREEDY) for name in ("a", "b", "c")]
    answers = await client.ask_all(items)  # together, then "a" and "b" alone fail
    assert [reason(answer) for answer in answers] == ["INTERNAL", "INTERNAL", ""]
    assert reason(await client.ask(verify_item("a", 1, tokens, 0))) == ""


async def test_what_a_failed_step_left_does_not_reach_the_next_request(engines: Engines) -> None:
    """Keys and values that are not finite have no weight where they are masked, and 0 times NaN is NaN."""
    model = random_model()
    lm = over_slots(model)
    healthy = lm.forward
    sick = random_ids(9, 40)

    def forward(feeds: Sequence[Feed]) -> torch.Tensor:
        logits = healthy(feeds)
        for index, feed in enumerate(feeds):
            if np.array_equal(feed.token_ids, sick):
                for layer in lm.cache.layers:
                    layer.keys[feed.slot, :40] = layer.values[feed.slot, :40] = np.nan
                logits[index] = np.nan
        return logits

    lm.forward = forward  # type: ignore[method-assign]
    client = Client(engines.target(lm, short_feed=40))
    bad = await client.ask(verify_item("sick", 0, sick, 0, sampling=GREEDY))
    assert reason(bad) == "INTERNAL"
    client.engine.release(client.stream, ["sick"])
    prompts = {"short": random_ids(1, 5), "long": random_ids(2, 40)}  # in one forward
    items = [verify_item(name, 0, prompt, 0, sampling=GREEDY) for name, prompt in prompts.items()]
    for answer, prompt in zip(await client.ask_all(items), prompts.values(), strict=True):
        assert reason(answer) == ""
        assert [answer.result[0].outside_token_id] == plain_greedy(model, prompt, 1)
    assert client.engine.stats.failed_forwards == 1, "none had to be run again, each job alone"


@pytest.mark.parametrize("waited", [False, True])
async def test_an_item_that_cannot_begin_is_answered_once(engines: Engines, waited: bool) -> None:
    """Whether its session gets a slot at once, or after a wait."""

    class Unable(ModelDrafter):
        def begin(self, job: Any) -> None:
            if job.session.request_id == "unable" and job.cache_epoch == 0:
                raise ValueError("no")
            super().begin(job)

    model = random_model()
    method = Unable(VOCABULARY, 64, 16)
    engine = engines.custom(over_slots(model, slots=1), method, waiting=WaitingLimits(5, 30))
    client = Client(engine)
    prompt = random_ids(1, 9)
    if waited:
        await client.ask(propose_item("holder", 0, prompt, 0, 2, sampling=GREEDY))
    unable = asyncio.create_task(client.ask(propose_item("unable", 0, prompt, 0, 2, sampling=GREEDY)))
    await asyncio.sleep(0)
    engine.release(client.stream, ["holder"])
    assert reason(await unable) == "INTERNAL"
    await settled(engine)
    assert not engine._jobs
    again = await client.ask(propose_item("unable", 1, prompt, 0, 2, sampling=GREEDY))
    assert [each.token_id for each in again.result] == plain_greedy(model, prompt, 2)
    assert [answer.cache_epoch for answer in client.answers if answer.request_id == "unable"] == [0, 1]
    engine.release(client.stream, ["unable"])
    assert await used(engine) == (0, 0, 0)


async def test_a_chunk_of_prefill_is_over_before_the_next_forward(engines: Engines) -> None:
    """On a GPU a forward returns before it is done: one whose logits are not read is waited for, in its own time."""
    lm = over_slots(random_model(), max_length=250)
    forward, synchronize = lm.forward, lm.synchronize
    pending: list[Feed] = []
    waits: list[int] = []

    def launched(feeds: Sequence[Feed]) -> torch.Tensor:
        assert not pending
        pending.extend(feed for feed in feeds if not feed.rows)
        return forward(feeds)

    def done() -> None:
        waits.append(len(pending))
        pending.clear()
        synchronize()

    lm.forward, lm.synchronize = launched, done  # type: ignore[method-assign]
    client = Client(engines.target(lm, prefill_chunk=32))
    answer = await client.ask(verify_item("a", 0, random_ids(1, 120), 0, sampling=GREEDY))
    assert reason(answer) == ""
    assert waits == [1] * (answer.work.steps - 1)
    assert len(waits) >= 3


async def test_forwards_are_halved_when_memory_runs_out(engines: Engines) -> None:
    lm = over_slots(random_model(), slots=8)
    healthy = lm.forward
    sizes: list[int] = []

    def forward(feeds: Sequence[Feed]) -> torch.Tensor:
        sizes.append(len(feeds) * max(feed.token_ids.size for feed in feeds))
        if sizes[-1] > 30:
            raise torch.OutOfMemoryError("out of memory")
        return healthy(feeds)

    lm.forward = forward  # type: ignore[method-assign]
    client = Client(engines.target(lm))
    names = [f"r{number}" for number in range(8)]

    async def round_of_all(epoch: int, base: int) -> None:
        items = [
            verify_item(name, epoch, random_ids(1, 10), base, [5] * 8, sampling=GREEDY)
            for number, name in enumerate(names)
        ]
        assert [reason(answer) for answer in await client.ask_all(items)] == [""] * 8

    await round_of_all(0, 0)
    sizes.clear()
    await round_of_all(1, 9)
    await round_of_all(2, 9)
    failed = client.engine.stats.failed_forwards
    sizes.clear()
    await round_of_all(3, 9)
    assert client.engine.stats.failed_forwards == failed, "the limit is known by now"
    assert max(sizes) <= 30
    assert max(sizes) > 9, "several still share a forward"
    await settled(client.engine)
    assert client.engine.stats.most_tokens <= 30


async def test_a_dead_device_ends_the_engine(engines: Engines) -> None:
    lm = over_slots(random_model())

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("device-side assert")

    lm.forward = lm.self_test = broken  # type: ignore[method-assign, assignment]
    client = Client(engines.target(lm))
    client.engine.submit(client.stream, [verify_item("a", 0, random_ids(1, 9), 0, sampling=GREEDY)])
    for _ in range(3000):
        await asyncio.sleep(0.02)
        if engines.deaths:
            break
    assert engines.deaths == 1


async def test_draining_refuses_new_sessions_and_serves_old_ones(engines: Engines) -> None:
    engine = engines.target(over_slots(random_model()))
    client = Client(engine)
    tokens = random_ids(1, 9)
    await client.ask(verify_item("old", 0, tokens, 0, sampling=GREEDY))
    drained = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    assert reason(await client.ask(verify_item("new", 0, tokens, 0, sampling=GREEDY))) == "DRAINING"
    assert reason(await client.ask(verify_item("old", 1, tokens, 8))) == ""
    assert not drained.done()
    engine.release(client.stream, ["old"])
    await asyncio.wait_for(drained, 60)


async def test_soak_leaves_nothing_behind(engines: Engines) -> None:
    """Streams that come, send, release, retry, err and vanish at random, more of them than there are slots."""
    engine = engines.draft(over_slots(random_model(num_hidden_layers=1), slots=6), prefill_chunk=32)
    chooser = random.Random(3)
    seen = set()

    async def orchestrator(number: int) -> None:
        client = Client(engine)
        for request in range(4):
            tokens = random_ids(number, chooser.randint(1, 70))
            items = [
                propose_item(str(request), epoch, tokens, 0, chooser.randint(1, 6), sampling=GREEDY)
                for epoch in sorted(chooser.choices(range(3), k=chooser.randint(1, 4)))
            ]
            engine.submit(client.stream, items)
            if chooser.random() < 0.5:
                await asyncio.sleep(chooser.random() * 0.005)
            if chooser.random() < 0.7:
                engine.release(client.stream, [str(request)])
        if chooser.random() < 0.5:
            await settled(engine)
        engine.close(client.stream)
        seen.update(reason(answer) for answer in client.answers)

    wanted = {"", "CANCELLED", "RESOURCE_EXHAUSTED", "CONTEXT_EXCEEDED"}
    for _ in range(20):  # on a busy machine all streams of a wave may be gone before they are served
        await asyncio.gather(*(orchestrator(number) for number in range(150)))
        assert await used(engine) == (0, 0, 0)
        if wanted <= seen:
            break
    assert wanted <= seen
    assert engines.deaths == 0
    assert not engine._jobs
    assert not engine._answers
    assert sorted([*engine._slots._empty, *engine._slots._kept]) == list(range(6))
