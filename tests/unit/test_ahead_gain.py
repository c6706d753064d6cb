"""When a draft leaves drafting ahead, and comes back to it: by the rounds that it sees, on a clock of the test's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draft_service.ahead_gain import FIRST_STAY, LONGEST_STAY, LOOK, AheadGain

Seconds = Callable[[bool, int], float]


class Machine:
    """Requests that take turns at rounds which last as long as they are told."""

    def __init__(self, seconds: Seconds, requests: int = 1, noise: float = 0.15) -> None:
        """`seconds`: of a round, by whether the draft works ahead and by its block."""
        self.now = 0.0
        self.seconds = seconds
        self.drift = 1.0
        self.gain = AheadGain(lambda: self.now)
        self._chance = random.Random(1)
        self._requests = requests
        self._noise = noise

    def run(self, rounds: int) -> float:
        """So many rounds of each request, with blocks of 2 or 4; the share of them in which the draft worked ahead."""
        ahead = 0
        for _ in range(rounds):
            block = self._chance.choice((2, 4))
            for request in range(self._requests):
                ahead += self.gain.working
                taken = self.seconds(self.gain.working, block) / self._requests
                self.now += self.drift * taken * (1.0 + self._noise * self._chance.uniform(-1.0, 1.0))
                self.gain.answered(request, block, ordinary=True)
        return ahead / (rounds * self._requests)


def loses(ahead: bool, block: int) -> float:
    return block * (1.15 if ahead else 1.0)


def wins(ahead: bool, block: int) -> float:
    return block * (0.8 if ahead else 1.0)


@pytest.mark.parametrize("requests", [1, 5])
def test_it_stays_where_rounds_are_shorter(requests: int) -> None:
    machine = Machine(wins, requests)
    machine.run(100)
    assert machine.run(1000) > 0.85
    assert machine.gain.preferred
    assert machine.gain.pauses == 0
    assert machine.gain.ratio == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("requests", [1, 5])
def test_it_leaves_where_rounds_are_longer_and_looks_ever_more_rarely(requests: int) -> None:
    machine = Machine(loses, requests)
    machine.run(100)
    assert machine.run(1000) < (LOOK + requests) / FIRST_STAY + 0.02
    assert machine.run(4000) < 2 * (LOOK + requests) / LONGEST_STAY + 0.02
    assert not machine.gain.preferred
    assert machine.gain.pauses == 1
    assert machine.gain.ratio == pytest.approx(1.15, abs=0.12)


def test_it_comes_back_when_rounds_are_shorter_with_it_again() -> None:
    machine = Machine(loses)
    machine.run(300)
    assert not machine.gain.preferred
    machine.seconds = wins
    machine.run(3000)
    assert machine.gain.preferred
    assert machine.run(500) > 0.9
    machine.seconds = loses
    machine.run(1000)
    assert machine.gain.pauses == 2


def test_a_machine_that_drifts_is_no_reason() -> None:
    """Each look is compared with the rounds around it, not with what was long ago."""
    machine = Machine(wins, noise=0.02)
    for _ in range(200):
        machine.drift *= 1.03
        machine.run(10)
    assert machine.gain.pauses == 0
    assert machine.gain.ratio == pytest.approx(0.8, abs=0.1)


def test_blocks_of_other_lengths_are_not_compared() -> None:
    """With longer blocks whenever it works ahead, as an adaptive gamma may choose them, rounds are longer and prove nothing."""
    now = 0.0
    gain = AheadGain(lambda: now)
    for _ in range(500):
        block = 6 if gain.working else 1
        now += block
        gain.answered("a", block, ordinary=True)
    assert gain.pauses == 0
    assert gain.ratio == 1.0


def test_rounds_that_are_like_no_other_say_nothing() -> None:
    """Prompts, blocks from elsewhere, and the first answer of each request."""
    now = 0.0
    gain = AheadGain(lambda: now)
    for number in range(300):
        now += 5.0 if gain.working else 1.0
        gain.answered(number, 2, ordinary=True)
        now += 1.0
        gain.answered(number, 2, ordinary=False)
        gain.ended(number)
    assert gain.working
    assert gain.ratio == 1.0


def test_a_caller_that_stalls_is_no_trend() -> None:
    now = 0.0
    gain = AheadGain(lambda: now)
    for number in range(1000):
        now += 0.8 if gain.working else 1.0
        now += 1000.0 * (number % 61 == 0)
        gain.answered("a", 2, ordinary=True)
    assert gain.preferred
