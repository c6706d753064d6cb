"""Linear layers whose weights are laid out once for small batches of rows.

On a CPU a verification multiplies each weight matrix with gamma + 1 rows. The general matrix product lays the weights
out anew in each call, which costs more than the product itself: five rows took twice the time of one. Laid out at load
time, five rows cost about 1.4 times one row, which is what makes speculation pay. Same values up to float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 8
"""The row count the layout is chosen for. From 4 to 16 it makes no difference; 1 gives the slow layout."""

MIN_WEIGHTS = 200_000
"""Smaller matrices stay as they are: the call of the packed product costs some 25 us more, all that it could save."""


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's layout; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out


def packing_supported(model: nn.Module) -> bool:
    """Whether this build of torch has the layout, and the model's weights are of the kind it is measured for."""
    weight = next(model.parameters())
    return bool(torch.backends.mkldnn.is_available()) and weight.device.type == "cpu" and weight.dtype == torch.float32


def pack_linear_layers(model: nn.Module) -> int:
    """Replaces the linear layers of a model in place and returns how many."""
    packed = 0
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear and child.weight.numel() >= MIN_WEIGHTS:
            setattr(model, name, PackedLinear(child))
            packed += 1
        else:
            packed += pack_linear_layers(child)
    return packed
