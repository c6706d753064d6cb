"""`python -m bench.weight_layouts`: all linear layers of a model, or some, by how their weights lie in memory, for few rows and many.

The layouts take turns, row count by row count, so that a machine that gets slower meanwhile does so for all alike. Once through all
layers is what a forward does, so no weight is in a cache because it was used just before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .machine import this_machine
from .running_pair import ModelPair
from .statistic import median
from .tables import results_table, show_alone

ROWS = (1, 2, 3, 4, 6, 9, 16, 64)
_ONEDNN_HINT = 8
"""Rows that oneDNN's layout is chosen for: from 4 to 16 it makes no difference; 1 gives a slow one."""


def main(arguments: Sequence[str]) -> int:
    """Prints one table; milliseconds for one product with each of the model's weights."""
    parser = argparse.ArgumentParser(prog="python -m bench.weight_layouts")
    parser.add_argument("--model", type=Path, default=ModelPair().target)
    parser.add_argument("--only", default="", help="layers whose names end so, as lm_head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    # Not at the top: it takes seconds, and --help needs none of it.
    import torch
    from transformers import AutoModelForCausalLM

    machine = this_machine()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        linear = [(name, each) for name, each in model.named_modules() if type(each) is torch.nn.Linear]
        weights = [module.weight.detach() for name, module in linear if name.endswith(options.only)]
        layouts = _layouts(torch, weights)
        table = results_table(
            f"{options.model.name}: {len(weights)} linear layers, float32, {options.threads} threads, ms",
            ("rows", *layouts),
        )
        for rows in ROWS:
            inputs = {size: torch.randn(1, rows, size) for size in {weight.shape[1] for weight in weights}}
            table.add_row(str(rows), *(f"{1e3 * each:.1f}" for each in _times(layouts, inputs, options.repeats)))
    table.caption = f"medians of {options.repeats} runs that took turns"
    show_alone(table, machine)
    return 0


def _layouts(torch: Any, weights: list[Any]) -> dict[str, Callable[[dict[int, Any]], None]]:
    """What multiplies each weight with the rows of its size; all of a layout in memory of their own."""
    inputs_first = [weight.t().contiguous().t() for weight in weights]
    packed = [(torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT), weight.shape[1]) for weight in weights]

    def plain(of: list[Any]) -> Callable[[dict[int, Any]], None]:
        def run(inputs: dict[int, Any]) -> None:
            for weight in of:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        return run

    def run_packed(inputs: dict[int, Any]) -> None:
        for weight, size in packed:
            torch.ops.mkldnn._linear_pointwise(inputs[size], weight, None, "none", [], "")

    return {"outputs first": plain(weights), "inputs first": plain(inputs_first), "oneDNN's own": run_packed}


def _times(layouts: dict[str, Callable[[dict[int, Any]], None]], inputs: dict[int, Any], repeats: int) -> list[float]:
    """Median seconds of each layout."""
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    for _ in range(repeats):
        for name, run in layouts.items():
            began = time.perf_counter()
            run(inputs)
            seconds[name].append(time.perf_counter() - began)
    return [median(each) for each in seconds.values()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
