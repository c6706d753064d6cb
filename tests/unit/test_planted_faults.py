"""Every planted fault of tests/support/faulty_service.py still finds what it breaks.

The tests that need them are the longest of all; a fault that names what no longer exists is told of here, in seconds.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.faulty_service import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_it_can_be_planted(fault: str) -> None:
    program = f"from tests.support.faulty_service import FAULTS; FAULTS[{fault!r}]()"
    planted = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert planted.returncode == 0, planted.stderr
