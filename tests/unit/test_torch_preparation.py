"""What torch looks up when it is imported is set before, and only where nobody has set it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.engine.worker_process import prepare_torch


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}),
        (
            {"THP_MEM_ALLOC_ENABLE": "0", "GOMP_SPINCOUNT": "300000"},
            {"THP_MEM_ALLOC_ENABLE": "0", "GOMP_SPINCOUNT": "300000"},
        ),
    ],
)
def test_what_is_set(given: dict[str, str], expected: dict[str, str]) -> None:
    environ = dict(given)
    prepare_torch(environ)
    assert environ == expected


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
def test_torch_comes_after_it(service: str) -> None:
    """What a worker imports before its main runs is without torch."""
    program = f"import sys, {service}.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
