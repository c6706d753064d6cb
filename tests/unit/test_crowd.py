"""Gamma for requests that share forwards, against simulated batches of which the best fixed gamma is known.

No clock and no machine. All requests of a batch go in step: they wait for the draft steps of the longest block, and for one
forward of all blocks. Whether the draft is right at a place of a text is a property of the text.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from bench.simulation import Curve
from orchestrator.crowd import Crowd, block_worth
from orchestrator.gamma_controller import AcceptancePrior, AdaptiveGamma
from orchestrator.round_costs import ORDINARY_TOKENS, RoundCosts, RoundTimes, WorkerTime
from orchestrator.speed_estimate import SpeedEstimate

LONGEST = 8
WAVES = 5
OF_BEST, OF_PLAIN = 0.95, 0.97
"""The goals: share of the rate of the best fixed gamma, and of plain decoding."""


@dataclass(frozen=True)
class Pair:
    """Seconds of a draft's step by its requests, and of a target's forward by its tokens."""

    draft: Curve
    target: Curve
    crossing: float = 0.002
    overhead: float = 0.003


PAIRS = {
    # Measured on two cores: 135 million parameters and a draft of 7 million.
    "a CPU": Pair(
        Curve(((1, 0.0038), (5, 0.0065), (16, 0.0095), (38, 0.02))),
        Curve(((1, 0.0335), (3, 0.04), (5, 0.046), (9, 0.063), (16, 0.066), (20, 0.073), (32, 0.09), (80, 0.2))),
    ),
    "a GPU": Pair(Curve(((1, 0.0015), (64, 0.002))), Curve(((1, 0.02), (16, 0.0205), (64, 0.024), (144, 0.03)))),
    "a large target": Pair(Curve(((1, 0.003), (16, 0.005))), Curve(((1, 0.1), (16, 0.105), (80, 0.16), (144, 0.25)))),
}


class Text:
    """Where the draft is right."""

    def __init__(self, alpha: float, length: int, seed: int) -> None:
        chance = random.Random(f"{alpha} {seed}")
        self.length = length
        self._stands = [chance.random() < min(1.0, max(0.0, chance.gauss(alpha, 0.2))) for _ in range(length + LONGEST)]

    def outcome(self, done: int, block: int) -> tuple[int, list[float]]:
        """Tokens of a block that stand after `done`, and what is seen of each that is reached."""
        accepted = 0
        while accepted < block and self._stands[done + accepted]:
            accepted += 1
        return accepted, [float(self._stands[each]) for each in range(done, done + min(accepted + 1, block))]


Choose = Callable[[int, int], int]
Observe = Callable[[Sequence[float], RoundTimes], None]


@dataclass
class Request:
    """One of a batch."""

    text: Text
    choose: Choose
    observe: Observe
    begins: int
    unread: int = 20
    """Tokens of its prompt, and of what it has said, that the draft has yet to read."""
    done: int = 0
    finished: float = 0.0
    read: bool = False


@dataclass
class Batch:
    """Requests in step; their times scatter by a tenth."""

    pair: Pair
    chance: random.Random
    requests: list[Request]
    now: float = 0.0
    running: int = 0
    drafted: int = 0

    def run(self, set_running: Callable[[int], None]) -> None:
        """To the end of all."""
        rounds = 0
        while any(request.done < request.text.length for request in self.requests):
            present = [each for each in self.requests if each.begins <= rounds and each.done < each.text.length]
            set_running(len(present))
            if present:
                self._round(present)
            rounds += 1

    def _round(self, present: list[Request]) -> None:
        gammas = [each.choose(each.text.length - each.done - 1, each.unread) for each in present]
        drafts = [WorkerTime(0.0, 0, 0, 0) for _ in present]
        waits = [0.0] * len(present)
        reading = sum(each.unread for each, gamma in zip(present, gammas, strict=True) if gamma and each.unread > 1)
        chain = (self.pair.crossing if any(gammas) else 0.0) + (self.pair.draft.seconds(reading) if reading else 0.0)
        for step in range(max(gammas)):
            users = [index for index, gamma in enumerate(gammas) if gamma > step]
            seconds = self._scattered(self.pair.draft.seconds(len(users)))
            chain += seconds
            for index in users:
                draft = drafts[index]
                drafts[index] = WorkerTime(
                    draft.seconds + seconds, step + 1, draft.tokens + len(users), draft.items + len(users)
                )
                waits[index] = chain
        tokens = sum(gammas) + len(present)
        forward = self._scattered(self.pair.target.seconds(tokens))
        target = WorkerTime(forward, 1, tokens, len(present))
        prefill = 0.03 * sum(not each.read for each in present)
        whole = chain + forward + self.pair.overhead + prefill
        self.now += whole
        self.drafted += sum(gammas)
        for each, gamma, draft, wait in zip(present, gammas, drafts, waits, strict=True):
            accepted, seen = each.text.outcome(each.done, gamma)
            times = RoundTimes(
                gamma,
                wait if gamma and each.unread <= ORDINARY_TOKENS else None,
                whole - wait if each.read else None,
                draft if gamma else None,
                target,
            )
            each.read = True
            each.observe(seen, times)
            each.done += accepted + 1
            each.unread = 1 if gamma else each.unread + 1
            each.finished = self.now

    def _scattered(self, seconds: float) -> float:
        return seconds * (1 + 0.08 * self.chance.uniform(-1, 1))


@dataclass
class Orchestrator:
    """What requests share."""

    pair: Pair
    seed: int
    running: int = 0
    costs: RoundCosts = field(init=False)
    prior: AcceptancePrior = field(default_factory=AcceptancePrior)

    def __post_init__(self) -> None:
        self.costs = RoundCosts(lambda: self.running)
        self.crowd = Crowd(self.costs)
        self.chance = random.Random(self.seed)

    def _set_running(self, count: int) -> None:
        self.running = count

    def decode(self, texts: Sequence[Text]) -> tuple[float, int]:
        """The mean seconds of a token over the requests, and the tokens drafted; prefills are not counted as waiting."""
        policies = [
            AdaptiveGamma(self.costs, self.prior, LONGEST, SpeedEstimate(self.costs), self.crowd) for _ in texts
        ]
        requests = [
            Request(text, partial(_choose, policy), policy.observe, number // 4)
            for number, (text, policy) in enumerate(zip(texts, policies, strict=True))
        ]
        batch = Batch(self.pair, self.chance, requests)
        batch.run(self._set_running)
        for policy in policies:
            policy.finish()
        return pace(batch), batch.drafted


def _choose(policy: AdaptiveGamma, room: int, unread: int) -> int:
    return policy.choose(room, None, unread).gamma


def pace(batch: Batch) -> float:
    """The mean time of a token, over requests."""
    return sum(each.finished / each.text.length for each in batch.requests) / len(batch.requests)


def pace_of_fixed(pair: Pair, texts: Sequence[Text], gamma: int) -> float:
    requests = [
        Request(text, lambda room, _unread: min(gamma, room), lambda _seen, _times: None, number // 4)
        for number, text in enumerate(texts)
    ]
    batch = Batch(pair, random.Random(99), requests)
    batch.run(lambda _count: None)
    return pace(batch)


def texts_of(alphas: Sequence[float], count: int, length: int, seed: int) -> list[Text]:
    return [Text(alphas[number % len(alphas)], length, 100 * seed + number) for number in range(count)]


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("alphas", [(0.15,), (0.5,), (0.8,), (0.2, 0.35, 0.45, 0.6), (0.2, 0.2, 0.2, 0.9)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_batch_loses_little_to_the_best_fixed_gamma_and_to_none(
    pair: str, alphas: tuple[float, ...], count: int
) -> None:
    orchestrator = Orchestrator(PAIRS[pair], seed=1)
    for number in range(6):
        orchestrator.decode(texts_of(alphas, 1, 40, 900 + number))
    orchestrator.decode(texts_of(alphas, count, 64, 800))
    fixed, adaptive = [0.0] * 4, 0.0
    for wave in range(WAVES):
        texts = texts_of(alphas, count, 96, wave)
        adaptive += orchestrator.decode(texts)[0]
        for place, gamma in enumerate((0, 1, 2, 4)):
            fixed[place] += pace_of_fixed(PAIRS[pair], texts, gamma)
    assert fixed[0] / adaptive > OF_PLAIN
    assert min(fixed) / adaptive > OF_BEST


def test_a_batch_comes_back_to_drafting_when_the_draft_is_right_again() -> None:
    orchestrator = Orchestrator(PAIRS["a GPU"], seed=2)
    for wave in range(4):
        orchestrator.decode(texts_of((0.02,), 8, 96, wave))
    _, little = orchestrator.decode(texts_of((0.02,), 8, 96, 10))
    much = [orchestrator.decode(texts_of((0.9,), 8, 96, 11 + wave))[1] for wave in range(4)]
    assert little <= 8 * 96 / 8
    assert much[-1] > 8 * 96


def test_all_try_in_the_same_round_or_none() -> None:
    """One block makes the others wait for its draft step, and so do eight."""
    orchestrator, count = Orchestrator(PAIRS["a CPU"], seed=3), 8
    for wave in range(3):
        orchestrator.decode(texts_of((0.1,), count, 96, wave))
    policies = [
        AdaptiveGamma(
            orchestrator.costs, orchestrator.prior, LONGEST, SpeedEstimate(orchestrator.costs), orchestrator.crowd
        )
        for _ in range(count)
    ]
    orchestrator.running = count
    rounds = []
    for _ in range(300):
        choices = [policy.choose(1000) for policy in policies]
        rounds.append(sum(choice.gamma for choice in choices))
        assert {choice.reason for choice in choices if choice.gamma} <= {"trial"}
        for policy, choice in zip(policies, choices, strict=True):
            tokens = count + rounds[-1]
            target = WorkerTime(PAIRS["a CPU"].target.seconds(tokens) + 1e-6 * len(rounds), 1, tokens, count)
            policy.observe([0.0] * choice.gamma, RoundTimes(choice.gamma, None, target.seconds, None, target))
    assert set(rounds) == {0, count}
    assert 2 <= rounds.count(count) <= 300 / 8


def test_requests_that_are_over_are_forgotten() -> None:
    costs = RoundCosts(lambda: 2)
    crowd, request = Crowd(costs), AdaptiveGamma(costs, AcceptancePrior(), LONGEST, SpeedEstimate(costs))
    costs.observe(RoundTimes(1, 0.02, 0.1, WorkerTime(0.01, 1, 2, 2), WorkerTime(0.1, 1, 4, 2)))
    crowd.plan(request, [0.5])
    assert len(crowd._chances) == 1
    del request
    gc.collect()
    assert len(crowd._chances) == 0


def test_of_a_request_whose_rounds_may_be_drawn_again_nothing_is_left() -> None:
    orchestrator = Orchestrator(PAIRS["a GPU"], seed=5)
    orchestrator.decode(texts_of((0.3,), 4, 64, 1))
    costs, orchestrator.running = orchestrator.costs, 4
    crowd, anew = Crowd(costs), Crowd(costs)
    policy = AdaptiveGamma(costs, AcceptancePrior(), LONGEST, SpeedEstimate(costs), crowd)
    assert crowd.plan(policy, [1.0] * LONGEST).depth == LONGEST
    policy.withdraw()
    others = {AcceptancePrior(): [0.4, 0.1], AcceptancePrior(): [0.3, 0.05]}
    for other, chances in others.items():
        assert crowd.plan(other, chances) == anew.plan(other, chances)


def test_a_block_ends_before_the_first_token_that_is_not_worth_its_place() -> None:
    chances = [0.9, 0.5, 0.1]
    assert block_worth(chances, 0.0) == pytest.approx((3, 2.5))
    assert block_worth(chances, 0.2) == pytest.approx((2, 2.4))
    assert block_worth(chances, 0.95) == (0, 1.0)
    assert block_worth([], 0.5) == (0, 1.0)


def plain(waited: float, seconds: float, items: int) -> RoundTimes:
    return RoundTimes(0, None, waited, None, WorkerTime(seconds, 1, items, items))


def test_what_a_lone_forward_waits_for_the_others_is_no_overhead() -> None:
    """Fifteen requests share a forward, and one is out of step with them."""
    running = 1
    costs = RoundCosts(lambda: running)
    for _ in range(10):
        costs.observe(plain(0.033, 0.03, 1))
    running = 16
    for number in range(20):
        costs.observe(plain(0.11, 0.031, 1))
        for _ in range(15):
            costs.observe(plain(0.06, 0.055 + 1e-5 * number, 15))
    assert costs.overhead == pytest.approx(0.003, rel=0.01)


def test_how_many_share_a_forward_is_known_as_soon_as_they_run() -> None:
    running = 16
    costs = RoundCosts(lambda: running)
    for number in range(10):
        for _ in range(8):  # half of them at one of two targets
            costs.observe(plain(0.06, 0.055 + 1e-5 * number, 8))
    assert costs.batch == pytest.approx(8, rel=0.1)
    running = 4
    assert costs.batch == pytest.approx(2, rel=0.1)
    running = 1
    assert costs.batch == 1.0


def test_the_wait_for_a_forward_is_that_of_who_came_last() -> None:
    """The others waited for that one to draft, and not for the target."""
    costs = RoundCosts(lambda: 4)
    for number in range(60):
        seconds = 0.05 + 1e-5 * number
        for waited in (0.09, 0.09, 0.09, seconds):
            costs.observe(plain(waited, seconds, 4))
    assert costs.target_seconds(4) == pytest.approx(0.0506, rel=0.02)
    for number in range(200):  # two batches in turns: each waits for the other one's forward
        for _ in range(4):
            costs.observe(plain(0.1, 0.05 + 1e-5 * number, 4))
    assert costs.target_seconds(4) == pytest.approx(0.1, rel=0.1)


def test_an_overhead_that_was_too_long_falls_among_others_too() -> None:
    running = 1
    costs = RoundCosts(lambda: running)
    costs.observe(plain(0.63, 0.03, 1))  # the first one warmed something up
    running = 4
    for number in range(60):
        for _ in range(4):
            costs.observe(plain(0.06, 0.055 + 1e-6 * number, 4))
    assert costs.overhead < 0.012


def test_one_request_at_each_of_two_targets_is_alone() -> None:
    costs = RoundCosts(lambda: 2)
    for number in range(40):
        costs.observe(plain(0.04, 0.03 + 1e-6 * number, 1))
    assert costs.overhead == pytest.approx(0.01, rel=0.1)


def test_what_requests_of_other_orchestrators_take_is_no_overhead() -> None:
    costs = RoundCosts(lambda: 1)
    for number in range(40):
        costs.observe(plain(0.15, 0.05 + 1e-6 * number, 8))
    assert costs.overhead == 0.0


def test_targets_that_answer_in_turns_have_a_forward_each() -> None:
    costs = RoundCosts(lambda: 16)
    for number in range(50):
        for _ in range(8):
            for target in (0.05, 0.06):
                costs.observe(plain(0.07, target + 1e-6 * number, 8))
    assert costs.forwards == 100


def test_one_stall_is_no_wait_of_every_round() -> None:
    costs = RoundCosts(lambda: 4)
    for number in range(30):
        for _ in range(4):
            costs.observe(plain(20.0 if number == 10 else 0.05, 0.05 + 1e-6 * number, 4))
    assert costs.target_seconds(4) < 0.06


def crowd_of(count: int) -> tuple[RoundCosts, Crowd, list[AdaptiveGamma]]:
    """Requests with nothing to gain, whose trials are due."""
    costs = RoundCosts(lambda: count)
    crowd = Crowd(costs)
    for number in range(400):
        costs.observe(
            RoundTimes(1, 0.02, 0.1, WorkerTime(0.01, 1, 1, 1), plain(0.1, 0.1 + 1e-6 * number, count).target)
        )
    return costs, crowd, [AdaptiveGamma(costs, AcceptancePrior(), LONGEST, SpeedEstimate(costs)) for _ in range(count)]


def test_trials_that_bring_no_block_are_not_made_again_at_once() -> None:
    """The draft is away: nothing is heard of these rounds, so no forward goes by."""
    _, crowd, requests = crowd_of(4)
    tried = []
    for _ in range(50):
        for request in requests:
            crowd.plan(request, [0.01])
            tried.append(crowd.may_try(request))
    assert sum(tried) == len(requests)


def test_who_has_much_to_read_does_not_try_because_another_may() -> None:
    _, crowd, requests = crowd_of(4)
    for request in requests:
        crowd.plan(request, [0.01])
    assert crowd.may_try(requests[0])
    assert not crowd.may_try(requests[1], reading=1000.0)
    assert crowd.may_try(requests[2])


def test_all_go_without_a_block_now_and_then_to_know_what_that_takes() -> None:
    costs, crowd, requests = crowd_of(4)
    for request in requests:
        crowd.plan(request, [0.9])
    rested = []
    for number in range(200):
        resting = [crowd.rests() for _ in requests]
        assert resting in ([True] * 4, [False] * 4)
        rested.append(resting[0])
        tokens = 4 if resting[0] else 8
        costs.observe(RoundTimes(0, None, 0.1, None, WorkerTime(0.1 + 1e-6 * number, 1, tokens, 4)))
    assert 2 <= sum(rested) <= 4


def test_requests_with_one_seed_do_not_tell_each_other_what_they_see() -> None:
    """What one of them has seen is what the other one has yet to draw."""
    running = 2
    costs = RoundCosts(lambda: running)
    for number in range(20):
        target = WorkerTime(0.03 + 1e-6 * number, 1, 4, 2)
        costs.observe(RoundTimes(1, 0.003, 0.03, WorkerTime(0.002, 1, 1, 1), target))

    def choices(seen: float, seeds: tuple[int, int]) -> list[int]:
        crowd = Crowd(costs)
        ahead, behind = (
            AdaptiveGamma(costs, AcceptancePrior(), LONGEST, SpeedEstimate(costs), crowd, seed) for seed in seeds
        )
        for _ in range(30):
            gamma = ahead.choose(100).gamma
            ahead.observe([seen] * gamma, RoundTimes(gamma, None, None, None, None))
        return [behind.choose(100).gamma for _ in range(8)]

    assert choices(0.99, (1, 2)) != choices(0.01, (1, 2))
    assert choices(0.99, (7, 7)) == choices(0.01, (7, 7))


def test_who_has_more_to_read_tries_too_once_it_has_waited_long_enough() -> None:
    """Others with little to read try again and again, and don't put it off for ever."""
    costs, crowd, (little, much, *_) = crowd_of(4)
    tried = []
    for number in range(1000):
        for request, reading in ((little, 0.0), (much, 0.2)):  # two plain rounds
            crowd.plan(request, [0.01])
            if crowd.may_try(request, reading) and request is much:
                tried.append(number)
        costs.observe(plain(0.1, 0.1 + 1e-6 * number, 4))
    assert 2 <= len(tried) <= 1000 * 0.0075 / 2 + 1, "the first one with all the others, since none had tried for long"


def test_all_rest_although_more_share_a_forward_than_was_thought() -> None:
    costs, crowd, requests = crowd_of(4)
    for number in range(40):
        costs.observe(plain(0.1, 0.1 + 1e-6 * number, 2))
    assert costs.batch < 3
    for request in requests:
        crowd.plan(request, [0.9])
    for number in range(200):
        costs.observe(RoundTimes(0, None, 0.1, None, WorkerTime(0.2 + 1e-6 * number, 1, 4, 2)))
    assert [crowd.rests() for _ in requests] == [True] * 4
    assert not crowd.rests()
