"""What transformers itself generates, computed without any of our code: the oracle of the greedy tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model loaded in float32 for plain decoding."""

    def __init__(self, folder: Path) -> None:
        # The services run beside it; more threads than free cores wait for one another.
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, **settings: Any) -> list[int]:
        """`generate` without sampling, with further settings of its own; an end token is kept, as in our streams."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            use_cache=True,
            **settings,
        )
        generated: list[int] = out[0, ids.shape[1] :].tolist()
        return generated

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> list[list[float]]:
        """Log-probabilities after each token, [len(ids), vocabulary]."""
        logits = self.model(torch.tensor([list(ids)])).logits[0]
        found: list[list[float]] = logits.double().log_softmax(-1).tolist()
        return found

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after the whole sequence, shape [vocabulary]."""
        out: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0, -1].float()
        return out
