"""What is run again when it fails, what isn't, and that it can't be overlooked: by real runs of pytest in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reruns import MOST, may_run_again
from tests.support.services import REPOSITORY

PLUGIN = """
import pytest
from tests.support import reruns

reruns.DELAY_SECONDS = 0


def pytest_configure(config):
    config.pluginmanager.register(reruns.Reruns())


@pytest.fixture(scope="module")
def tries(pytestconfig):
    yield {}
    with (pytestconfig.rootpath / "ended").open("a") as ended:
        ended.write("x")
"""
FAILS_ONCE = """
def test_{name}(tries):
    print("said by {name}")
    tries["{name}"] = tries.get("{name}", 0) + 1
    assert tries["{name}"] > 1, "as unlucky as {name}"
"""
OTHER_TOKENS_ONCE = """
def test_{name}(tries):
    tries["{name}"] = tries.get("{name}", 6) + 1
    assert ([5, 6, tries["{name}"]], "text") == ([5, 6, 8], "text")
"""


def fail_once(*names: str) -> str:
    """Tests that each fail the first time."""
    return "".join(FAILS_ONCE.format(name=name) for name in names)


def run(folder: Path, tests: dict[str, str]) -> tuple[int, str]:
    """The exit status and the output of a run of tests, by the folder that they are in."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers -raR\n")
    for where, text in tests.items():
        at = folder / "tests" / where
        at.mkdir(parents=True)
        (at / "test_unlucky.py").write_text(text)
    (folder / "unlucky.py").write_text(PLUGIN)
    # Neither folder `tests` is to hide the other: what is the repository's is imported first.
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-p",
            "rerunfailures",
            "-p",
            "unlucky",
            "-p",
            "no:cacheprovider",
            "tests",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_fails_once_passes_and_is_listed_with_how_it_failed(tmp_path: Path) -> None:
    names = [f"process_{number}" for number in range(MOST)]
    status, output = run(tmp_path, {"chaos": fail_once(*names)})
    assert status == 0, output
    assert f"{MOST} passed, {MOST} rerun" in output
    for name in names:
        assert f"RERUN tests/chaos/test_unlucky.py::test_{name}" in output
        assert f"run again: tests/chaos/test_unlucky.py::test_{name}" in output
        assert f"AssertionError: as unlucky as {name}" in output
        assert f"said by {name}" in output
    assert (tmp_path / "ended").read_text() == "x", "what the module shares lasts as long as the module"


def test_one_more_than_may_be_run_again_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, {"cli": fail_once(*(f"process_{number}" for number in range(MOST + 1)))})
    assert f"{MOST + 1} passed, {MOST + 1} rerun" in output
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert f"FAILED: {MOST + 1} tests were run again" in output


def test_a_law_holds_the_first_time(tmp_path: Path) -> None:
    status, output = run(tmp_path, {"statistical": fail_once("law")})
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed" in output
    assert "run again" not in output
    assert "RERUN" not in output


def test_other_tokens_are_no_chance_wherever_they_are_compared(tmp_path: Path) -> None:
    first, last = (OTHER_TOKENS_ONCE.format(name=name) for name in ("first", "last"))
    status, output = run(tmp_path, {"chaos": first + fail_once("process") + last})
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "2 failed, 1 passed, 1 rerun" in output
    assert "run again: tests/chaos/test_unlucky.py::test_process" in output
    assert (tmp_path / "ended").read_text() == "x", "what the module shares lasts as long as the module"


def test_each_folder_is_one_or_the_other() -> None:
    again = {
        path.name for path in (REPOSITORY / "tests").iterdir() if may_run_again(Path("tests") / path.name / "t.py")
    }
    assert again == {"bench", "chaos", "cli", "e2e", "integration", "k8s", "security", "telemetry", "workers"}
    compared = [path.name for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py")]
    told = {name for name in compared if may_run_again(Path("tests/e2e") / name)}
    assert told == {"test_http.py", "test_load.py", "test_pairs.py", "test_resume.py", "test_tensor_parallel.py"}
