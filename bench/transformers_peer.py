"""`python -m bench.transformers_peer TARGET DRAFT DTYPE THREADS`: the same pair decoded by transformers' `generate`, alone and assisted.

Reads a request as a line of JSON, and answers it with one: see `Asked` and `Told`. The assisted way is transformers' own: its schedule
of block sizes, its confidence threshold.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; the end token is like any other, so that all completions have the same length."""

    token_ids: tuple[int, ...]
    """The prompt; empty: encode `message` instead of decoding anything."""
    message: str
    max_tokens: int
    temperature: float
    seed: int
    assisted: bool


@dataclass(frozen=True, slots=True)
class Told:
    """The answer."""

    token_ids: tuple[int, ...]
    arrivals: tuple[float, ...]
    """Seconds from the call on, of each step that gave tokens."""
    tokens: tuple[int, ...]
    """Tokens of each of them."""


class _Arrivals:
    """A streamer, as `generate` calls them: notes when tokens come."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seen: list[tuple[float, int]] = []

    def put(self, token_ids: Any) -> None:
        """Some more; the prompt is the first."""
        self.seen.append((time.perf_counter() - self._began, token_ids.numel()))

    def end(self) -> None:
        """Nothing to flush."""


def main(arguments: list[str]) -> int:
    """Answers until the input ends."""
    # Not at the top: the benchmark imports this module for what it says, and has no use for torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target_folder, draft_folder, dtype, threads = arguments
    torch.set_num_threads(int(threads))
    models: list[Any] = []
    for folder in (target_folder, draft_folder):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model.generation_config.eos_token_id = None
        models.append(model.eval())
    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder)
    for line in sys.stdin:
        asked = Asked(**json.loads(line))
        told = _decode(models[0], models[1], asked) if asked.token_ids else _encode(tokenizer, asked.message)
        print(json.dumps(dataclasses.asdict(told)), flush=True)
    return 0


def _encode(tokenizer: Any, message: str) -> Told:
    """As a chat of one turn."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    return Told(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), (), ())


def _decode(target: Any, draft: Any, asked: Asked) -> Told:
    import torch

    prompt = torch.tensor([asked.token_ids])
    sampling: dict[str, Any] = {"do_sample": False}
    if asked.temperature:
        torch.manual_seed(asked.seed)
        sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
    if asked.assisted:
        sampling["assistant_model"] = draft
    arrivals = _Arrivals()
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=asked.max_tokens,
        streamer=arrivals,
        **sampling,
    )
    times, counts = zip(*arrivals.seen[1:], strict=True)
    return Told(tuple(output[0, prompt.shape[1] :].tolist()), times, counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
