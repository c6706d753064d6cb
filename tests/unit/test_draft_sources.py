"""Which source drafts a block: what a request's own tokens say of each, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.share import Share
from draft_service.sources import MODEL, NGRAM, Sources
from tandem.engine.draft_stats import DraftStats, SourceStats

WANTED = 4
RUN = 4
FOUND = [50, 51, 52, 53]
DRAFTED = [60, 61, 62, 63]


class Request:
    """One request's rounds, whose next tokens the test decides."""

    def __init__(self, wanted: int = WANTED) -> None:
        self.stats = DraftStats({MODEL: SourceStats(), NGRAM: SourceStats()})
        self.sources = Sources(self.stats)
        self.prefix = [1, 2, 3]
        self.wanted = wanted

    def round(self, *, ngram_right: int, model_right: int, found: bool = True) -> str:
        """A round in which so many of n-grams' tokens, or of the model's, would stand; returns who drafted."""
        prefix = np.array(self.prefix, dtype=np.uint32)
        self.sources.observe(prefix)
        block = FOUND if found else []
        if self.sources.prefers_ngram(prefix.size, block, RUN, self.wanted):
            self.sources.proposed(prefix.size, FOUND, RUN)
            self.prefix += [*FOUND[:ngram_right], 7]
            return NGRAM
        self.sources.proposed(prefix.size, DRAFTED)
        # Where n-grams are right, the text is theirs, whoever drafts.
        self.prefix += [*FOUND[:ngram_right], 7] if ngram_right else [*DRAFTED[:model_right], 7]
        return MODEL


def test_copied_text_is_drafted_by_ngrams_and_other_text_by_the_model() -> None:
    copying, prose = Request(), Request()
    assert {copying.round(ngram_right=4, model_right=0) for _ in range(40)} == {NGRAM}
    drafted = [prose.round(ngram_right=0, model_right=3) for _ in range(40)]
    assert set(drafted[3:]) == {MODEL}
    assert prose.stats.sources[MODEL].accepted == 3 * (drafted.count(MODEL) - 1)  # the last outcome is not known yet
    assert copying.stats.sources[NGRAM].blocks == 40
    assert copying.stats.sources[NGRAM].tokens == copying.stats.sources[NGRAM].accepted == 39 * 4


def test_ngrams_come_back_without_a_trial_as_soon_as_they_would_have_been_right() -> None:
    request = Request()
    for _ in range(30):
        request.round(ngram_right=0, model_right=1)
    counts = request.stats.sources[MODEL]
    assert counts.tokens == 2 * counts.accepted > 0, "what was cut off counts for nothing"
    drafted = [request.round(ngram_right=4, model_right=0) for _ in range(8)]
    assert drafted[-1] == NGRAM
    assert request.stats.trials == 0


def test_the_model_gets_trials_at_growing_intervals_and_comes_back() -> None:
    request = Request()
    rounds = [request.round(ngram_right=2, model_right=0) for _ in range(200)]
    at = [index for index, source in enumerate(rounds) if source == MODEL]
    gaps = np.diff(at[-4:])
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[-1] >= 60
    assert request.stats.trials == len(at)
    # Now n-grams fail, and the model does not.
    drafted = [request.round(ngram_right=0, model_right=4) for _ in range(30)]
    assert set(drafted[-6:]) == {MODEL}


def test_a_retry_of_a_trial_is_that_trial() -> None:
    request, rounds = Request(), 0
    while not request.stats.trials:
        prefix = np.array(request.prefix, dtype=np.uint32)
        request.sources.observe(prefix)
        chosen = {request.sources.prefers_ngram(prefix.size, FOUND, RUN, WANTED) for _ in range(3)}
        assert chosen == {not request.stats.trials}
        request.prefix += [*FOUND[:2], 7]
        rounds += 1
    once = Request()
    assert [once.round(ngram_right=2, model_right=0) for _ in range(rounds)][-1] == MODEL
    assert once.stats.trials == request.stats.trials == 1


def test_a_model_that_could_not_be_better_gets_no_trial() -> None:
    request = Request(wanted=WANTED)
    for _ in range(300):
        request.round(ngram_right=4, model_right=0)
    assert request.stats.trials == 0


def test_where_ngrams_find_nothing_the_model_drafts() -> None:
    request = Request()
    assert [request.round(ngram_right=0, model_right=0, found=False) for _ in range(9)] == [MODEL] * 9


def test_the_choice_looks_at_no_token_that_a_rejection_cut_off() -> None:
    """Those were drawn with the randomness of positions that the next block covers."""
    rng = np.random.default_rng(3)
    sources = [Sources(DraftStats({MODEL: SourceStats(), NGRAM: SourceStats()})) for _ in range(2)]
    prefix = np.array([1, 2, 3], dtype=np.uint32)
    seen = set()
    for _ in range(200):
        for each in sources:
            each.observe(prefix)
        run = int(rng.integers(2, 5))
        choices = {each.prefers_ngram(prefix.size, FOUND, run, WANTED) for each in sources}
        assert len(choices) == 1
        seen |= choices
        stands = int(rng.integers(0, 4))
        block = FOUND if choices == {True} else DRAFTED
        for number, each in enumerate(sources):
            cut_off = [block[stands], *(100 * number + int(token) for token in rng.integers(0, 90, 3 - stands))]
            each.proposed(prefix.size, [*block[:stands], *cut_off], run if choices == {True} else 0)
        prefix = np.concatenate([prefix, block[:stands], [7]]).astype(np.uint32)
    assert seen == {True, False}


@pytest.mark.parametrize("stood", [0, 2, 4])
def test_a_prefix_that_goes_back_takes_along_all_that_was_learnt_of_what_was_dropped(stood: int) -> None:
    """Its positions are drawn again, with the same randomness. Rounds at 3, on, and at 3 again: as if for the first time."""
    for run in (2, 3, 4):
        request, fresh = Request(), Request()
        for _ in range(40):
            request.round(ngram_right=stood, model_right=4 - stood)
        before = np.array(fresh.prefix, dtype=np.uint32)
        for _ in range(30):
            choices = []
            for each in (request.sources, fresh.sources):
                each.observe(before)
                choices.append(each.prefers_ngram(before.size, FOUND, run, WANTED))
                each.proposed(before.size, FOUND if choices[-1] else DRAFTED, run if choices[-1] else 0)
            assert choices[0] == choices[1]
            before = np.concatenate([before, FOUND[:2], DRAFTED[:1]]).astype(np.uint32)


@pytest.mark.parametrize("accepted", [0, 1, 9])
def test_a_share_is_between_what_was_expected_and_what_was_seen(accepted: int) -> None:
    share = Share(0.5)
    assert share.value == 0.5
    for _ in range(100):
        share.add(accepted, rejected=True)
    assert share.value == pytest.approx(accepted / (accepted + 1), abs=0.06)
