"""Forwards of prepared shapes: what they compute, what they write, and that nothing is captured anew for a request.

Most of what inductor takes is the C++ compiler's time, so here what was captured is run as it is, by the same code up to that
call; `tests/workers/test_compiled.py` has inductor itself. The recording of a CUDA graph is run by no test: it wants a GPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tandem.engine import loading
from tandem.engine.causal_lm import CausalLM
from tandem.engine.compiled_steps import CompileOptions
from tandem.engine.faults import ModelError
from tandem.engine.feed import Feed
from tandem.engine.loading import ModelOptions, load
from tests.engine.harness import GREEDY, Client, Engines, plain_greedy_by_engine, sampled, speculative
from tests.engine.models import over_slots, plain_greedy, random_ids, random_model
from tests.engine.test_causal_lm import TOLERANCE, relative
from tests.support.services import MODELS

SLOTS, LENGTH, GAMMA = 6, 96, 5
VARIABLE = "TANDEM_SOME_COMPILE"


def options(longest: int = GAMMA + 1, rows: int = GAMMA + 1, way: str = "inductor") -> CompileOptions:
    return CompileOptions(way, VARIABLE, longest, rows)


def compiled(
    model: Any, longest: int = GAMMA + 1, rows: int = GAMMA + 1, slots: int = SLOTS, *, join: bool = True
) -> CausalLM:
    lm = over_slots(model, slots, LENGTH, join=join)
    loading._prepare_steps(lm, options(longest, rows))
    return lm


def one_shape(**changes: Any) -> CausalLM:
    return compiled(random_model(**changes), longest=1, slots=1)


def nearly(model: Any) -> Any:
    """A draft that agrees with the model now and then."""
    torch.manual_seed(9)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def as_captured(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """In the place of inductor: runs what was captured, and changes the outcome."""

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return lambda *inputs: [change(output) for output in graph.forward(*inputs)]

    return backend


@pytest.fixture(autouse=True, scope="module")
def no_inductor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", as_captured(lambda output: output))
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["joined", "as they are"])
def target_lm(no_inductor: None, request: pytest.FixtureRequest) -> CausalLM:
    """Once with layers joined, as on a CPU, and once with the model's own, as elsewhere."""
    return compiled(random_model(), join=request.param)


@pytest.fixture(scope="module")
def draft_lm(no_inductor: None) -> CausalLM:
    """Two tokens, as come after a block that stood as a whole, it runs as they are."""
    return compiled(nearly(random_model()), longest=1, rows=1)


@pytest.fixture(autouse=True)
def nothing_is_compiled_for_a_request(target_lm: CausalLM, draft_lm: CausalLM) -> Iterator[None]:
    before = [lm.compiled.stats.compilations for lm in (target_lm, draft_lm)]  # type: ignore[union-attr]
    yield
    for lm, compilations in zip((target_lm, draft_lm), before, strict=True):
        assert lm.compiled is not None
        assert (lm.compiled.stats.compilations, lm.compiled.stats.late_compilations) == (compilations, 0)


def stores(lm: CausalLM) -> list[torch.Tensor]:
    """Keys and values of all layers, [slots, columns, heads, dim]."""
    return [store for layer in lm.cache.layers for store in (layer.keys, layer.values)]


def test_few_compilations_serve_all_shapes(target_lm: CausalLM) -> None:
    assert target_lm.compiled is not None
    stats = target_lm.compiled.stats
    assert stats.shapes == 4 * 4, "1, 2, 4 and 6 rows; 1, 2, 4 and 6 tokens; one length"
    assert 1 <= stats.compilations <= 5
    assert not any(store.any() for store in stores(target_lm)), "what the start ran has left nothing"


def test_the_same_logits_and_nothing_written_beside_the_feeds(target_lm: CausalLM) -> None:
    """Any steps, with rollbacks, over the same slots: beside a model that runs them as they are."""
    plain = over_slots(random_model(), SLOTS, LENGTH)
    chooser = random.Random(3)
    held = [0] * SLOTS
    ran = target_lm.compiled.stats.forwards  # type: ignore[union-attr]
    for step in range(60):
        slots = chooser.sample(range(SLOTS), chooser.randint(1, SLOTS))
        if step % 3:
            slots.sort()
        feeds = []
        for slot in slots:
            start = chooser.randint(max(0, held[slot] - 4), held[slot])
            size = chooser.randint(1, GAMMA + 1) if start + GAMMA + 1 <= LENGTH else 1
            start = min(start, LENGTH - size)
            feeds.append(Feed(slot, start, random_ids(step * SLOTS + slot, size), chooser.randint(0, size)))
            held[slot] = start + size
        before = [store.clone() for store in stores(target_lm)]
        logits, expected = target_lm.forward(feeds), plain.forward(feeds)
        if expected.numel():
            assert relative(logits, expected) < TOLERANCE
        for store, old in zip(stores(target_lm), before, strict=True):
            for feed in feeds:
                old[feed.slot, feed.start :][: feed.token_ids.size] = store[feed.slot, feed.start :][
                    : feed.token_ids.size
                ]
            assert torch.equal(store[:, : target_lm.cache.trash], old[:, : target_lm.cache.trash])
    assert target_lm.compiled is not None
    assert target_lm.compiled.stats.forwards - ran >= 50


def test_an_answer_outlives_the_next_step(target_lm: CausalLM) -> None:
    first = target_lm.forward([Feed(0, 0, random_ids(1, 3), 3)])
    kept = first.clone()
    target_lm.forward([Feed(0, 3, random_ids(2, 3), 3)])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("gamma", [0, 1, 2, GAMMA])
async def test_greedy_equals_generate(engines: Engines, target_lm: CausalLM, draft_lm: CausalLM, gamma: int) -> None:
    target, draft = Client(engines.target(target_lm)), Client(engines.draft(draft_lm))
    ran = [lm.compiled.stats.forwards for lm in (target_lm, draft_lm)]  # type: ignore[union-attr]
    accepted = 0
    for seed in range(3):
        prompt, rounds = random_ids(seed, 9 + seed), 30 // (1 + gamma)
        expected = plain_greedy(random_model(), prompt, 30 + gamma)
        if gamma:
            tokens, each = await speculative(target, draft, f"{seed}", prompt, [gamma] * rounds, GREEDY)
            accepted += sum(each)
        else:
            tokens = await plain_greedy_by_engine(target, f"{seed}", prompt, rounds)
        assert tokens == expected[: len(tokens)]
    assert target_lm.compiled is not None
    assert target_lm.compiled.stats.forwards - ran[0] >= 3 * rounds - 3, "prompts are read as they are"
    if gamma:
        assert draft_lm.compiled is not None
        assert draft_lm.compiled.stats.forwards > ran[1]
        assert accepted > 0, "or the draft is of no use to this test"


async def test_solo_equals_crowd(engines: Engines, target_lm: CausalLM, draft_lm: CausalLM) -> None:
    target, draft = Client(engines.target(target_lm, prefill_chunk=32)), Client(engines.draft(draft_lm))

    def request(name: str, index: int) -> Any:
        sampling = GREEDY if index % 2 else sampled(index, 0.8, coupled=True)
        rounds = [(0, 1, 2, GAMMA)[(index + turn) % 4] for turn in range(6)]
        return speculative(target, draft, f"{name}{index}", random_ids(index, 4 + 7 * index), rounds, sampling)

    def release(name: str) -> None:
        for client in (target, draft):
            client.engine.release(client.stream, [f"{name}{index}" for index in range(SLOTS)])

    solo = []
    for index in range(SLOTS):
        solo.append(await request("solo", index))
        release("solo")
    for _ in range(3):
        assert await asyncio.gather(*(request("crowd", index) for index in range(SLOTS))) == solo
        release("crowd")


def test_a_shape_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", as_captured(lambda output: output * 1.01))
    with pytest.raises(ModelError, match="gives other logits") as raised:
        one_shape()
    assert raised.value.variable == VARIABLE
    assert "\n" not in str(raised.value)


def test_what_would_be_compiled_while_serving_ends_compiled_steps() -> None:
    lm = one_shape()
    assert lm.compiled is not None
    feeds = [Feed(0, 0, random_ids(1, 1), 1)]
    expected = lm.forward(feeds)
    before = lm.compiled.stats.compilations
    torch.use_deterministic_algorithms(True)  # what was compiled holds only without
    try:
        assert relative(lm.forward(feeds), expected) < TOLERANCE
    finally:
        torch.use_deterministic_algorithms(False)
    assert (lm.compiled.stats.compilations, lm.compiled.stats.late_compilations) == (before, 1)
    ran = lm.compiled.stats.forwards
    assert relative(lm.forward(feeds), expected) < TOLERANCE
    assert lm.compiled.stats.forwards == ran


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise FileNotFoundError("no such compiler: g++\nand more lines")

    monkeypatch.setattr(torch._inductor, "compile", missing)
    with pytest.raises(ModelError, match=r"^inductor can't run this model: .*no such compiler") as raised:
        one_shape()
    assert raised.value.variable == VARIABLE
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("way", ["graphs", "inductor+graphs"])
def test_a_cpu_has_no_graphs(way: str) -> None:
    with pytest.raises(ModelError, match=f"^{way.replace('+', '[+]')}: a cpu has no CUDA graphs") as raised:
        load(ModelOptions(str(MODELS / "tiny-target"), slots=2, compiled=options(way=way)))
    assert raised.value.variable == VARIABLE


def test_a_model_whose_way_hangs_on_its_values_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="inductor can't run this model") as raised:
        one_shape(rope_parameters=rope)
    assert raised.value.variable == VARIABLE


def test_sliding_windows_and_masks_that_are_added() -> None:
    model = random_model("gemma2", sliding_window=6)
    lm = compiled(model, longest=2, rows=1, slots=1)
    for start, size in ((0, 9), (9, 1), (10, 2), (12, 1)):  # the first is a prompt
        feeds = [Feed(0, start, random_ids(start, size), 1)]
        assert relative(lm.forward(feeds), lm.forward_as_it_is(feeds)) < TOLERANCE
    assert lm.compiled is not None
    assert lm.compiled.stats.forwards == 3
