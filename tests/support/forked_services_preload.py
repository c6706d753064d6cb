"""What the services import, once for all of them; see `forked_services`.

Much of it is imported by the libraries only when a model is loaded, so one is. No thread may be left: a fork doesn't copy them.
"""

# ruff: noqa: F401 - importing is the purpose

from pathlib import Path

import pytest  # the suite's main module, imported in each process that multiprocessing makes

import draft_service.drafter
import draft_service.servicer
import orchestrator.servicer
import target_service.servicer
import target_service.verifier
import tests.support.faulty_service
from orchestrator.vocabulary import Vocabulary
from tandem.engine import engine, loading, worker

TINY = str(Path(__file__).resolve().parents[2] / "models" / "tiny-target")
loading.load(loading.ModelOptions(TINY, threads=1, slots=1, context_length=16))
Vocabulary.load(TINY, "")

assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread was started"
