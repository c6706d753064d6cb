"""After each test that has used services, these are as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ledger import StackLedger
from tests.support.services import running_stacks


@pytest.fixture(scope="session")
def ledgers() -> dict[int, StackLedger]:
    """By stack, for as long as the tests run."""
    return {}


@pytest.fixture(autouse=True)
def nothing_is_left(ledgers: dict[int, StackLedger]) -> Iterator[None]:
    """Of the stacks that go on after the test. Set up first, and so torn down last."""
    yield
    for stack in running_stacks():
        ledgers.setdefault(id(stack), StackLedger(stack)).check()
