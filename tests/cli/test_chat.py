"""`tandem chat` on a terminal of its own, against a scripted orchestrator."""

from __future__ import annotations

import os
import pty
import random
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from google.rpc import code_pb2

from tandem.cli.main import main
from tandem.v1 import orchestrator_pb2 as pb

# A terminal sends SIGINT to its foreground group, so the program must lead the session that the terminal controls.
LEADER = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
ANSWER = "The sky is\nblue."


class Terminal:
    """A program and what is on its screen."""

    def __init__(self, orchestrator, folder, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
            "TANDEM_ORCHESTRATOR_ADDRESS": orchestrator.address,
            "TANDEM_HOME": str(folder),
            "TERM": "dumb",
        }
        command = [sys.executable, "-c", LEADER, sys.executable, "-m", "tandem.cli", "chat", *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self._screen = ""
        self.shown = ""
        """All that was ever on the screen."""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, text: str, seconds: float = 90) -> str:
        """Everything that was shown up to this text, which must come."""
        deadline = time.monotonic() + seconds
        while text not in self._screen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} does not come after {self._screen!r}"
            self._look()
        shown, _, self._screen = self._screen.partition(text)
        return shown + text

    def _look(self) -> None:
        try:
            more = os.read(self._master, 4096).decode().replace("\r\n", "\n")
        except OSError:
            raise AssertionError(f"the program has ended; {self._screen!r}") from None
        self._screen += more
        self.shown += more

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, and again after silence: readline keeps one that meets it between a key and its wait for the next, to the next one or the
        line's end."""
        deadline = time.monotonic() + 90
        self.type("\x03")
        while text not in self._screen:
            assert time.monotonic() < deadline, f"{text!r} does not come after {self._screen!r}"
            ready, _, _ = select.select([self._master], [], [], 2)
            if ready:
                self._look()
            else:
                self.type("\x03")
        self._screen = self._screen.partition(text)[2]

    def settle(self, name: str) -> None:
        """To a prompt that no earlier Ctrl-C meets any more: one that readline has kept takes the first of these lines with it."""
        self.type(f"/first\n/{name}\n")
        self.until(f"no such command: /{name}")
        self.until("\n> ")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._master)


@pytest.fixture
def terminal(orchestrator, tmp_path) -> Iterator[Terminal]:
    opened = Terminal(orchestrator, tmp_path, "--system", "Be brief.", "--temperature", "0")
    yield opened
    opened.close()


def said(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def test_a_conversation(terminal, orchestrator):
    terminal.until("> ")
    terminal.type("Why?\n")
    assert ANSWER in terminal.until("blue.\n> ")
    # Ctrl-C at the prompt gives up the line, and nothing else.
    terminal.type("half a li")
    terminal.until("half a li")
    terminal.interrupt_until("\n> ")
    terminal.settle("none")

    orchestrator.pause_seconds = 60
    terminal.type("And then?\n")
    terminal.until("The sky is")
    terminal.interrupt_until("[ended]\n> ")
    deadline = time.monotonic() + 60
    while not orchestrator.cancelled and time.monotonic() < deadline:
        time.sleep(0.02)
    assert orchestrator.cancelled == 1
    assert terminal.process.poll() is None
    orchestrator.pause_seconds = 0

    orchestrator.fail_invalid()
    terminal.settle("one")
    terminal.type("Refused\n")
    terminal.until("top_p: must be in (0, 1]")
    terminal.until("\n> ")
    orchestrator.fail(code_pb2.UNAVAILABLE, "gone for now")
    terminal.type("Unheard\n")
    terminal.until("gone for now\n> ")
    orchestrator.error = None

    terminal.type("//slash\n")
    terminal.until("blue.\n> ")
    system = ("system", "Be brief.")
    history = [
        system,
        ("user", "Why?"),
        ("assistant", ANSWER),
        ("user", "And then?"),
        ("assistant", "The sky is"),
        ("user", "/slash"),
    ]
    assert said(orchestrator.requests[-1]) == history
    assert orchestrator.requests[-1].temperature == 0

    terminal.type("/nothing\n")
    terminal.until("no such command: /nothing")
    terminal.type("/reset\n")
    terminal.until("> ")
    terminal.type("Anew\n")
    terminal.until("blue.\n> ")
    assert said(orchestrator.requests[-1]) == [system, ("user", "Anew")]
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_at_any_moment_ends_an_answer_and_never_the_program(terminal, orchestrator):
    moments = random.Random(7)
    terminal.until("> ")
    for turn in range(30):
        orchestrator.pause_seconds = 600
        terminal.type("Why?\n")
        if turn % 3:
            terminal.until("The sky is")
        for _ in range(moments.choice((1, 2, 3, 5))):
            # At prompts and in the midst of calls, as chance has it; nothing is awaited by this.
            time.sleep(moments.random() * 0.002)
            terminal.type("\x03")
        terminal.settle(f"turn-{turn}")
        orchestrator.pause_seconds = 0
        terminal.type(f"Say {turn}\n")
        terminal.until("blue.\n> ")
        # Not as the last one: a call that was cancelled may get there after its successor.
        assert ("user", f"Say {turn}") in [said(request)[-1] for request in orchestrator.requests]
    assert terminal.process.poll() is None
    assert orchestrator.cancelled >= 10  # of 20 whose answer had begun, at the least
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0
    assert not re.search("Traceback|Exception|interrupted", terminal.shown)


def test_kinds_and_the_end_of_the_input(orchestrator, tmp_path):
    terminal = Terminal(orchestrator, tmp_path, "--kinds")
    terminal.until("[A] accepted from the draft")
    terminal.until("> ")
    terminal.type("Why?\n")
    terminal.until("The[A] sky[A] is[B]\\n[A]\nblue[R].")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    terminal.close()


def test_lines_from_a_pipe_are_answered_too_and_those_cut_off_are_said_to_be(orchestrator, tmp_path):
    orchestrator.responses[-1].finish.reason = pb.FINISH_REASON_LENGTH
    environment = {"TANDEM_ORCHESTRATOR_ADDRESS": orchestrator.address, "TANDEM_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "chat"],
        input="One\n\nTwo",
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=True,
    )
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert done.stderr == 2 * "tandem: cut off after 5 tokens, the most that it may have (finish reason: length)\n"
    assert said(orchestrator.requests[-1]) == [("user", "One"), ("assistant", ANSWER), ("user", "Two")]


@pytest.mark.parametrize("flag", [["--raw"], ["--logprobs=2"]])
def test_what_makes_no_sense_is_a_usage_error(orchestrator, tmp_path, flag, capsys):
    environment = {"TANDEM_ORCHESTRATOR_ADDRESS": orchestrator.address, "TANDEM_HOME": str(tmp_path)}
    assert main(["chat", *flag], environment) == 2
    assert capsys.readouterr().err.startswith("tandem: ")
