"""A target made dearer until one of its steps costs a given multiple of its draft's, without changing what it says.

Residual blocks whose output projections are zero (`cost_padded` in models/variants.py): real compute, the same distributions. So
a laptop shows how a pair behaves whose target is far larger than its draft. The folder's name says it, and so does every table
that names its models.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .running_pair import ModelPair
from .services import REPOSITORY
from .statistic import median

TRIAL_LAYERS = 4
"""Added to find out what a layer costs."""
CACHED_TOKENS = 64
WARM_UP_STEPS, STEPS = 5, 25


def pad(models: ModelPair, ratio: float, folder: Path) -> ModelPair:
    """The pair with a target whose step costs `ratio` times the draft's, made in `folder`; times it in another process, since this
    one has no use for torch otherwise. Raises ValueError where the target is dearer already."""
    wanted = [str(models.target), str(models.draft), models.dtype, str(models.threads), str(ratio), str(folder)]
    made = subprocess.run(
        [sys.executable, "-m", __name__, *wanted], cwd=REPOSITORY, stdout=subprocess.PIPE, check=False, text=True
    )
    if made.returncode:
        raise ValueError(f"the target could not be padded to {ratio:g} times the draft's cost; see above")
    return dataclasses.replace(models, target=Path(json.loads(made.stdout.splitlines()[-1])))


def layers_for(ratio: float, draft: float, target: float, layer: float) -> int:
    """How many layers more make `target` cost `ratio` times `draft`; raises ValueError if it does without any."""
    missing = ratio * draft - target
    if missing <= 0:
        raise ValueError(f"a step of the target costs {target / draft:.1f} times the draft's without padding")
    return max(1, round(missing / layer))


def main(arguments: list[str]) -> int:
    """Makes the folder, and prints its path."""
    target, draft, dtype, threads, ratio, output = arguments
    cost_padded = _variants().cost_padded

    def milliseconds(model: Path) -> float:
        return 1000 * _step_seconds(str(model), dtype, int(threads))

    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        trial = cost_padded(Path(target), Path(folder) / "trial", layers=TRIAL_LAYERS)
        costs = [milliseconds(Path(each)) for each in (draft, target, trial)]
    layer = max((costs[2] - costs[1]) / TRIAL_LAYERS, 1e-3)
    try:
        layers = layers_for(float(ratio), costs[0], costs[1], layer)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = f"{Path(target).name} COST-PADDED by {layers} layers"
    print(json.dumps(str(cost_padded(Path(target), Path(output) / name, layers=layers))))
    return 0


def _step_seconds(model: str, dtype: str, threads: int) -> float:
    """The median time of one token's forward."""
    import numpy as np

    from tandem.engine import loading
    from tandem.engine.feed import Feed

    lm: Any = loading.load(
        loading.ModelOptions(model, dtype=dtype, threads=threads, slots=1, context_length=4 * CACHED_TOKENS)
    ).lm
    ids = np.arange(CACHED_TOKENS, dtype=np.uint32) % 256
    lm.forward([Feed(0, 0, ids, 1)])
    seconds = []
    for _ in range(WARM_UP_STEPS + STEPS):
        began = time.perf_counter()
        lm.forward([Feed(0, CACHED_TOKENS, ids[:1], 1)])
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP_STEPS:])


def _variants() -> Any:
    """The script models/variants.py, which is not in a package."""
    spec = importlib.util.spec_from_file_location("variants", REPOSITORY / "models" / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
