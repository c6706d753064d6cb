"""A target made dearer until one of its steps costs a given multiple of its draft's, without changing what it says.

Residual blocks whose output projections are zero (`models/variants.py cost-padded`): real compute, the same distributions. So
a laptop shows how a pair behaves whose target is far larger than its draft. The folder's name says it, and so does every table
that names its models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from tandem.v1 import sampling_pb2

from .running_pair import ModelPair, planned_worker
from .services import REPOSITORY, NotMeasured, free_address, run_all
from .worker_times import SyntheticSessions, WorkerTimes, worker_streams

TRIAL_LAYERS = 32
"""Added to find out about what a layer costs: a few may cost less than a step takes more or less by chance."""
BLOCK = 4
CACHED_TOKENS = 64
WARM_UPS, SAMPLES = 5, 20


def pad(models: ModelPair, ratio: float, folder: Path) -> ModelPair:
    """The pair with a target, made in `folder`, whose step costs `ratio` times a token of the draft's block, both as the
    services take them. Raises ValueError where the target is dearer already, NotMeasured where layers seem to cost nothing."""
    draft, target = uvloop.run(_milliseconds(models))
    layers = TRIAL_LAYERS
    for trial in ("trial", "estimate"):
        padded = _padded(models.target, folder / trial, layers)
        _, dearer = uvloop.run(_milliseconds(dataclasses.replace(models, target=padded)))
        if dearer <= target:
            raise NotMeasured(
                f"a step of the target with {layers} layers more took no longer: the machine is not quiet"
            )
        layers = layers_for(ratio, draft, target, (dearer - target) / layers)
    name = f"{models.target.name} COST-PADDED by {layers} layers"
    return dataclasses.replace(models, target=_padded(models.target, folder / name, layers))


def layers_for(ratio: float, draft: float, target: float, layer: float) -> int:
    """How many layers more make `target` cost `ratio` times `draft`; raises ValueError if it does without any."""
    missing = ratio * draft - target
    if missing <= 0:
        raise ValueError(f"a step of the target costs {target / draft:.1f} times the draft's without padding")
    return max(1, round(missing / layer))


def _padded(model: Path, output: Path, layers: int) -> Path:
    # By the script: this process has no use for torch otherwise.
    script = [sys.executable, str(REPOSITORY / "models" / "variants.py"), "cost-padded", str(model), str(output)]
    made = subprocess.run(
        [*script, "--layers", str(layers)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True
    )
    if made.returncode:
        raise ValueError(f"the target could not be padded: {made.stdout[-1000:]}")
    return output


async def _milliseconds(models: ModelPair) -> tuple[float, float]:
    """A token of the draft's block, and a step of the target."""
    draft, target = free_address(), free_address()
    sampling = sampling_pb2.Sampling(
        temperature=1.0, top_p=1.0, seed=7, acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_REJECTION
    )
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            workers = [planned_worker("draft", draft, models), planned_worker("target", target, models)]
            run_all(stack, workers, Path(folder))
            session = SyntheticSessions(
                await stack.enter_async_context(worker_streams(draft, target)), CACHED_TOKENS, sampling
            )
            await session.open()
            await session.sample(WorkerTimes(), [BLOCK], WARM_UPS)
            times = WorkerTimes()
            await session.sample(times, [BLOCK], SAMPLES)
            plain, block, _ = times.medians(BLOCK)
    return 1000 * block / BLOCK, 1000 * plain
