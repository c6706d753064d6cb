"""Measure how well a draft agrees with its target, exactly: full softmax of both on every position.

    python models/measure_pair.py TARGET DRAFT --samples heldout.npz
    python models/measure_pair.py TARGET DRAFT --text some_file.txt

``overlap`` is the mean over positions of sum_x min(p(x), q(x)): the probability that speculative
decoding accepts a token drafted there. It says nothing about how good the text is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

COOL = 0.7


@dataclass(frozen=True)
class Agreement:
    """Means over ``positions`` next-token distributions."""

    overlap: float  # at temperature 1
    overlap_cool: float  # at temperature 0.7
    argmax: float  # share of positions where both like the same token best
    entropy: float  # of the target, in nats
    positions: int

    def __str__(self) -> str:
        return (
            f"overlap {self.overlap:.4f} at T=1, {self.overlap_cool:.4f} at T={COOL}, "
            f"argmax {self.argmax:.4f}, target entropy {self.entropy:.3f} nats "
            f"({self.positions} positions)"
        )


def overlap(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """sum_x min(p, q) per row, [rows], of logits [rows, vocabulary]."""
    p = torch.softmax(target_logits / temperature, dim=-1)
    q = torch.softmax(draft_logits / temperature, dim=-1)
    return torch.minimum(p, q).sum(-1)


@torch.inference_mode()
def measure(
    target: PreTrainedModel, draft: PreTrainedModel, sequences: Iterable[tuple[Sequence[int], int]]
) -> Agreement:
    """Agreement over ``sequences`` of (token ids, number of leading ids that are only context).

    Row i of the output is the distribution of token i + 1, so the first counted row is the one
    that predicts the first token after the context. The last token's own output is not counted.
    """
    totals = np.zeros(4)
    positions = 0
    width = min(target.config.vocab_size, draft.config.vocab_size)
    for ids, context in sequences:
        tokens = torch.tensor([list(ids[:-1])])
        first = max(context - 1, 0)
        p_logits = target(input_ids=tokens, use_cache=False).logits[0, first:, :width].float()
        q_logits = draft(input_ids=tokens, use_cache=False).logits[0, first:, :width].float()
        log_p = torch.log_softmax(p_logits, dim=-1)
        totals += [
            overlap(p_logits, q_logits, 1.0).sum().item(),
            overlap(p_logits, q_logits, COOL).sum().item(),
            (p_logits.argmax(-1) == q_logits.argmax(-1)).sum().item(),
            -(log_p.exp() * log_p).sum().item(),
        ]
        positions += len(p_logits)
    means = totals / positions
    return Agreement(means[0], means[1], means[2], means[3], positions)


def sample_sequences(path: Path) -> list[tuple[Sequence[int], int]]:
    """Prompt + answer of every entry of a file of ``sample_teacher.py``."""
    with np.load(path) as file:
        prompts = np.split(file["prompt_ids"], np.cumsum(file["prompt_len"])[:-1])
        answers = np.split(file["answer_ids"], np.cumsum(file["answer_len"])[:-1])
    return [
        (np.concatenate(pair).astype(np.int64).tolist(), len(pair[0])) for pair in zip(prompts, answers, strict=True)
    ]


def text_sequences(tokenizer: object, text: str, length: int) -> list[tuple[Sequence[int], int]]:
    """``text`` in windows of ``length`` tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return [(ids[i : i + length], 1) for i in range(0, len(ids) - 1, length)]


@torch.inference_mode()
def forward_milliseconds(model: PreTrainedModel, context: int = 128, repeats: int = 60) -> float:
    """Median time of one decoding step with ``context`` tokens in the cache."""
    cache = DynamicCache(config=model.config)
    tokens = torch.arange(context).remainder(model.config.vocab_size)[None]
    model(input_ids=tokens, cache=cache, use_cache=True)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        model(input_ids=tokens[:, -1:], cache=cache, use_cache=True)
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def load(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how well a draft agrees with its target.")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--samples", type=Path, help="a file of sample_teacher.py")
    source.add_argument("--text", type=Path, help="any text file")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window of --text")
    parser.add_argument("--dtype", default="float32", help="dtype of the agreement's forwards")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if options.samples:
        sequences = sample_sequences(options.samples)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.target)
        sequences = text_sequences(tokenizer, options.text.read_text(), options.length)
    print(measure(load(options.target, dtype), load(options.draft, dtype), sequences))
    for name, folder in (("target", options.target), ("draft", options.draft)):
        for timed in ("float32", "bfloat16"):
            milliseconds = forward_milliseconds(load(folder, timed))
            print(f"{name} forward {milliseconds:.2f} ms in {timed} (128 tokens cached)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
