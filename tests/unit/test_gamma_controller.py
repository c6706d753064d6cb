"""The adaptive gamma against simulated rounds of which the best fixed gamma is known."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from orchestrator.gamma_controller import AcceptancePrior, AdaptiveGamma, Choice, FixedGamma
from orchestrator.round_costs import FadingMean, ForwardCurve, RoundCosts, RoundTimes, WorkerTime
from orchestrator.speed_estimate import SpeedEstimate
from tandem.cost_model import expected_tokens

LONGEST = 8
PLAIN_SECONDS = 0.010
OVERHEAD = 0.0005


@dataclass
class Machine:
    """Two workers of known cost; times scatter by a tenth."""

    draft_step: float
    """C_d(1) over C_t(1)."""
    token: float
    """What one more token adds to a verification, over C_t(1)."""
    batch: int = 1
    noise: float = 0.1
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def draft_seconds(self, gamma: int) -> float:
        return gamma * self.draft_step * PLAIN_SECONDS

    def verify_seconds(self, gamma: int) -> float:
        return PLAIN_SECONDS * (1 + self.token * (self.batch * (gamma + 1) - 1))

    def round_seconds(self, gamma: int) -> float:
        return self.draft_seconds(gamma) + self.verify_seconds(gamma) + OVERHEAD

    def rate(self, gamma: int, alpha: float) -> float:
        return expected_tokens([alpha] * gamma) / self.round_seconds(gamma)

    def best(self, alpha: float) -> float:
        return max(self.rate(gamma, alpha) for gamma in range(LONGEST + 1))

    def yield_of(self, gammas: Sequence[int], alpha: float) -> float:
        """Expected tokens a second of rounds with these gammas: what the draws of a run add is nobody's merit."""
        tokens = sum(expected_tokens([alpha] * gamma) for gamma in gammas)
        return tokens / sum(self.round_seconds(gamma) for gamma in gammas)

    def times(self, gamma: int) -> RoundTimes:
        scatter = [1 + self.noise * self.chance.uniform(-1, 1) for _ in range(2)]
        draft, verify = self.draft_seconds(gamma) * scatter[0], self.verify_seconds(gamma) * scatter[1]
        return RoundTimes(
            gamma,
            draft + (OVERHEAD / 2 if gamma else 0.0),
            verify + OVERHEAD / 2,
            WorkerTime(draft, gamma, gamma * self.batch, gamma * self.batch) if gamma else None,
            WorkerTime(verify, 1, self.batch * (gamma + 1), self.batch),
        )


def run(
    controller: AdaptiveGamma,
    machine: Machine,
    rounds: int,
    alpha: Callable[[int], float],
    *,
    one_hot: bool = False,
) -> list[int]:
    """The gammas of rounds in which each position is accepted with probability alpha; `one_hot` as in greedy decoding, where the
    controller sees 0 or 1 instead of the probability."""
    chance = machine.chance
    gammas = []
    for index in range(rounds):
        gamma = controller.choose(1000).gamma
        seen: list[float] = []
        for _ in range(gamma):
            probability = min(1.0, max(0.0, chance.gauss(alpha(index), 0.15)))
            hit = chance.random() < probability
            seen.append(float(hit) if one_hot else probability)
            if not hit:
                break
        controller.observe(seen, machine.times(gamma))
        gammas.append(gamma)
    return gammas


def adaptive(longest: int = LONGEST) -> AdaptiveGamma:
    costs = RoundCosts()
    return AdaptiveGamma(costs, AcceptancePrior(), longest, SpeedEstimate(costs))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(("draft_step", "token"), [(0.05, 0.0), (0.05, 0.2), (0.2, 0.05), (0.4, 0.1), (0.9, 0.3)])
def test_it_comes_within_five_percent_of_the_best_fixed_gamma(
    draft_step: float, token: float, alpha: float, one_hot: bool
) -> None:
    machine = Machine(draft_step, token)
    controller = adaptive()
    run(controller, machine, 60, lambda _: alpha, one_hot=one_hot)
    settled = run(controller, machine, 500, lambda _: alpha, one_hot=one_hot)
    assert machine.yield_of(settled, alpha) > 0.95 * machine.best(alpha)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_batch_that_pays_for_every_token_turns_speculation_off(batch: int) -> None:
    """Alone a block is nearly free; in a batch of 16 every token of it costs, and all take the same."""
    machine = Machine(0.05, 0.06, batch)
    chosen = run(adaptive(), machine, 400, lambda _: 0.5)[100:]
    best = max(range(LONGEST + 1), key=lambda gamma: machine.rate(gamma, 0.5))
    assert (best == 0) == (batch == 16)
    assert sum(abs(gamma - best) <= 1 for gamma in chosen) > 0.9 * len(chosen)


def test_it_comes_back_from_zero_when_acceptance_rises() -> None:
    machine, controller = Machine(0.1, 0.02), adaptive()
    bad = run(controller, machine, 300, lambda _: 0.02)
    assert bad[-48:].count(0) >= 46
    good = run(controller, machine, 200, lambda _: 0.9)
    first = next(index for index in range(len(good)) if min(good[index : index + 10]) > 2)
    assert first < 120
    assert machine.yield_of(run(controller, machine, 100, lambda _: 0.9), 0.9) > 0.95 * machine.best(0.9)


def test_short_requests_come_back_together() -> None:
    """None of them can pay for a trial, before which its prompt would have to be read: what many don't spend is enough for one."""
    machine, costs, prior = Machine(0.1, 0.02), RoundCosts(), AcceptancePrior()

    def request(alpha: float) -> int:
        """Tokens that it drafts."""
        policy, drafted, unread = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs)), 0, 30
        for done in range(24):
            gamma = policy.choose(23 - done, None, unread).gamma
            unread = 1 if gamma else unread + 1
            seen = []
            while len(seen) < gamma and (not seen or seen[-1]):
                seen.append(float(machine.chance.random() < alpha))
            policy.observe(seen, machine.times(gamma))
            drafted += gamma
        policy.finish()
        return drafted

    for _ in range(60):
        request(0.02)
    assert 0 < sum(request(0.02) for _ in range(100)) < 120
    assert min([request(0.9) for _ in range(40)][20:]) > 24


def test_what_requests_have_saved_is_spent_by_those_that_end_early() -> None:
    """Each may go on for a thousand tokens, but ends after twenty: what it can spend on a trial by then, and on reading for it, isn't much."""
    machine, costs, prior = Machine(0.1, 0.02), RoundCosts(), AcceptancePrior()
    tried = set()
    for number in range(200):
        policy, unread = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs)), 300
        for done in range(20):
            gamma = policy.choose(1000 - done, None, unread).gamma
            unread = 1 if gamma else unread + 1
            seen = [float(machine.chance.random() < 0.02)] if gamma else []
            policy.observe(seen, machine.times(min(gamma, 1)))
            if gamma:
                tried.add(number)
        policy.finish()
    assert 0 < len([number for number in tried if number >= 50]) < 50, "of 150"


def test_it_does_not_oscillate() -> None:
    machine, controller = Machine(0.1, 0.05), adaptive()
    run(controller, machine, 100, lambda _: 0.7)
    gammas = [gamma for gamma in run(controller, machine, 500, lambda _: 0.7) if gamma]
    changes = sum(before != after for before, after in itertools.pairwise(gammas))
    assert changes < 50
    assert max(gammas) - min(gammas) <= 3


def test_a_request_without_use_for_the_draft_hardly_asks_it() -> None:
    machine, controller = Machine(0.6, 0.3), adaptive()
    chosen = run(controller, machine, 600, lambda _: 0.1)
    assert sum(gamma > 0 for gamma in chosen[50:]) <= 15
    assert controller.choose(1000).speedup <= 1.0


def test_a_request_starts_from_what_those_before_it_saw() -> None:
    machine, costs, prior = Machine(0.1, 0.02), RoundCosts(), AcceptancePrior()
    for alpha, expected in ((0.05, 0), (0.9, LONGEST)):
        for _ in range(12):
            controller = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs))
            run(controller, machine, 60, lambda _, alpha=alpha: alpha)
            controller.finish()
        second = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs))
        chosen = [second.choose(1000).gamma for _ in range(2)]
        assert any(abs(gamma - expected) <= 3 for gamma in chosen), (alpha, chosen)


def test_room_and_limit_are_kept() -> None:
    machine, controller = Machine(0.05, 0.0), adaptive()
    run(controller, machine, 100, lambda _: 0.95)
    assert [controller.choose(room).gamma for room in (0, 1, 2)] == [0, 1, 2]
    assert 3 < controller.choose(1000).gamma <= LONGEST
    assert [FixedGamma(4, SpeedEstimate(RoundCosts())).choose(room).gamma for room in (0, 3, 9)] == [0, 3, 4]
    assert adaptive(0).choose(5).gamma == 0


def test_a_few_tokens_that_fell_do_not_keep_blocks_short_for_good() -> None:
    """Longer blocks were tried twice, and lost at one position each time; since then nothing was asked of it."""
    machine, controller = Machine(0.05, 0.05, noise=0.0), adaptive()
    for _ in range(8):
        gamma = min(controller.choose(1000).gamma, 2)
        controller.observe([1.0] * gamma, machine.times(gamma))
    for _ in range(2):
        controller.observe([1.0, 1.0, 0.0], machine.times(4))
    assert controller._acceptance.by_position(3)[2] < 0.8
    for _ in range(60):
        controller.observe([1.0, 1.0], machine.times(2))
    assert controller._acceptance.by_position(3)[2] > 0.9


def test_the_first_rounds_of_all_stake_little() -> None:
    """Before anything is known of costs, one token is asked for, and then none."""
    controller = adaptive()
    chosen = []
    for _ in range(2):
        choice = controller.choose(1000)
        chosen.append((choice.gamma, choice.reason))
        controller.observe([1.0] * choice.gamma, Machine(0.1, 0.05).times(choice.gamma))
    assert chosen == [(1, "unknown_cost"), (0, "trial")]


def test_a_trial_is_of_what_the_draft_will_be_asked_for() -> None:
    """A block that was cut would disappoint whatever it brought, and the next trial come ever later."""
    machine, controller = Machine(0.6, 0.3), adaptive()
    run(controller, machine, 300, lambda _: 0.1)
    machine = Machine(0.05, 0.05)
    trials, rounds = [], 0
    while controller._gamma == 0:
        choice = controller.choose(1000, limit=1)
        trials += [choice.gamma] if choice.reason == "trial" else []
        controller.observe([0.95] * min(choice.gamma, 1), machine.times(min(choice.gamma, 1)))
        rounds += 1
        assert rounds < 300, trials
    assert set(trials) == {1}


def settled_on_blocks() -> tuple[Machine, RoundCosts, AcceptancePrior]:
    """What an orchestrator knows once a request has done well with blocks."""
    machine, costs, prior = Machine(0.1, 0.02), RoundCosts(), AcceptancePrior()
    first = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs))
    run(first, machine, 100, lambda _: 0.9)
    first.finish()
    return machine, costs, prior


def test_a_prompt_is_read_by_the_draft_only_for_what_it_saves() -> None:
    _, costs, prior = settled_on_blocks()
    controller = AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs))
    assert costs.reading_seconds(2000) > 8 * PLAIN_SECONDS
    assert controller.choose(8, to_read=2000) == Choice(0, "best", 1.0)
    assert controller.choose(8, to_read=2).gamma > 0
    assert controller.choose(1000, to_read=2000).gamma > 0


def test_a_trial_for_which_much_is_to_be_read_comes_later() -> None:
    def first_trial(to_read: int) -> int:
        controller, machine = adaptive(), Machine(0.3, 0.1)
        run(controller, machine, 200, lambda _: 0.02)
        for index in itertools.count():
            choice = controller.choose(100_000, to_read=to_read)
            if choice.gamma:
                assert choice.reason == "trial"
                return index
            controller.observe([], machine.times(0))
        raise AssertionError

    assert first_trial(2000) > 4 * first_trial(0)


def test_a_block_that_is_cut_is_had_again_or_given_up_as_what_is_left_of_it_pays() -> None:
    machine, controller = Machine(0.1, 0.05), adaptive()
    run(controller, machine, 100, lambda _: 0.9)
    before = controller.choose(1000).gamma
    assert before > 2
    assert controller.choose(1000, limit=1).gamma == before
    for _ in range(200):
        cut = min(controller.choose(1000, limit=1).gamma, 1)
        controller.observe([0.02] * cut, machine.times(cut))
    assert controller.choose(1000, limit=1).gamma <= 1


def test_a_worker_that_does_not_say_what_it_took_is_timed_by_the_wait() -> None:
    machine, controller = Machine(0.1, 0.02), adaptive()
    for _ in range(200):
        gamma = controller.choose(1000).gamma
        times = machine.times(gamma)
        bare = RoundTimes(times.block, times.propose_seconds, times.verify_seconds, None, None)
        controller.observe([0.85] * gamma, bare)
    assert controller.choose(1000).gamma >= 4


def test_a_draft_that_worked_ahead_makes_longer_blocks_pay() -> None:
    """With the wait for the draft gone, the best block is the longer one."""
    machine = Machine(0.3, 0.05)

    def settled(hidden: bool) -> int:
        controller = adaptive()
        for _ in range(300):
            gamma = controller.choose(1000).gamma
            times = machine.times(gamma)
            if hidden and gamma:
                times = RoundTimes(gamma, 0.0003, times.verify_seconds, WorkerTime(0.0, 0, 0, 0), times.target)
            controller.observe([0.8] * gamma, times)
            if not controller._costs.draft_known:
                controller._costs.observe(machine.times(2))
        return controller.choose(1000).gamma

    assert settled(hidden=True) > settled(hidden=False)


def test_a_round_costs_the_controller_some_ten_microseconds() -> None:
    machine, controller = Machine(0.1, 0.02), adaptive(16)
    run(controller, machine, 100, lambda _: 0.8)
    times = machine.times(4)
    spent = []
    for _ in range(7):
        began = time.thread_time()
        for _ in range(200):
            controller.choose(1000)
            controller.observe([0.8, 0.8, 0.8, 0.8], times)
        spent.append((time.thread_time() - began) / 200)
    assert min(spent) < 300e-6, spent  # ten times the figure in docs/speculation.md, for slow machines


@pytest.mark.parametrize(("draft_step", "alpha"), [(0.05, 0.8), (0.3, 0.5), (0.9, 0.1)])
def test_the_speed_estimate_of_a_fixed_gamma_is_the_speed(draft_step: float, alpha: float) -> None:
    """With a block and without one, though only the last token of each request goes without."""
    machine, speed = Machine(draft_step, 0.05), SpeedEstimate(RoundCosts())
    assert speed.now() is None
    policy = FixedGamma(4, speed)
    for _ in range(60):
        for room in (30, 25, 20, 15, 10, 5, 0):
            gamma = policy.choose(room).gamma
            seen = [alpha] * next((i + 1 for i in range(gamma) if machine.chance.random() >= alpha), gamma)
            policy.observe(seen, machine.times(gamma))
    speeds = speed.now()
    assert speeds is not None
    rounds = [4] * 6 + [0]
    assert speeds.speculative == pytest.approx(machine.yield_of(rounds, alpha), rel=0.15)
    assert speeds.plain == pytest.approx(machine.rate(0, alpha), rel=0.1)


def test_the_speed_estimate_of_an_adaptive_gamma_is_never_far_below_plain_decoding() -> None:
    costs = RoundCosts()
    speed = SpeedEstimate(costs)
    run(AdaptiveGamma(costs, AcceptancePrior(), LONGEST, speed), Machine(0.9, 0.3), 400, lambda _: 0.1)
    speeds = speed.now()
    assert speeds is not None
    assert 0.9 < speeds.speculative / speeds.plain < 1.1


def test_requests_that_want_no_blocks_have_no_part_in_the_speed_estimate() -> None:
    machine, speed = Machine(0.1, 0.05), SpeedEstimate(RoundCosts())
    for _ in range(40):
        FixedGamma(4, speed).observe([0.9] * 4, machine.times(4))
    before = speed.now()
    for _ in range(400):
        FixedGamma(0, speed).observe([], machine.times(0))
    after = speed.now()
    assert before is not None
    assert after is not None
    assert after.speculative == pytest.approx(before.speculative, rel=0.2)


def test_a_mean_of_nothing_can_rise_again() -> None:
    mean = FadingMean()
    for observed in (0.0, 0.0, 0.0, 0.0, 1.0):
        mean.add(observed)
    assert mean.value > 0.1


def test_a_forward_curve_is_read_between_and_beyond_what_was_timed() -> None:
    curve = ForwardCurve()
    assert curve.seconds(3) == 0.0
    curve.add(5, 1.0)
    assert 0.5 < curve.seconds(1) < 1.0 < curve.seconds(9) < 2.0
    for _ in range(5):
        curve.add(1, 0.5)
        curve.add(5, 1.0)
    assert curve.seconds(3) == pytest.approx(0.75, rel=0.01)
    assert curve.seconds(9) == pytest.approx(1.5, rel=0.05)
    assert curve.seconds(0.5) < 0.5
    curve.add(5, 1000.0)
    assert curve.seconds(5) < 1.2, "one stall is no trend"
    assert curve.seconds(5) / curve.seconds(1) == pytest.approx(2.0, rel=0.1)


def test_what_was_timed_while_the_machine_was_slow_says_how_sizes_compare() -> None:
    """It is three times slower for a while, during which only one size is timed, and quick again when another one is."""
    curve, chance = ForwardCurve(), random.Random(3)

    def time_one(tokens: int, slower: float) -> None:
        curve.add(tokens, slower * (1.0 + 0.1 * tokens) * (1 + 0.1 * chance.uniform(-1, 1)))

    for _ in range(10):
        for tokens in (1, 2, 4):
            time_one(tokens, 1.0)
    for _ in range(200):
        time_one(4, 3.0)
    assert curve.seconds(4) == pytest.approx(3.0 * 1.4, rel=0.1)
    assert curve.seconds(4) / curve.seconds(1) == pytest.approx(1.4 / 1.1, rel=0.1)
    for _ in range(40):
        time_one(1, 1.0)
    assert curve.seconds(4) == pytest.approx(1.4, rel=0.15)


@pytest.mark.parametrize(("share", "stall"), [(0.02, 3.0), (0.05, 20.0)])
def test_stalls_add_up_to_nothing(share: float, stall: float) -> None:
    """Neither in the level, which they would carry off without end, nor in a size that is seldom timed."""
    curve, chance = ForwardCurve(), random.Random(7)
    for number in range(20_000):
        tokens = 1 if number % 64 == 0 else chance.choice((4, 5, 6))
        slow = stall if chance.random() < share else 1.0
        curve.add(tokens, (0.04 + 0.01 * tokens) * chance.uniform(0.95, 1.05) * slow)
    assert curve.seconds(1) / curve.seconds(5) == pytest.approx(0.05 / 0.09, rel=0.12)
    assert 0.07 < curve.seconds(5) < 0.09 * stall


def test_all_of_a_forwards_items_tell_of_one_forward() -> None:
    """Sixteen that say the same of one stall are no sign that the machine has changed."""
    costs = RoundCosts()
    for seconds in [*(0.1 + 0.0001 * number for number in range(40)), 0.3]:
        time = WorkerTime(seconds, 1, 32, 16)
        for _ in range(16):
            costs.observe(RoundTimes(1, None, seconds, None, time))
    assert costs.round_seconds(1)[1] < 0.15


def test_a_time_that_cannot_be_does_no_harm() -> None:
    curve = ForwardCurve()
    for seconds in (float("nan"), float("inf")):
        curve.add(1, seconds)
    assert not curve.known
    for seconds in (0.0, 1.0, -1.0, float("nan"), 1.0, float("inf"), 1.0, 1.0, 1.0):
        curve.add(1, seconds)
    assert curve.seconds(1) == pytest.approx(1.0, rel=0.5)


def test_a_forward_of_more_tokens_is_never_taken_to_cost_less() -> None:
    curve, chance = ForwardCurve(), random.Random(5)
    for _ in range(30):
        for tokens in (1, 2, 3, 4, 6):
            curve.add(tokens, 1.0 + 0.5 * chance.random())
            seconds = [curve.seconds(each) for each in range(1, 9)]
            assert seconds == sorted(seconds)


def test_while_nothing_is_heard_of_the_draft_it_is_taken_to_get_slower_as_the_target_does() -> None:
    machine, costs = Machine(0.3, 0.05, noise=0.0), RoundCosts()
    for gamma in (2, 0, 1, 3) * 20:
        costs.observe(machine.times(gamma))
    before = costs.round_seconds(4)
    for _ in range(60):
        times = machine.times(0)
        assert times.target is not None
        times.verify_seconds = 3.0 * times.target.seconds + OVERHEAD / 2
        times.target.seconds *= 3.0
        costs.observe(times)
    after = costs.round_seconds(4)
    for small, large in itertools.pairwise(range(5)):
        assert (after[large] - after[small]) / (before[large] - before[small]) == pytest.approx(3.0, rel=0.15)


def test_a_position_that_was_not_proposed_was_not_rejected() -> None:
    """Blocks end early at every second token, and whatever is proposed stands: acceptance is near 1, and tokens and seconds are
    those of the blocks that come, not of those asked for."""
    machine, controller = Machine(0.2, 0.05, noise=0.0), adaptive()
    for _ in range(300):
        asked = controller.choose(1000).gamma
        block = 0
        while block < asked and (not block or machine.chance.random() < 0.5):
            block += 1
        controller.observe([1.0] * block, dataclasses.replace(machine.times(block), asked=asked))
    acceptance = controller._acceptance.by_position(3)
    assert min(acceptance) > 0.9
    tokens, seconds = controller._persistence.blocks(acceptance, controller._costs.round_seconds(3))
    assert tokens == pytest.approx([1.0, 2.0, 2.5, 2.75], abs=0.25)
    whole = [machine.round_seconds(gamma) for gamma in range(4)]
    mixed = [whole[0], whole[1], (whole[1] + whole[2]) / 2, whole[1] / 2 + whole[2] / 4 + whole[3] / 4]
    assert seconds == pytest.approx(mixed, rel=0.05)
    assert controller.choose(1000).gamma >= LONGEST - 1, "what may end early costs nothing to ask for"


@pytest.mark.parametrize(("draft_step", "least", "most"), [(0.02, 0.05, 0.4), (0.4, 0.6, 1.0)])
def test_a_dearer_token_has_to_be_likelier(draft_step: float, least: float, most: float) -> None:
    machine, controller = Machine(draft_step, 0.02), adaptive()
    run(controller, machine, 200, lambda _: 0.8)
    assert least < controller.choose(1000).stop_below < most


def test_what_a_block_waits_whatever_its_length_makes_longer_blocks_pay() -> None:
    """A draft far away: a crossing is paid once, not for each token."""
    near, far = adaptive(), adaptive()
    for controller, crossing in ((near, 0.0), (far, 1.5 * PLAIN_SECONDS)):
        machine = Machine(0.1, 0.02)
        for _ in range(300):
            gamma = controller.choose(1000).gamma
            times = machine.times(gamma)
            if times.propose_seconds is not None and gamma:
                times.propose_seconds += crossing
            controller.observe([0.8] * gamma, times)
    assert far.choose(1000).gamma > near.choose(1000).gamma
    seconds = far._costs.round_seconds(8)
    assert seconds[8] - seconds[4] == pytest.approx(4 * 0.12 * PLAIN_SECONDS, rel=0.15)
    assert seconds[1] - seconds[0] == pytest.approx(1.62 * PLAIN_SECONDS, rel=0.15)
