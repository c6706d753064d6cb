"""Which cores a process runs on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

Cores = frozenset[int]


def allowed_cores() -> Cores:
    """Those that this thread may run on; none where the system doesn't say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@contextlib.contextmanager
def placed_on(cores: Cores) -> Iterator[None]:
    """This thread runs on these cores, and so do the threads and processes that it starts; no core: wherever it did."""
    if not cores:
        yield
        return
    before = allowed_cores()
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
