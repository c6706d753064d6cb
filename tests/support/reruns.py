"""A test of processes, terminals and clocks that fails is run once more, and the run ends with what failed the first time, and how.

That a test was run again is a fault, of it or of the product, and to be filed as one: it only doesn't take the other tests' results
along. What can't depend on processes and clocks is never run again: a law holds the first time. So do comparisons of tokens, though
processes make these: neither the files of `tests/e2e` that are made of them are run again, nor any test that one of them failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDERS = frozenset(("bench", "chaos", "cli", "e2e", "integration", "k8s", "security", "telemetry", "workers"))
LAWS = frozenset(
    f"test_{name}.py"
    for name in (
        "ahead",
        "contract",
        "drafters",
        "greedy",
        "numerics",
        "sampling_fields",
        "several",
        "structured_output",
        "update_sampling",
    )
)
"""Of `tests/e2e`: what they compare may not differ once."""
MOST = 5
"""Tests that a run may run again. A machine as unlucky as that hides faults."""
DELAY_SECONDS = 5


class Reruns:
    """A plugin of pytest, on top of pytest-rerunfailures."""

    def __init__(self) -> None:
        self._first_failures: list[pytest.TestReport] = []
        self._tokens_differ = False

    @property
    def _names(self) -> list[str]:
        return sorted({report.nodeid for report in self._first_failures})

    def pytest_collection_modifyitems(self, config: pytest.Config, items: Sequence[pytest.Item]) -> None:
        if not config.pluginmanager.hasplugin("rerunfailures") or config.getoption("usepdb"):
            return
        for item in items:
            if may_run_again(item.path.relative_to(config.rootpath)):
                item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=DELAY_SECONDS, condition=self._may_be_chance))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """What a failed test leaves behind, in stacks that go on, isn't to fail it again."""
        self._tokens_differ = False
        if getattr(item, "execution_count", 1) > 1:
            from tests.support.services import running_stacks

            for stack in running_stacks():
                stack.restore()

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Is asked how to show what an assertion compared; this one only looks."""
        if op == "==" and tokens_in(left) != tokens_in(right):
            self._tokens_differ = True

    def _may_be_chance(self) -> bool:
        """Of the test that has just failed."""
        return not self._tokens_differ

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            self._first_failures.append(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._names) > MOST and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._first_failures:
            return
        terminalreporter.section("failed at first, and run again: each is a fault to be filed")
        for report in self._first_failures:
            terminalreporter.write_sep("_", f"{report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)
            for title, text in report.sections:
                terminalreporter.write_sep("-", title)
                terminalreporter.write_line(text)
        terminalreporter.write_sep("_")
        names = self._names
        for name in names:
            terminalreporter.write_line(f"run again: {name}")
        if len(names) > MOST:
            terminalreporter.write_line(
                f"FAILED: {len(names)} tests were run again, and at most {MOST} may be", red=True
            )


def may_run_again(path: Path) -> bool:
    """Of the file of a test, from the root of the repository on."""
    if path.parts[:1] != ("tests",) or len(path.parts) < 3:
        return False
    folder = path.parts[1]
    return folder in FOLDERS and not (folder == "e2e" and path.name in LAWS)


def tokens_in(value: object) -> list[list[int]]:
    """The lists of ids in what a test compares: a list of them, or a list or a tuple that has some, such as all that a caller saw."""
    if not isinstance(value, list | tuple):
        return []
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [value]
    return [found for each in value for found in tokens_in(each)]
