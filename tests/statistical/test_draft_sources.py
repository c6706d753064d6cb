"""The law of a request's tokens where each block comes from the source that its own past speaks for.

As in `test_rule`, whose draft, target and rounds these are, with the real choice and real n-grams: the target is a Markov
chain, so every token has the law of its transition, whatever came before. Planted: a choice that looks at what the model
drew: n-grams take the place of a block that begins with an unlikely token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from draft_service.ngram import look_up
from draft_service.sources import MODEL, NGRAM, Sources
from tandem.acceptance import Drafted, accept
from tandem.engine.draft_stats import DraftStats, SourceStats
from tandem.randomness import Lane, uniforms
from tandem.sampling import SamplingParams
from tests.statistical.test_rule import (
    ALPHA,
    CAUGHT,
    VOCABULARY,
    Block,
    Models,
    Setting,
    law_of_row,
    make_params,
    propose,
    verify,
)

REQUESTS = 1_200
LENGTH = 12
"""Tokens of each: 14,400."""
PROMPT_LENGTH = 60
GAMMA = 3


@pytest.fixture(scope="module")
def models() -> Models:
    """A target that repeats itself, and a draft that knows something of it: both sources have their moments."""
    generator = torch.Generator().manual_seed(2025)
    target, draft = (torch.randn(VOCABULARY, VOCABULARY, generator=generator) for _ in range(2))
    return Models(1.5 * target + 0.7 * draft, 2.0 * target)


def prompt_of(models: Models) -> list[int]:
    """A text of the target."""
    rng, text = np.random.default_rng(1), [0]
    while len(text) < PROMPT_LENGTH:
        text.append(int(rng.choice(VOCABULARY, p=law_of_row(models.target[text[-1]].double().numpy(), make_params()))))
    return text


Prefers = Callable[["Request", Sequence[int], int, Sequence[Drafted]], bool]


class Request:
    """One request, and the draft's part of it."""

    def __init__(self, seed: int, prompt: Sequence[int]) -> None:
        self.params = make_params(seed=seed)
        self.text = list(prompt)
        self.stats = DraftStats({MODEL: SourceStats(), NGRAM: SourceStats()})
        self.sources = Sources(self.stats)

    def choose(self, prefers: Prefers, drafted: Sequence[Drafted]) -> list[Drafted]:
        """The block of n-grams, if it is theirs; else nothing. `drafted`: the model's."""
        prefix = np.array(self.text, dtype=np.uint32)
        self.sources.observe(prefix)
        found, run = look_up(prefix, GAMMA)
        if not prefers(self, found.tolist(), run, drafted):
            return []
        self.sources.proposed(prefix.size, found.tolist(), run)
        return [
            Drafted(token, np.array([token], dtype=np.uint32), np.ones(1, np.float32), 0) for token in found.tolist()
        ]

    def go_on(self, block: Block, rows: list, by_ngram: bool) -> None:  # type: ignore[type-arg]
        """The end of a round."""
        position, size = len(self.text), len(block.drafted)
        token_ids = [drafted.token_id for drafted in block.drafted]
        if not by_ngram:
            self.sources.proposed(position, token_ids)
        drawn = uniforms(self.params.seed, position, size + 1)[:, [Lane.ACCEPT, Lane.RESIDUAL]].tolist()
        outcome = accept(block.drafted, rows, drawn)
        self.text += outcome.token_ids


def by_the_past(request: Request, found: Sequence[int], run: int, _: Sequence[Drafted]) -> bool:
    return request.sources.prefers_ngram(len(request.text), found, run, GAMMA)


def by_what_was_drawn(_: Request, found: Sequence[int], __: int, drafted: Sequence[Drafted]) -> bool:
    return bool(found) and drafted[0].q[drafted[0].index] < 0.4


def _params_and_last(requests: Sequence[Request]) -> tuple[list[SamplingParams], list[int]]:
    return [request.params for request in requests], [request.text[-1] for request in requests]


def texts_of(models: Models, prefers: Prefers) -> tuple[NDArray[np.int64], dict[str, int]]:
    """The texts [n, LENGTH + 1], from the prompt's last token on, and how many blocks each source gave."""
    prompt = prompt_of(models)
    requests = [Request(70_000_000 + number, prompt) for number in range(REQUESTS)]
    for done in range(LENGTH):
        position = PROMPT_LENGTH + done
        groups: defaultdict[tuple[bool, int], list[tuple[Request, Block]]] = defaultdict(list)
        ready = [request for request in requests if len(request.text) == position]
        how = Setting(make_params(), gamma=GAMMA, look_ahead=False)
        by_model = propose(models, *_params_and_last(ready), position, how)
        for request, drafted in zip(ready, by_model, strict=True):
            found = request.choose(prefers, drafted.drafted)
            block = Block(found, None) if found else drafted
            groups[bool(found), len(block.drafted)].append((request, block))
        for (by_ngram, _), group in groups.items():
            rows = verify(
                models,
                *_params_and_last([request for request, _ in group]),
                position,
                [block for _, block in group],
            )
            for (request, block), scored in zip(group, rows, strict=True):
                request.go_on(block, scored, by_ngram)
    blocks_of = {name: sum(request.stats.sources[name].blocks for request in requests) for name in (MODEL, NGRAM)}
    texts = [request.text[PROMPT_LENGTH - 1 : PROMPT_LENGTH + LENGTH] for request in requests]
    return np.array(texts), blocks_of


def p_value(texts: NDArray[np.int64], models: Models) -> float:
    """Pearson's chi-square of the transitions."""
    transitions = np.array([law_of_row(row, make_params()) for row in models.target.double().numpy()])
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (texts[:, :-1].ravel(), texts[:, 1:].ravel()), 1)
    expected = counts.sum(axis=1, keepdims=True) * transitions
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    return float(stats.chi2.sf(statistic, int(often.sum()) - VOCABULARY))


@pytest.mark.parametrize("prefers", [by_the_past, by_what_was_drawn])
def test_the_law_holds_while_sources_change(models: Models, prefers: Prefers) -> None:
    texts, blocks = texts_of(models, prefers)
    assert min(blocks.values()) > 1_000, blocks
    found = p_value(texts, models)
    assert found > ALPHA if prefers is by_the_past else found < CAUGHT
