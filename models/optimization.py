"""The optimizer recipe that every training script here uses: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM


def orthogonalised(update: Tensor) -> Tensor:
    """``update`` [m, n] with its singular values pushed to about 1: five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.shape[0] > update.shape[1]
    x = (update.T if tall else update) / (update.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. In float32, since torch's own works in bfloat16, slow on most CPUs.

    The scale gives a step the RMS of one of AdamW at the same rate, so both share a learning rate.
    """

    def __init__(self, params: Sequence[nn.Parameter], lr: float, decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalised(param.grad.lerp(buffer, group["momentum"]))
                param.mul_(1 - group["lr"] * group["decay"])
                param.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(param.shape)))


def make_optimizers(
    model: LlamaForCausalLM, lr: float, embedding_lr: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms; rates are the peaks."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "model.layers" in n]
    tables = [p for n, p in model.named_parameters() if p.ndim == 2 and "model.layers" not in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": tables, "lr": embedding_lr, "weight_decay": decay},
        {"params": norms, "lr": lr, "weight_decay": 0.0},
    ]
    return [Muon(matrices, lr, decay), torch.optim.AdamW(groups, betas=(0.9, 0.98))]


class Schedule:
    """Linear warm-up over 2 % of the run, then half a cosine down to 2 % of the peak rates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], warmup: float = 0.02) -> None:
        self._warmup = warmup
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._peaks = [(group, group["lr"]) for group in groups]

    def set(self, progress: float) -> None:
        """Set all rates for ``progress`` in [0, 1] of the run."""
        share = self._share(min(1.0, progress))
        for group, peak in self._peaks:
            group["lr"] = peak * share

    def _share(self, progress: float) -> float:
        if progress < self._warmup:
            return progress / self._warmup
        past = (progress - self._warmup) / (1 - self._warmup)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * past))
