"""The law of a request's tokens where blocks end early, by the real drafter.

Draft and target are Markov models, and the request goes on as in `test_draft_sources`. Planted: a block that ends before
the first token that the draft itself drew against the odds, so that the token has a say in whether it is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.drafter import ModelDrafter, ProposeJob
from tandem.acceptance import Drafted, accept
from tandem.engine.session import Session
from tandem.randomness import Lane, uniforms
from tandem.sampling import SamplingParams
from tests.statistical.test_draft_sources import p_value
from tests.statistical.test_rule import ALPHA, CAUGHT, START, VOCABULARY, Block, Models, make_params, verify
from tests.statistical.test_rule import models as models

REQUESTS = 800
LENGTH = 12
"""Tokens of each: 9,600."""
GAMMA = 4
STOP_BELOW = 0.25

Send = Callable[[list[Drafted]], list[Drafted]]


def all_of_it(drafted: list[Drafted]) -> list[Drafted]:
    return drafted


def up_to_an_unlikely_token(drafted: list[Drafted]) -> list[Drafted]:
    return next((drafted[:i] for i, each in enumerate(drafted) if each.q[each.index] < 0.4), drafted)


def job_after(text: list[int], params: SamplingParams) -> ProposeJob:
    job = ProposeJob(0, GAMMA, GAMMA)
    job.session, job.sampling = Session("a"), params
    # What stands before the text doesn't matter to a Markov model, but for the positions.
    job.session.tokens.extend(np.array([0] * (START - 1) + text, dtype=np.uint32))
    return job


def propose(
    models: Models, drafter: ModelDrafter, texts: list[list[int]], params: list[SamplingParams]
) -> list[list[Drafted]]:
    jobs = [job_after(*each) for each in zip(texts, params, strict=True)]
    while running := [job for job in jobs if job.result is None]:
        last = [int(job.session.tokens.view(0, job.session.tokens.length)[-1]) for job in running]
        drafter.consume(running, models.draft[last])
    return [job.drafted for job in jobs]


def texts_of(models: Models, send: Send) -> tuple[NDArray[np.int64], defaultdict[int, int]]:
    """The texts [n, LENGTH + 1], with the 0 before them, and how many blocks there were of each size."""
    drafter = ModelDrafter(VOCABULARY, 64, GAMMA, stop_below=STOP_BELOW)
    params = [make_params(seed=60_000_000 + number) for number in range(REQUESTS)]
    texts, sizes = [[0] for _ in params], defaultdict[int, int](int)
    for done in range(LENGTH):
        ready = [number for number, text in enumerate(texts) if len(text) == done + 1]
        blocks = propose(models, drafter, [texts[number] for number in ready], [params[number] for number in ready])
        groups: defaultdict[int, list[tuple[int, Block]]] = defaultdict(list)
        for number, drafted in zip(ready, blocks, strict=True):
            block = Block(send(drafted), None)
            groups[len(block.drafted)].append((number, block))
        for size, group in groups.items():
            sizes[size] += len(group)
            last = [texts[number][-1] for number, _ in group]
            rows = verify(
                models, [params[number] for number, _ in group], last, START + done, [each for _, each in group]
            )
            for (number, block), scored in zip(group, rows, strict=True):
                drawn = uniforms(params[number].seed, START + done, size + 1)[:, [Lane.ACCEPT, Lane.RESIDUAL]]
                texts[number] += accept(block.drafted, scored, drawn.tolist()).token_ids
    return np.array([text[: LENGTH + 1] for text in texts]), sizes


@pytest.mark.parametrize("send", [all_of_it, up_to_an_unlikely_token])
def test_the_law_holds_while_blocks_end_early(models: Models, send: Send) -> None:
    texts, sizes = texts_of(models, send)
    assert min(sizes[size] for size in (1, 2, 3)) > 100, sizes
    found = p_value(texts, models)
    assert found > ALPHA if send is all_of_it else found < CAUGHT
