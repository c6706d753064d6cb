"""A target of one layer and hidden size 16, and a draft that agrees with it now and then: real models that cost next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .services import REPOSITORY

MODEL = REPOSITORY / "models" / "tiny-target"
HIDDEN_SIZE = 16
NOISE = 0.03
"""Of the draft's weights beside the target's."""


def make(folder: Path) -> dict[str, Path]:
    """The models' folders, in `folder`, by role; raises ValueError."""
    target, draft = folder / "target", folder / "draft"
    _derive("one-layer", MODEL, target, "--hidden", str(HIDDEN_SIZE))
    _derive("noisy", target, draft, "--noise", str(NOISE))
    return {"draft": draft, "target": target}


def _derive(kind: str, model: Path, output: Path, *options: str) -> None:
    # By the script: this process has no use for torch otherwise.
    script = [sys.executable, str(REPOSITORY / "models" / "variants.py"), kind, str(model), str(output), *options]
    made = subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True)
    if made.returncode:
        raise ValueError(f"a model could not be made: {made.stdout[-1000:]}")
