"""Every planted fault of tests/support/faulty_service.py still finds what it breaks.

The tests that need them are the longest of all; a fault that names what no longer exists is told of here, in seconds.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.faulty_service import FAULTS

PROGRAM = """
from tests.support.faulty_service import FAULTS

for name, plant in FAULTS.items():
    plant()
    print(name)
"""


def test_each_can_be_planted() -> None:
    planted = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert planted.stdout.split() == list(FAULTS), planted.stderr
