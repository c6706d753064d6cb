"""An engine in its own thread, driven without gRPC by one stream per client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draft_service.ahead import DraftAhead
from draft_service.catch_up import CatchUp
from draft_service.combined import CombinedDrafter
from draft_service.drafter import ModelDrafter
from draft_service.ngram import NgramDrafter
from tandem.engine.causal_lm import CausalLM
from tandem.engine.draft_stats import DraftStats
from tandem.engine.engine import Engine
from tandem.engine.feed import Feed
from tandem.engine.idle import IdleWork
from tandem.engine.scheduler import StepLimits
from tandem.engine.stream import Answer, Stream
from tandem.engine.waiting_line import NO_WAITING, WaitingLimits
from tandem.structured_output import Forms
from tandem.v1 import draft_pb2, sampling_pb2, target_pb2, worker_pb2
from tandem.wire import PrefixDigest, encode_ids
from target_service.verifier import Verifier

GREEDY = sampling_pb2.Sampling(temperature=0.0, top_p=1.0, acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_REJECTION)
MAX_GAMMA = 16


def sampled(seed: int, temperature: float = 1.0, *, coupled: bool = False) -> sampling_pb2.Sampling:
    method = sampling_pb2.ACCEPTANCE_METHOD_COUPLED if coupled else sampling_pb2.ACCEPTANCE_METHOD_REJECTION
    return sampling_pb2.Sampling(temperature=temperature, top_p=1.0, seed=seed, acceptance_method=method)


def prefix(tokens: Sequence[int] | np.ndarray, base: int) -> worker_pb2.PrefixUpdate:
    encoded = encode_ids(tokens)
    digest = PrefixDigest()
    digest.append(encoded)
    return worker_pb2.PrefixUpdate(base_length=base, token_ids=encoded[4 * base :], digest=digest.digest())


def verify_item(
    request_id: str,
    epoch: int,
    tokens: Sequence[int] | np.ndarray,
    base: int,
    draft: Sequence[int] = (),
    supports: Sequence[Sequence[int]] | None = None,
    sampling: sampling_pb2.Sampling | None = None,
    salt: str = "",
) -> target_pb2.VerifyItem:
    if supports is None:
        supports = [[token] for token in draft]
    return target_pb2.VerifyItem(
        request_id=request_id,
        cache_epoch=epoch,
        prefix=prefix(tokens, base),
        sampling=sampling,
        draft_token_ids=encode_ids(draft),
        support_ids=[encode_ids(support) for support in supports],
        cache_salt=salt,
    )


def propose_item(
    request_id: str,
    epoch: int,
    tokens: Sequence[int] | np.ndarray,
    base: int,
    gamma: int,
    *,
    look_ahead: bool = False,
    sampling: sampling_pb2.Sampling | None = None,
) -> draft_pb2.ProposeItem:
    return draft_pb2.ProposeItem(
        request_id=request_id,
        cache_epoch=epoch,
        prefix=prefix(tokens, base),
        sampling=sampling,
        num_speculative_tokens=gamma,
        look_ahead=look_ahead,
    )


class Client:
    """One stream: sends items, and collects answers by (request_id, epoch)."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.engine = engine
        self.stream = Stream(self._deliver)
        self.answers: list[Answer] = []
        self._waiting: dict[tuple[str, int], asyncio.Future[Answer]] = {}

    async def ask(self, item: Any) -> Answer:
        """Sends one item and waits for its answer."""
        return (await self.ask_all([item]))[0]

    async def ask_all(self, items: Sequence[Any]) -> list[Answer]:
        """Sends items in one message and waits for all answers."""
        futures = []
        for item in items:
            future = asyncio.get_running_loop().create_future()
            self._waiting[item.request_id, item.cache_epoch] = future
            futures.append(future)
        self.engine.submit(self.stream, items)
        return await asyncio.wait_for(asyncio.gather(*futures), 240)

    def _deliver(self, answers: Sequence[Answer]) -> None:
        self.answers.extend(answers)
        for answer in answers:
            if answer.result is not None or answer.error is not None:
                waiting = self._waiting.pop((answer.request_id, answer.cache_epoch), None)
                if waiting is not None:
                    waiting.set_result(answer)


def reason(answer: Answer) -> str:
    """The reason of an error, or "" for a result."""
    if answer.error is None:
        return ""
    return worker_pb2.ErrorReason.Name(answer.error.reason).removeprefix("ERROR_REASON_")


class Engines:
    """Makes engines that end with the test, and leaves none of their state behind."""

    def __init__(self) -> None:
        self._made: list[Engine[Any]] = []
        self.deaths = 0

    def target(
        self,
        lm: CausalLM,
        *,
        reuse: bool = True,
        checked: bool = True,
        waiting: WaitingLimits = NO_WAITING,
        slots_per_stream: int = 0,
        forms: Forms | None = None,
        gather: bool = False,
        **limits: int,
    ) -> Engine[Any]:
        method = Verifier(lm.padded_vocabulary_size, MAX_GAMMA)
        return self._start(
            lm,
            method,
            limits,
            reuse=reuse,
            checked=checked,
            waiting=waiting,
            slots_per_stream=slots_per_stream,
            forms=forms,
            gather=gather,
        )

    def draft(
        self,
        lm: CausalLM,
        support_size: int = 64,
        *,
        reuse: bool = True,
        ahead: DraftAhead | None = None,
        stop_below: float = 0.0,
        **limits: int,
    ) -> Engine[Any]:
        stats = DraftStats()
        drafter = ModelDrafter(
            lm.padded_vocabulary_size, support_size, MAX_GAMMA, ahead, stop_below=stop_below, stats=stats
        )
        engine = self._start(lm, drafter, limits, reuse=reuse, displace=True, ahead=ahead)
        engine.stats.draft = stats
        return engine

    def both(self, lm: CausalLM, *, ahead: DraftAhead | None = None, chunk: int = 256) -> Engine[Any]:
        """A draft that has a model and n-grams."""
        stats = DraftStats()
        model = ModelDrafter(lm.padded_vocabulary_size, 64, MAX_GAMMA, ahead)
        ngram = NgramDrafter(lm.padded_vocabulary_size, MAX_GAMMA)
        method = CombinedDrafter(model, ngram, lm.padded_vocabulary_size, stats)
        engine = self._start(lm, method, {"prefill_chunk": chunk}, displace=True, ahead=CatchUp(chunk, stats, ahead))
        engine.stats.draft = stats
        return engine

    def custom(self, lm: CausalLM, method: Any, *, waiting: WaitingLimits = NO_WAITING, **limits: int) -> Engine[Any]:
        return self._start(lm, method, limits, waiting=waiting)

    def stop(self) -> None:
        for engine in self._made:
            engine.stop()

    def _start(
        self,
        lm: CausalLM,
        method: Any,
        limits: dict[str, int],
        *,
        reuse: bool = True,
        checked: bool = True,
        waiting: WaitingLimits = NO_WAITING,
        slots_per_stream: int = 0,
        displace: bool = False,
        ahead: IdleWork | None = None,
        forms: Forms | None = None,
        gather: bool = False,
    ) -> Engine[Any]:
        engine = Engine(
            lm,
            method,
            asyncio.get_running_loop(),
            limits=StepLimits(**limits),
            on_death=self._died,
            waiting=waiting,
            slots_per_stream=slots_per_stream,
            displace=displace,
            reuse_prefixes=reuse,
            idle=ahead,
            forms=forms,
            gather=gather,
            debug_invariants=checked,
        )
        engine.start()
        self._made.append(engine)
        return engine

    def _died(self) -> None:
        self.deaths += 1


class Gate:
    """Holds back a model's forwards until it is opened, so that what a test sends meanwhile is there in time."""

    def __init__(self, lm: CausalLM) -> None:
        self._opened = threading.Event()
        forward = lm.forward

        def held(feeds: Sequence[Feed]) -> torch.Tensor:
            self._opened.wait(60)
            return forward(feeds)

        lm.forward = held  # type: ignore[method-assign]

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()


async def settled(engine: Engine[Any]) -> None:
    """Waits until all commands posted so far have run."""
    await engine.admitted()


async def plain_greedy_by_engine(client: Client, request_id: str, prompt: np.ndarray, count: int) -> list[int]:
    """gamma = 0: each round feeds the last committed token."""
    tokens, base = [int(token) for token in prompt], 0
    for epoch in range(count):
        answer = await client.ask(verify_item(request_id, epoch, tokens, base, sampling=GREEDY if epoch == 0 else None))
        assert reason(answer) == ""
        base = answer.cached_length
        assert base == len(tokens)
        tokens.append(answer.result[0].outside_token_id)
    return tokens[prompt.size :]


async def speculative(
    target: Client,
    draft: Client,
    request_id: str,
    prompt: np.ndarray,
    rounds: Sequence[int],
    sampling: sampling_pb2.Sampling,
    *,
    look_ahead: bool = False,
) -> tuple[list[int], list[int]]:
    """The orchestrator's loop, as short as it can be; `rounds` are the gammas. Returns the tokens and how many draft
    tokens each round accepted."""
    from tandem.acceptance import accept, check_drafted
    from tandem.randomness import Lane, uniforms

    tokens = [int(token) for token in prompt]
    target_base = draft_base = 0
    accepted = []
    for epoch, gamma in enumerate(rounds):
        drafted: list[Any] = []
        if gamma:
            answer = await draft.ask(
                propose_item(request_id, epoch, tokens, draft_base, gamma, look_ahead=look_ahead, sampling=sampling)
            )
            assert reason(answer) == "", answer.error
            drafted = [check_drafted(each.token_id, each.support_ids, each.q, 1 << 32) for each in answer.result]
            # The last token of a block is not run; n-grams' are held without being run.
            assert len(tokens) + len(drafted) - answer.cached_length in (0, 1)
        verdict = await target.ask(
            verify_item(
                request_id,
                epoch,
                tokens,
                target_base,
                [each.token_id for each in drafted[:gamma]],
                [each.support_ids for each in drafted],  # type: ignore[misc]
                sampling,
            )
        )
        assert reason(verdict) == "", verdict.error
        drawn = uniforms(sampling.seed, len(tokens), gamma + 1)
        outcome = accept(
            drafted[:gamma],
            verdict.result,
            [(row[Lane.ACCEPT], row[Lane.RESIDUAL]) for row in drawn[: len(drafted[:gamma]) + 1]],
            drafted[gamma] if len(drafted) > gamma else None,
        )
        common = len(tokens) + outcome.accepted
        target_base = min(verdict.cached_length, common)
        if gamma:
            held = answer.cached_length
            matches = len(outcome.token_ids) > outcome.accepted and len(drafted) > outcome.accepted
            same = matches and outcome.token_ids[outcome.accepted] == drafted[outcome.accepted].token_id
            draft_base = min(held, common + (1 if same else 0))
        tokens += outcome.token_ids
        draft_base = min(draft_base, len(tokens) - 1)
        accepted.append(outcome.accepted)
    return tokens[prompt.size :], accepted
