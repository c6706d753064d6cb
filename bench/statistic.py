"""Quantiles of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def quantile(samples: Sequence[float], share: float) -> float:
    """The value that `share` of the samples don't exceed, interpolated; NaN without samples."""
    return float(np.quantile(samples, share)) if len(samples) else float("nan")


def median(samples: Sequence[float]) -> float:
    """The middle one; NaN without samples."""
    return quantile(samples, 0.5)
