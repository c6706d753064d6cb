"""The joint law of two tokens through the real draft, target and rule, against the law computed directly.

Draft and target are random Markov models on 12 tokens: their logits are a function of the last token. Each trial is one
request: a seed of its own, rounds of gamma = 3 draft tokens from `draft_tokens`, scored by `target_rows`, decided by
`accept` with the uniforms of (seed, position, lane), until it has two tokens. All trials of a configuration run in step,
as rows of one call.

The test is Pearson's chi-square over the 144 pairs, those expected fewer than 5 times taken together. Seeds are fixed, so
that a result is a result: alpha = 1e-3 for the law to pass, p < 1e-6 for a planted fault to be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from tandem import acceptance, host_rows, sampling
from tandem.acceptance import (
    DraftContractError,
    Drafted,
    Outcome,
    TargetRow,
    TokenKind,
    accept,
    check_drafted,
)
from tandem.randomness import Lane, lane_uniforms, uniforms
from tandem.sampling import SamplingParams, draft_tokens, target_rows

VOCABULARY = 12
GAMMA = 3
TRIALS = 8_500
"""Of each of 12 configurations: 102,000."""
FEWER_TRIALS = 3_000
ALPHA = 1e-3
CAUGHT = 1e-6
START = 5
"""Position of the first token; the token before it is 0."""
NO_SUPPORT = np.zeros(0, dtype=np.uint32)

Decide = Callable[[Sequence[Drafted], Sequence[TargetRow], Sequence[tuple[float, float]], Drafted | None], Outcome]


class Models(NamedTuple):
    """Logits of the next token by the last one, [V, V]."""

    draft: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Setting:
    params: SamplingParams
    support_size: int = 64
    gamma: int = GAMMA
    look_ahead: bool = True
    decide: Decide = accept


def make_params(**overrides: object) -> SamplingParams:
    fields: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "coupled": False,
        "min_length": 0,
        "end_token_ids": (),
    }
    return SamplingParams(**(fields | overrides))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models() -> Models:
    generator = torch.Generator().manual_seed(2024)
    target = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.2
    # Near enough to the target for acceptances around 0.6, and far enough for many rejections.
    return Models(target + torch.randn(VOCABULARY, VOCABULARY, generator=generator), target)


# --- A request, as the three services run it -------------------------------------------------------------------------


class Block(NamedTuple):
    drafted: list[Drafted]
    look_ahead: Drafted | None


def propose(models: Models, params: list[SamplingParams], last: list[int], position: int, how: Setting) -> list[Block]:
    steps: list[list[Drafted]] = []
    for step in range(how.gamma + how.look_ahead):
        positions = [position + step] * len(params)
        steps.append(draft_tokens(models.draft[last], params, positions, VOCABULARY, how.support_size))
        last = [drafted.token_id for drafted in steps[-1]]
    by_trial = [[step[trial] for step in steps] for trial in range(len(params))]
    return [Block(all_[: how.gamma], all_[how.gamma] if how.look_ahead else None) for all_ in by_trial]


def verify(
    models: Models, params: list[SamplingParams], last: list[int], position: int, blocks: list[Block]
) -> list[list[TargetRow]]:
    width = len(blocks[0].drafted) + 1
    contexts: list[int] = []
    supports: list[NDArray[np.uint32]] = []
    for token_id, (drafted, look_ahead) in zip(last, blocks, strict=True):
        contexts += [token_id, *(each.token_id for each in drafted)]
        supports += [each.support_ids for each in drafted]
        supports.append(NO_SUPPORT if look_ahead is None else look_ahead.support_ids)
    rows = target_rows(
        models.target[contexts],
        [each for each in params for _ in range(width)],
        [position + i for _ in params for i in range(width)],
        supports,
        VOCABULARY,
    )
    return [rows[start : start + width] for start in range(0, len(rows), width)]


def play_round(
    models: Models, params: list[SamplingParams], last: list[int], position: int, how: Setting
) -> list[list[int]]:
    """What one round commits, for each trial."""
    blocks = propose(models, params, last, position, how)
    rows = verify(models, params, last, position, blocks)
    committed = []
    for each, block, scored in zip(params, blocks, rows, strict=True):
        drawn = uniforms(each.seed, position, how.gamma + 1)[:, [Lane.ACCEPT, Lane.RESIDUAL]].tolist()
        committed.append(how.decide(block.drafted, scored, drawn, block.look_ahead).token_ids)
    return committed


def generate(models: Models, how: Setting, seeds: Sequence[int], length: int) -> NDArray[np.int64]:
    """The first `length` tokens of a request for each seed, [n, length]."""
    texts: list[list[int]] = [[] for _ in seeds]
    for done in range(length):
        # Trials of one length go on together, so that they share a position.
        ready = [trial for trial, text in enumerate(texts) if len(text) == done]
        if not ready:
            continue
        params = [replace(how.params, seed=seeds[trial]) for trial in ready]
        last = [texts[trial][-1] if texts[trial] else 0 for trial in ready]
        for trial, tokens in zip(ready, play_round(models, params, last, START + done, how), strict=True):
            texts[trial] += tokens
    return np.array([text[:length] for text in texts])


# --- The law, computed directly --------------------------------------------------------------------------------------


def law_of_row(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """p for one row, by the definitions of the parameters."""
    p = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        p[p < np.sort(p)[-params.top_k]] = 0.0
    p /= p.sum()
    falling = np.argsort(-p)
    beyond = p[falling].cumsum() - p[falling] >= params.top_p
    p[falling[beyond]] = 0.0
    p[p < params.min_p * p.max()] = 0.0
    return p / p.sum()


def law_of_pairs(models: Models, params: SamplingParams) -> NDArray[np.float64]:
    """[V, V]: the probability of each first token and each second one."""
    transitions = np.array([law_of_row(row, params) for row in models.target.double().numpy()])
    return transitions[0][:, None] * transitions


def p_value(pairs: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    counts = np.zeros_like(law)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    if counts[law == 0.0].any():
        return 0.0
    expected = law * len(pairs)
    rare = expected < 5.0
    observed, awaited = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0.0:
        observed, awaited = np.append(observed, counts[rare].sum()), np.append(awaited, expected[rare].sum())
    return float(stats.chisquare(observed, awaited, sum_check=False).pvalue)


def test_the_test_itself_is_sound(models: Models) -> None:
    """Pairs drawn from the law pass, pairs drawn from the draft's law don't."""
    rng = np.random.default_rng(0)
    law = law_of_pairs(models, make_params())
    for source, low, high in ((law, ALPHA, 1.0), (law_of_pairs(Models(*models[::-1]), make_params()), 0.0, CAUGHT)):
        cells = rng.choice(VOCABULARY**2, TRIALS, p=source.ravel())
        pairs = np.stack(np.divmod(cells, VOCABULARY), axis=-1)
        assert low <= p_value(pairs, law) <= high


SETTINGS = {
    "plain": Setting(make_params()),
    "temperature and top_k": Setting(make_params(temperature=0.7, top_k=8)),
    "top_p": Setting(make_params(top_p=0.8)),
    "min_p": Setting(make_params(min_p=0.1)),
    "truncated q": Setting(make_params(), support_size=4),
    "coupled": Setting(make_params(coupled=True)),
}


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_law_of_two_tokens(models: Models, name: str, look_ahead: bool) -> None:
    how = replace(SETTINGS[name], look_ahead=look_ahead)
    first_seed = 1_000_000 * (1 + list(SETTINGS).index(name)) + 500_000 * look_ahead
    pairs = generate(models, how, range(first_seed, first_seed + TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, how.params)) > ALPHA


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("support_size", [64, 4])
def test_the_joint_law_of_an_accepted_and_a_bonus_token(models: Models, support_size: int, look_ahead: bool) -> None:
    """gamma = 1, where the second token is the bonus token as often as not."""
    how = Setting(make_params(), support_size, gamma=1, look_ahead=look_ahead)
    first_seed = 20_000_000 + 1_000_000 * look_ahead + 500_000 * (support_size == 4)
    pairs = generate(models, how, range(first_seed, first_seed + FEWER_TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, how.params)) > ALPHA


# --- Planted faults --------------------------------------------------------------------------------------------------


def keeps_what_follows_a_rejection(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    drawn: Sequence[tuple[float, float]],
    look_ahead: Drafted | None,
) -> Outcome:
    outcome = accept(block, rows, drawn, look_ahead)
    done = len(outcome.token_ids)
    if outcome.kinds[-1] is TokenKind.RECOVERED:
        outcome.token_ids.extend(accept(block[done:], rows[done:], drawn[done:], look_ahead).token_ids)
    return outcome


def draws_the_residual_with_the_uniform_that_rejected(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    drawn: Sequence[tuple[float, float]],
    look_ahead: Drafted | None,
) -> Outcome:
    return accept(block, rows, [(u, u) for u, _ in drawn], look_ahead)


def reports_a_coarser_q(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    drawn: Sequence[tuple[float, float]],
    look_ahead: Drafted | None,
) -> Outcome:
    """Rounded after the token was drawn, and renormalised, so that it passes as a distribution."""

    def coarser(drafted: Drafted) -> Drafted:
        q = np.ceil(drafted.q * 8) / 8
        return check_drafted(drafted.token_id, drafted.support_ids, (q / q.sum()).astype(np.float32), VOCABULARY)

    return accept([coarser(drafted) for drafted in block], rows, drawn, look_ahead)


def takes_the_outside_draw_for_the_bonus(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    drawn: Sequence[tuple[float, float]],
    look_ahead: Drafted | None,
) -> Outcome:
    """The look-ahead was scored, so the last row's draw is not one from p."""
    return accept(block, rows, drawn, None)


def accepts_at_half_the_ratio(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    drawn: Sequence[tuple[float, float]],
    look_ahead: Drafted | None,
) -> Outcome:
    """Too strict looks harmless, since each token is one that the target may produce."""
    return accept(block, rows, [(min(2 * u, 1.0), residual) for u, residual in drawn], look_ahead)


FAULTS = [
    Setting(make_params(), decide=keeps_what_follows_a_rejection),
    Setting(make_params(), decide=draws_the_residual_with_the_uniform_that_rejected),
    Setting(make_params(), decide=reports_a_coarser_q),
    Setting(make_params(), support_size=4, gamma=1, decide=takes_the_outside_draw_for_the_bonus),
    Setting(make_params(), decide=accepts_at_half_the_ratio),
]


@pytest.mark.parametrize("how", FAULTS, ids=lambda how: how.decide.__name__)
def test_a_faulty_decision_is_caught(models: Models, how: Setting) -> None:
    pairs = generate(models, how, range(FEWER_TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, how.params)) < CAUGHT
    sound = generate(models, replace(how, decide=accept), range(FEWER_TRIALS), 2)
    assert p_value(sound, law_of_pairs(models, how.params)) > ALPHA


def test_a_residual_drawn_from_p_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "residual_weights", lambda p, q, outside_mass: np.append(p, outside_mass))
    pairs = generate(models, SETTINGS["plain"], range(FEWER_TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, make_params())) < CAUGHT


def test_a_draft_that_shares_the_lane_of_acceptance_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def same_lane(seeds: Sequence[int], positions: Sequence[int], lane: Lane) -> NDArray[np.float64]:
        return lane_uniforms(seeds, positions, Lane.ACCEPT if lane is Lane.DRAFT else lane)

    for reader in (sampling, host_rows):
        monkeypatch.setattr(reader, "lane_uniforms", same_lane)
    pairs = generate(models, SETTINGS["plain"], range(FEWER_TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, make_params())) < CAUGHT


def test_an_outside_mass_that_is_lost_is_caught(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated q without its one more outcome: the target may then say only what the draft thought of."""
    weights = acceptance.residual_weights
    monkeypatch.setattr(acceptance, "residual_weights", lambda p, q, outside_mass: weights(p, q, 0.0))
    pairs = generate(models, SETTINGS["truncated q"], range(FEWER_TRIALS), 2)
    assert p_value(pairs, law_of_pairs(models, make_params())) < CAUGHT


@pytest.mark.parametrize("shape", [lambda q: q * np.float32(0.99), lambda q: np.ceil(q * 64) / 64])
def test_a_q_beyond_tolerance_never_reaches_the_rule(
    models: Models, shape: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    """Not renormalised after truncation, or rounded on the way."""
    [block] = propose(models, [make_params()], [0], START, SETTINGS["truncated q"])
    for drafted in block.drafted:
        with pytest.raises(DraftContractError, match="sums to"):
            check_drafted(drafted.token_id, drafted.support_ids, shape(drafted.q).astype(np.float32), VOCABULARY)


# --- What a seed means -----------------------------------------------------------------------------------------------

COUPLED = [
    make_params(coupled=True),
    make_params(coupled=True, temperature=0.7, top_k=8),
    make_params(coupled=True, top_p=0.8),
    make_params(coupled=True, min_p=0.1),
    make_params(temperature=0.0),
]


@pytest.mark.parametrize("params", COUPLED)
def test_coupled_text_is_a_function_of_the_seed(models: Models, params: SamplingParams) -> None:
    """Of nothing else: not of gamma, the look-ahead, the draft's support, the draft, or who shares the batch."""
    seeds, length = range(100, 140), 8
    text = generate(models, Setting(params, gamma=0, look_ahead=False), seeds, length)
    for gamma in range(6):
        look_ahead, support_size = ((True, 64), (False, 3), (True, 3))[gamma % 3]
        how = Setting(params, support_size, gamma, look_ahead)
        assert (generate(models, how, seeds, length) == text).all()
    other_draft = Models(models.draft.flip(0), models.target)
    assert (generate(other_draft, Setting(params), seeds, length) == text).all()
    assert (generate(models, Setting(params), seeds[7:8], length) == text[7:8]).all()
    if params.coupled:
        assert len({tuple(each) for each in text.tolist()}) > 30
