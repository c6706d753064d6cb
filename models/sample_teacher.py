"""Sample answers from the teacher and record the distributions they were drawn from.

    python models/sample_teacher.py models/smollm2-135m-instruct train.npz --answers 2700
    python models/sample_teacher.py models/smollm2-135m-instruct heldout.npz --answers 64 --held-out

A draft has to agree with its target on what the *target* writes, so that is the training text. Each
answer has its own temperature; what is recorded is always the distribution at temperature 1. One core
samples about 10,000 tokens a minute from a model of 135 M parameters.

The file holds, with ragged entries joined end to end, ``prompt_ids`` and ``prompt_len``,
``answer_ids`` and ``answer_len`` (the end token included), and for every answer token the teacher's
likeliest ``top_ids`` [tokens, 48] and their natural ``top_logprobs`` [tokens, 48], best first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from prompts import prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

TOP = 48


@dataclass
class Answer:
    """One answer as it grows; lists have an entry for every token of it."""

    prompt: list[int]
    temperature: float
    tokens: list[int] = field(default_factory=list)
    top_ids: list[NDArray[np.uint16]] = field(default_factory=list)
    top_logprobs: list[NDArray[np.float16]] = field(default_factory=list)


def left_padded(answers: Sequence[Answer], padding: int) -> tuple[Tensor, Tensor]:
    """Prompts [batch, longest] that end in the same column, and 1 where they are real."""
    longest = max(len(answer.prompt) for answer in answers)
    ids = torch.full((len(answers), longest), padding)
    mask = torch.zeros_like(ids)
    for row, answer in enumerate(answers):
        ids[row, longest - len(answer.prompt) :] = torch.tensor(answer.prompt)
        mask[row, longest - len(answer.prompt) :] = 1
    return ids, mask


def draw(log_p: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token for every row of ``log_p`` [batch, vocabulary] at its own temperature, [batch].

    argmax of p^(1/T) / e with e exponential is a draw from p^(1/T), normalised: no sort, no sum.
    """
    noise = torch.empty_like(log_p).exponential_(generator=generator).log_()
    return (log_p / temperatures[:, None] - noise).argmax(dim=1)


@torch.inference_mode()
def sample_batch(
    teacher: PreTrainedModel,
    answers: list[Answer],
    end_ids: set[int],
    max_tokens: int,
    generator: torch.Generator,
) -> None:
    """Grow all ``answers`` until they end or are ``max_tokens`` long."""
    ids, mask = left_padded(answers, padding=min(end_ids))
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    cache = DynamicCache(config=teacher.config)
    running = list(answers)
    for _ in range(max_tokens):
        output = teacher(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        log_p = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
        top = log_p.topk(TOP)
        temperatures = torch.tensor([answer.temperature for answer in running])
        drawn = draw(log_p, temperatures, generator)
        top_ids = top.indices.numpy().astype(np.uint16)
        top_logprobs = top.values.numpy().astype(np.float16)
        for row, answer in enumerate(running):
            answer.tokens.append(int(drawn[row]))
            answer.top_ids.append(top_ids[row])
            answer.top_logprobs.append(top_logprobs[row])
        going = [row for row, answer in enumerate(running) if answer.tokens[-1] not in end_ids]
        if not going:
            return
        # Rows that have ended leave the batch, so that nothing is computed for them.
        kept = torch.tensor(going)
        if len(going) < len(running):
            cache.batch_select_indices(kept)
            running = [running[row] for row in going]
        ids = drawn[kept, None]
        mask = torch.cat([mask[kept], torch.ones(len(going), 1, dtype=mask.dtype)], dim=1)
        positions = mask.sum(dim=1, keepdim=True) - 1


def save(answers: Sequence[Answer], output: Path) -> None:
    """Write all ``answers`` in one file, which appears complete or not at all."""
    partial = output.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        prompt_ids=np.concatenate([np.array(a.prompt, dtype=np.uint16) for a in answers]),
        prompt_len=np.array([len(a.prompt) for a in answers], dtype=np.int32),
        answer_ids=np.concatenate([np.array(a.tokens, dtype=np.uint16) for a in answers]),
        answer_len=np.array([len(a.tokens) for a in answers], dtype=np.int32),
        top_ids=np.stack([row for a in answers for row in a.top_ids]),
        top_logprobs=np.stack([row for a in answers for row in a.top_logprobs]),
    )
    partial.replace(output)


def questions(count: int, held_out: bool, rng: np.random.Generator) -> list[str]:
    """``count`` prompts in random order, all of them before any twice."""
    pool = prompts(held_out)
    rounds = [rng.permutation(len(pool)) for _ in range(-(-count // len(pool)))]
    return [pool[i] for i in np.concatenate(rounds)[:count]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Sample a teacher's answers for distillation.")
    parser.add_argument("teacher", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--answers", type=int, default=2700)
    parser.add_argument("--held-out", action="store_true", help="ask about the held-out topics")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperatures", type=float, nargs=2, default=(0.5, 1.0))
    parser.add_argument("--batch", type=int, default=160)
    parser.add_argument("--dtype", default="float32", help="of the teacher; a big batch computes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=getattr(torch, options.dtype)).eval()
    if teacher.config.vocab_size > 1 << 16:
        raise SystemExit("error: token ids are stored in 16 bits; this vocabulary is larger")
    ends = teacher.generation_config.eos_token_id
    end_ids = set(ends) if isinstance(ends, list) else {ends}

    rng = np.random.default_rng([options.seed, options.held_out])
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
    answers = []
    for question in questions(options.answers, options.held_out, rng):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        answers.append(Answer(prompt, rng.uniform(*options.temperatures)))

    started, tokens = time.monotonic(), 0
    for first in range(0, len(answers), options.batch):
        batch = answers[first : first + options.batch]
        sample_batch(teacher, batch, end_ids, options.max_tokens, generator)
        tokens += sum(len(answer.tokens) for answer in batch)
        minutes = (time.monotonic() - started) / 60
        done = first + len(batch)
        print(f"{done} of {len(answers)} answers, {tokens} tokens, {minutes:.1f} min", flush=True)
        save(answers[:done], options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
