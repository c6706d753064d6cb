"""Linear layers whose weights lie in memory by their inputs, not by their outputs.

On a CPU a verification multiplies each weight matrix with gamma + 1 rows. As modules store them, outputs first, four rows and more
cost the general matrix product much more than one does; inputs first they cost less, and one row costs no more. Other layouts are
faster for many rows and slower for one: a target's head is worth it (docs/decisions.md). Same values up to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_PACKED_FOR = 8
"""Rows that oneDNN's layout is chosen for: from 4 to 16 it makes no difference; 1 gives a slow one."""


def inputs_first_pays(model: nn.Module) -> bool:
    """Whether the model's weights are of the kind it is measured for."""
    weight = next(model.parameters())
    return bool(weight.device.type == "cpu" and weight.dtype == torch.float32)


def lay_inputs_first(model: nn.Module) -> int:
    """Lays the weights of a model's linear layers out anew, in place, and returns how many. A head that shares its weight with the
    embedding gets a copy of its own: tokens are looked up by row."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        lay_side_by_side([layer])
    return len(layers)


def lay_side_by_side(layers: Sequence[nn.Linear]) -> torch.Tensor:
    """Lays the weights of layers that have the same inputs out as one, in place, and returns it: [inputs, all outputs]."""
    joined = torch.cat([layer.weight.detach().t() for layer in layers], dim=1).contiguous()
    parts = joined.split([layer.out_features for layer in layers], dim=1)
    for layer, part in zip(layers, parts, strict=True):
        layer.weight = nn.Parameter(part.t(), requires_grad=False)
    return joined


def can_pack() -> bool:
    """Whether there is a PackedProduct."""
    return bool(torch.backends.mkldnn.is_available())


class PackedProduct:
    """A product with a weight in oneDNN's own layout, which no other operation of torch can read: a copy."""

    def __init__(self, weight: torch.Tensor) -> None:
        """The weight is [outputs, inputs]. Raises RuntimeError."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiplies hidden, [..., inputs]. Returns [..., outputs]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, None, "none", [], "")
        return product
