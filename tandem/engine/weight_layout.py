"""Linear layers whose weights lie in memory by their inputs, not by their outputs.

On a CPU a verification multiplies each weight matrix with gamma + 1 rows. As modules store them, outputs first, four rows and more
cost the general matrix product much more than one does; inputs first they cost less, and one row costs no more. Other layouts are
faster for many rows and slower for one (docs/decisions.md). Same values up to float32 rounding.
"""

from __future__ import annotations

import torch
from torch import nn


def inputs_first_pays(model: nn.Module) -> bool:
    """Whether the model's weights are of the kind it is measured for."""
    weight = next(model.parameters())
    return bool(weight.device.type == "cpu" and weight.dtype == torch.float32)


def lay_inputs_first(model: nn.Module) -> int:
    """Lays the weights of a model's linear layers out anew, in place, and returns how many. A head that shares its weight with the
    embedding gets a copy of its own: tokens are looked up by row."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t(), requires_grad=False)
    return len(layers)
