"""`python -m bench.forwards`: one request's forward in the engine beside the same in transformers, for few rows and more.

The sides take turns, row count by row count, so that a machine that gets slower meanwhile does so for both alike. Both have read
the same tokens before, transformers into a cache of its own that is cut back after each forward. In this process transformers has large
pages, threads that spin for a short time only and keys that aren't repeated too, as it has not elsewhere: what is left is the form of
the layers and of the cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .machine import this_machine
from .running_pair import ModelPair
from .statistic import median
from .tables import results_table, show_alone

ROWS = (1, 2, 3, 4, 5, 6, 9)


def main(arguments: Sequence[str]) -> int:
    """Prints one table; milliseconds for a forward."""
    parser = argparse.ArgumentParser(prog="python -m bench.forwards")
    parser.add_argument("--model", type=Path, default=ModelPair().target)
    parser.add_argument("--draft", action="store_true", help="as a draft loads it, for one row of a request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--read", type=int, default=100, help="tokens that are read before")
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args(arguments)
    # As a worker does, before anything imports torch; which takes seconds, and --help needs none of it.
    from tandem.engine.worker_process import prepare_torch

    prepare_torch(os.environ)
    import torch

    machine = this_machine()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        sides = {
            "transformers": _in_transformers(torch, options.model, options.read),
            "engine": _in_engine(options),
        }
        title = f"{options.model.name}: a forward after {options.read} tokens, float32, {options.threads} threads, ms"
        table = results_table(title, ("rows", *sides, "ratio"))
        for rows in ROWS:
            seconds = _times(sides, rows, options.repeats)
            ratio = median([of_transformers / ours for of_transformers, ours in zip(*seconds, strict=True)])
            table.add_row(str(rows), *(f"{1e3 * median(each):.1f}" for each in seconds), f"{ratio:.2f}x")
    table.caption = f"medians of {options.repeats} runs that took turns"
    show_alone(table, machine)
    return 0


def _in_transformers(torch: Any, folder: Path, read: int) -> Callable[[int], None]:
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    model(input_ids=_ids(torch, read), cache=cache, use_cache=True)

    def run(rows: int) -> None:
        model(input_ids=_ids(torch, rows), cache=cache, use_cache=True)
        cache.crop(-rows)

    return run


def _in_engine(asked: argparse.Namespace) -> Callable[[int], None]:
    import numpy as np

    from tandem.engine.feed import Feed
    from tandem.engine.loading import ModelOptions, load

    read: int = asked.read
    options = ModelOptions(
        str(asked.model),
        dtype="float32",
        device="cpu",
        threads=asked.threads,
        slots=2,
        context_length=read + ROWS[-1],
        verifies=not asked.draft,
    )
    lm = load(options).lm
    lm.forward([Feed(0, 0, np.arange(read, dtype=np.uint32), 1)])

    def run(rows: int) -> None:
        lm.forward([Feed(0, read, np.arange(rows, dtype=np.uint32), rows)])

    return run


def _ids(torch: Any, count: int) -> Any:
    return torch.arange(count, dtype=torch.int64)[None]


def _times(sides: dict[str, Callable[[int], None]], rows: int, repeats: int) -> list[list[float]]:
    """Seconds of each side's runs."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            began = time.perf_counter()
            run(rows)
            seconds[name].append(time.perf_counter() - began)
    return list(seconds.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
