"""What torch looks up when it is imported is set before, and only where nobody has set it."""

from __future__ import annotations

import os
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


_PROGRAM = """
import dataclasses, os, sys
from tandem.engine import worker_process
from {service}.__main__ import {worker} as worker

def follow(settings):
    # Where a worker's work begins: what is set is set, and nothing has imported torch.
    return 40 if "torch" not in sys.modules and os.environ.get("GOMP_SPINCOUNT") == "10000" else 41

sys.argv = [sys.argv[0]]
sys.exit(worker_process.main(dataclasses.replace(worker, follow=follow)))
"""


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
def test_a_worker_sets_it_before_torch_comes(service: str) -> None:
    worker = service.removesuffix("_service").upper()
    program = _PROGRAM.format(service=service, worker=worker)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_", "THP_"))}
    environ[f"TANDEM_{worker}_MODEL"] = "never loaded"
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, env=environ)
    assert done.returncode == 40
