"""Derive models from other models, in seconds: the cases that a pair of services must get right.

    python models/variants.py padded-vocabulary models/tiny-draft /tmp/padded --extra 64
    python models/variants.py cost-padded models/tiny-target /tmp/dear --layers 8

Works on the files alone (config.json, model.safetensors, tokenizer.json), so it needs no transformers
and starts fast. Every function takes a model's folder and an output folder that must not exist yet,
and returns the output folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WEIGHTS = "model.safetensors"
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
# What a layer adds to the residual stream goes through these two matrices of a Llama layer.
OUTPUT_PROJECTIONS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def draft_equals_target(target: Path, output: Path) -> Path:
    """A draft that is its target: everything must be accepted."""
    with _copied(target, output):
        pass
    return output


def random_draft(draft: Path, output: Path, seed: int = 0) -> Path:
    """Fresh weights in the draft's shape: next to nothing is accepted, and the output still exact.

    Matrices keep the spread of the old ones, since at the usual 0.02 every row would be flat.
    """
    generator = torch.Generator().manual_seed(seed)

    def fresh(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return torch.ones_like(weight)
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        return noise.to(weight.dtype)

    with _copied(draft, output) as work:
        weights = load_file(work / WEIGHTS)
        _save_weights({name: fresh(weights[name]) for name in sorted(weights)}, work)
    return output


def noisy(model: Path, output: Path, noise: float = 0.1, seed: int = 0) -> Path:
    """The same weights with noise, ``noise`` times as wide as each matrix's own spread: a draft that agrees with its model as
    often as one likes.

    With a cost-padded target it makes a pair of any acceptance and any ratio of costs.
    """
    generator = torch.Generator().manual_seed(seed)

    def blurred(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return weight
        spread = noise * weight.float().std()
        return (weight.float() + spread * torch.randn(weight.shape, generator=generator)).to(weight.dtype)

    with _copied(model, output) as work:
        weights = load_file(work / WEIGHTS)
        _save_weights({name: blurred(weights[name]) for name in sorted(weights)}, work)
    return output


def padded_vocabulary(model: Path, output: Path, extra: int = 64, scale: float = 4.0, seed: int = 0) -> Path:
    """``extra`` more rows in embeddings and head than the tokenizer has tokens, as many models have.

    The new rows are random and ``scale`` times as long as the longest real one, so that among them is
    nearly always the largest logit: who forgets to mask them draws them at once.
    """
    if extra < 1:
        raise ValueError("extra must be at least 1")
    generator = torch.Generator().manual_seed(seed)

    def padded(table: Tensor) -> Tensor:
        rows = torch.randn(extra, table.shape[1], generator=generator)
        rows *= scale * table.float().norm(dim=1).max() / rows.norm(dim=1, keepdim=True)
        return torch.cat([table, rows.to(table.dtype)])

    with _copied(model, output) as work:
        weights = load_file(work / WEIGHTS)
        for name in (EMBEDDINGS, HEAD):
            if name in weights:
                weights[name] = padded(weights[name])
        _save_weights(weights, work)
        _edit_json(work / "config.json", lambda config: _add(config, "vocab_size", extra))
    return output


def short_context(model: Path, output: Path, max_position_embeddings: int = 64) -> Path:
    """The same weights with room for fewer tokens, so that the limit is reached in a short test."""

    def shorten(config: dict[str, Any]) -> None:
        if max_position_embeddings >= config["max_position_embeddings"]:
            raise ValueError(f"the model has only {config['max_position_embeddings']} positions")
        config["max_position_embeddings"] = max_position_embeddings

    def shorten_tokenizer(config: dict[str, Any]) -> None:
        config["model_max_length"] = max_position_embeddings

    with _copied(model, output) as work:
        _edit_json(work / "config.json", shorten)
        _edit_json(work / "tokenizer_config.json", shorten_tokenizer)
    return output


def other_strings(model: Path, output: Path) -> Path:
    """As many tokens, but their strings moved on by one id: ids of the two can't be mixed.

    Nothing crashes when such a draft is paired with the original's target, it only talks nonsense, so
    a check by size isn't enough. Special tokens keep their ids.
    """

    def rotate(tokenizer: dict[str, Any]) -> None:
        special = {token["content"] for token in tokenizer["added_tokens"]}
        vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
        strings = [s for s in sorted(vocabulary, key=vocabulary.__getitem__) if s not in special]
        ids = [vocabulary[string] for string in strings]
        vocabulary.update(zip(strings, ids[1:] + ids[:1], strict=True))

    with _copied(model, output) as work:
        _edit_json(work / "tokenizer.json", rotate)
    return output


def cost_padded(model: Path, output: Path, layers: int = 8) -> Path:
    """``layers`` more layers that compute and add zero: the same distributions at a higher price.

    The last layer is repeated with zero output projections, so the residual stream passes unchanged,
    bit for bit, while attention, MLP and KV cache cost what a real layer's cost.
    """
    if layers < 1:
        raise ValueError("layers must be at least 1")
    with _copied(model, output) as work:
        config = json.loads((work / "config.json").read_text())
        last = config["num_hidden_layers"] - 1
        weights = load_file(work / WEIGHTS)
        for name, weight in list(weights.items()):
            match = LAYER_NAME.fullmatch(name)
            if match and int(match[1]) == last:
                silent = match[2] in OUTPUT_PROJECTIONS
                for new in range(last + 1, last + 1 + layers):
                    copied = torch.zeros_like(weight) if silent else weight.clone()
                    weights[f"model.layers.{new}.{match[2]}"] = copied
        if not all(f"model.layers.{last + 1}.{name}" in weights for name in OUTPUT_PROJECTIONS):
            raise ValueError(f"{model} isn't laid out like a Llama")
        _save_weights(weights, work)

        def deepen(config: dict[str, Any]) -> None:
            _add(config, "num_hidden_layers", layers)
            if config.get("layer_types"):
                config["layer_types"] += config["layer_types"][-1:] * layers

        _edit_json(work / "config.json", deepen)
    return output


def one_layer(model: Path, output: Path, hidden: int = 16) -> Path:
    """The first layer alone, cut to a residual stream of ``hidden`` numbers: nonsense at next to no cost.

    What is left of a round that such a model takes part in is everything but the model.
    """

    def cut(name: str, weight: Tensor) -> Tensor:
        if weight.ndim == 1 or name in (EMBEDDINGS, HEAD):
            return weight[..., :hidden]
        projection = name.split(".")[-2]
        if projection == "down_proj":
            return weight[:hidden, : 3 * hidden]
        if projection == "o_proj":
            return weight[:hidden]
        return weight[: 3 * hidden if projection in ("gate_proj", "up_proj") else None, :hidden]

    def shrink(config: dict[str, Any]) -> None:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.update(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=1)
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:1]

    with _copied(model, output) as work:
        config = json.loads((work / "config.json").read_text())
        if hidden > config["hidden_size"] or 3 * hidden > config["intermediate_size"]:
            raise ValueError(f"{model} is smaller than that")
        weights = load_file(work / WEIGHTS)
        layers = {name: LAYER_NAME.fullmatch(name) for name in weights}
        kept = [name for name, layer in layers.items() if layer is None or layer[1] == "0"]
        _save_weights({name: cut(name, weights[name]) for name in kept}, work)
        _edit_json(work / "config.json", shrink)
    return output


@contextmanager
def _copied(model: Path, output: Path) -> Iterator[Path]:
    """A copy of ``model`` to edit, which becomes ``output`` in one rename if nothing was raised."""
    if output.exists():
        raise FileExistsError(f"{output} already exists")
    if not (model / WEIGHTS).is_file():
        raise FileNotFoundError(f"{model} has no {WEIGHTS}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=output.parent) as temporary:
        work = Path(temporary) / "model"
        work.mkdir()
        for file in model.iterdir():
            # Contents only: a read-only original must not make a read-only copy.
            if file.is_file():
                shutil.copyfile(file, work / file.name)
        yield work
        work.rename(output)


def _save_weights(weights: dict[str, Tensor], folder: Path) -> None:
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    (folder / WEIGHTS).unlink()
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add(config: dict[str, Any], key: str, amount: int) -> None:
    config[key] += amount


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive a model from another one.")
    kinds = parser.add_subparsers(dest="kind", required=True)

    def kind(name: str, make: Callable[..., Path]) -> argparse.ArgumentParser:
        summary = (make.__doc__ or "").splitlines()[0]
        sub = kinds.add_parser(name, help=summary, description=summary)
        sub.add_argument("model", type=Path)
        sub.add_argument("output", type=Path)
        sub.set_defaults(make=make)
        return sub

    kind("draft-equals-target", draft_equals_target)
    kind("random-draft", random_draft).add_argument("--seed", type=int, default=0)
    blurred = kind("noisy", noisy)
    blurred.add_argument("--noise", type=float, default=0.1)
    blurred.add_argument("--seed", type=int, default=0)
    padded = kind("padded-vocabulary", padded_vocabulary)
    padded.add_argument("--extra", type=int, default=64)
    padded.add_argument("--scale", type=float, default=4.0)
    padded.add_argument("--seed", type=int, default=0)
    short = kind("short-context", short_context)
    short.add_argument("--max-position-embeddings", type=int, default=64)
    kind("other-strings", other_strings)
    kind("cost-padded", cost_padded).add_argument("--layers", type=int, default=8)
    kind("one-layer", one_layer).add_argument("--hidden", type=int, default=16)

    options = vars(parser.parse_args(arguments))
    make: Callable[..., Path] = options.pop("make")
    del options["kind"]
    try:
        print(make(**options))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
