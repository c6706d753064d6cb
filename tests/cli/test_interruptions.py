"""Where Ctrl-C and its like are raised, and where they have to wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tandem.cli.interruptions import Interruptions

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
press = signal.raise_signal


@pytest.fixture
def interruptions() -> Iterator[Interruptions]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    made = Interruptions()
    try:
        with made.installed():
            yield made
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def code_of(number: int) -> object:
    """What is raised, and with which code, when this has arrived in a hold."""
    return KeyboardInterrupt if number == signal.SIGINT else 128 + number


def raised(error: BaseException) -> object:
    return error.code if isinstance(error, SystemExit) else type(error)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_hold_notes_what_its_end_raises(interruptions, number):
    steps = []
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught, interruptions.held():
        with interruptions.held():
            press(number)
            steps.append(interruptions.noted)
        steps.append(interruptions.noted)  # the outer one goes on
    assert steps == [True, True]
    assert raised(caught.value) == code_of(number)
    assert not interruptions.noted


@pytest.mark.parametrize("number", NUMBERS)
def test_a_release_raises_once_and_nothing_disturbs_the_way_out(interruptions, number):
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught, interruptions.held():
        try:
            with interruptions.released():
                press(number)
                raise AssertionError("it was not raised")
        finally:
            press(signal.SIGINT)
            press(signal.SIGINT)
            hurry = interruptions.noted
    assert raised(caught.value) == code_of(number)
    assert hurry


def test_what_was_noted_is_raised_where_it_is_let_through(interruptions):
    with interruptions.held():
        press(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interruptions.released():
            raise AssertionError("it was not raised")
        # And whoever goes on is interrupted anew.
        with pytest.raises(KeyboardInterrupt), interruptions.released():
            press(signal.SIGINT)
        press(signal.SIGINT)
        interruptions.forget_ctrl_c()


def test_the_systems_word_outranks_a_ctrl_c(interruptions):
    with pytest.raises(SystemExit) as caught, interruptions.held():
        press(signal.SIGINT)
        press(signal.SIGTERM)
        interruptions.forget_ctrl_c()
    assert caught.value.code == 143


def test_another_failure_does_not_swallow_it(interruptions):
    with pytest.raises(KeyboardInterrupt), interruptions.held():
        press(signal.SIGINT)
        raise ValueError


@pytest.mark.parametrize("before", [False, True])
def test_what_is_waited_for_is_cancelled(interruptions, before):
    cancelled = threading.Event()
    with pytest.raises(KeyboardInterrupt), interruptions.held():
        if before:
            press(signal.SIGINT)
        with interruptions.cancelling(cancelled.set):
            if not before:
                press(signal.SIGINT)
            assert cancelled.wait(60)


def test_what_is_over_is_not_cancelled(interruptions):
    cancelled = threading.Event()
    with pytest.raises(KeyboardInterrupt), interruptions.held():
        with interruptions.cancelling(cancelled.set):
            pass
        press(signal.SIGINT)
    assert not cancelled.is_set()


def test_who_was_started_deaf_to_ctrl_c_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interruptions = Interruptions()
        with interruptions.installed():
            interruptions.leave_ctrl_c_to_python()
            press(signal.SIGINT)
            assert not interruptions.noted
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_gone_when_nothing_has_arrived():
    before = [signal.getsignal(number) for number in NUMBERS]
    interruptions = Interruptions()
    with interruptions.installed():
        assert [signal.getsignal(number) for number in NUMBERS] != before
        interruptions.leave_ctrl_c_to_python()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.mark.parametrize("number", NUMBERS)
def test_outside_of_a_hold_the_second_one_is_the_end(number):
    program = f"""
import signal
from tandem.cli.interruptions import Interruptions
try:
    with Interruptions().installed():
        signal.raise_signal({number:d})
except (KeyboardInterrupt, SystemExit):
    print("first", flush=True)
    signal.raise_signal({number:d})
    print("second")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "first\n", "")
