"""Engines that are stopped at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.harness import Engines


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are too small for more."""
    torch.set_num_threads(1)


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.stop()
