"""The forward of a model of Llama's kind in few operations, for a CPU.

A step of a small model is short, and on a CPU a third of it passed between the products: transformers writes a layer in some sixty
operations, most of them on a few hundred numbers. Here it has a third of them: one product for queries, keys and values, one for
gate and up, the residual added by the product before it, a norm in four, and parts of a tensor that are named once for all layers.
Same values up to float32 rounding (docs/decisions.md has the times).

The weights stay the model's own. Its linear layers see their parts of the joined ones, so the model itself can still be run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

from tandem.engine.slot_cache import SlotCache, SlotLayer
from tandem.engine.weight_layout import PackedProduct, can_pack, lay_side_by_side

_MOST_KEPT = 16
"""Tokens of a step whose places are kept for the next one of its size."""
_KINDS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
"""Exactly these: a subclass may compute something else."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """A root mean square norm: x * weight / sqrt(mean(x^2) + eps)."""

    weight: torch.Tensor
    """Times the root of the size, so that the length of x can stand for its mean square."""
    floor: torch.Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        weight = module.weight.detach()
        size = weight.shape[0]
        return cls(weight * size**0.5, torch.tensor((size * module.variance_epsilon) ** 0.5, device=weight.device))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return (hidden / torch.hypot(length, self.floor, out=length)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one layer multiplies with: weights [inputs, outputs], as they lie in memory."""

    attention_norm: _Norm
    queries_keys_values: torch.Tensor
    bias: torch.Tensor | None
    attention_output: torch.Tensor
    mlp_norm: _Norm
    gate_up: torch.Tensor
    down: torch.Tensor
    mask: str
    """The type of the layer, where the types have masks of their own."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """How heads are turned at each position, or for each token of a step."""

    cosines: torch.Tensor
    """[positions, 1, 2, dim / 2], as are the sines."""
    sines: torch.Tensor
    """With the sign of what they are multiplied with."""

    def at(self, positions: torch.Tensor) -> _Turns:
        """Those of some positions, [tokens]."""
        return _Turns(self.cosines.index_select(0, positions), self.sines.index_select(0, positions))


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the large products of a step are written, the same for all layers, with the parts that are read of them. Naming a part takes
    as long as a small operation does."""

    joined: torch.Tensor
    """Queries, keys and values, [tokens, all heads * dim]."""
    turned: torch.Tensor
    """Queries and keys, [tokens, heads, 2, dim / 2]."""
    own_queries: torch.Tensor
    """[tokens, heads, dim]"""
    queries: torch.Tensor
    """[batch, heads, width, dim]: the same, or where padding is not computed, a copy of them with its places."""
    keys: torch.Tensor
    """[tokens, heads, dim], as are the values."""
    values: torch.Tensor
    gate_up: torch.Tensor
    """[tokens, 2 * intermediate]"""
    gate: torch.Tensor
    up: torch.Tensor
    real: torch.Tensor | None
    """The places of the tokens among those of the batch, [tokens], where padding is not computed."""
    padded: torch.Tensor
    """What `queries` shows, [batch * width, heads, dim]."""


class JoinedLayers:
    """Takes the place of a transformers model whose cache is a SlotCache."""

    def __init__(self, model: Any, *, pack_head: bool = False) -> None:
        """Lays the model's weights out anew, in place. The model is one that `can_be_joined`. `pack_head`: where logits of several
        tokens of a request are wanted in a step, and no compiler has to read the head."""
        base, config = model.model, model.config
        types: Sequence[str] = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        self._layers = [_joined(layer, kind) for layer, kind in zip(base.layers, types, strict=True)]
        self._head = _packed_head(model) if pack_head and _can_be_packed(model) else _plain_head(model)
        self._embedding = base.embed_tokens.weight.detach()
        self._norm = _Norm.of(base.norm)
        self._rotary = base.rotary_emb
        self._signs = torch.tensor([[-1.0], [1.0]], device=self._embedding.device)
        attention = base.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._query_heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._turns: _Turns | None = None
        """Those of all positions, where they are the same in every step; made in the first one."""
        self._kept: dict[tuple[int, int], _Step] = {}
        """By batch and tokens."""

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor] | None,
        cache: SlotCache,
        keep: int,
    ) -> torch.Tensor:
        """Runs tokens at positions, both [batch, width], and stores their keys and values where the cache was told to. The
        mask is added to the scores; None where every token sees all columns. Returns the logits of the last `keep` tokens of each row, 0: of all."""
        batch, width = token_ids.shape
        hidden = self._hidden(token_ids.reshape(-1), positions, mask, cache, None)
        kept = hidden.view(batch, width, -1)[:, -keep:] if keep else hidden.view(batch, width, -1)
        return self._head(self._norm(kept))

    def wanted_logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        cache: SlotCache,
        real: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """The same for the tokens at the places `real` of the flattened batch, rising; the others are padding, and are not
        computed. The cache expects keys and values of these alone. Returns the logits of those of them that are `wanted`."""
        hidden = self._hidden(token_ids.reshape(-1)[real], positions, mask, cache, real)
        return self._head(self._norm(hidden.index_select(0, wanted)))

    def _hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor] | None,
        cache: SlotCache,
        real: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the layers make of the tokens, [tokens, hidden size]."""
        hidden = functional.embedding(token_ids, self._embedding)
        places = positions.reshape(-1) if real is None else positions.reshape(-1)[real]
        turns = self._turned(hidden, places, cache)
        step = self._step(hidden, positions, real)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            seen = mask[layer.mask] if isinstance(mask, dict) else mask
            hidden.addmm_(self._attended(layer, hidden, turns, step, seen, store), layer.attention_output)
            torch.mm(layer.mlp_norm(hidden), layer.gate_up, out=step.gate_up)
            hidden.addmm_(functional.silu(step.gate).mul_(step.up), layer.down)
        return hidden

    def _turned(self, hidden: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> _Turns:
        """For tokens at positions, [tokens]."""
        if not _is_fixed(self._rotary) or torch.compiler.is_compiling():
            return self._turns_at(hidden, positions)
        if self._turns is None or self._turns.cosines.shape[0] < cache.columns:
            self._turns = self._turns_at(hidden, torch.arange(cache.columns, device=positions.device))
        return self._turns.at(positions)

    def _turns_at(self, hidden: torch.Tensor, positions: torch.Tensor) -> _Turns:
        cosines, sines = self._rotary(hidden, positions[None])
        halves = (positions.shape[0], 1, 2, self._dim // 2)
        return _Turns(cosines.reshape(halves), sines.reshape(halves) * self._signs)

    def _step(self, hidden: torch.Tensor, positions: torch.Tensor, real: torch.Tensor | None) -> _Step:
        size = (positions.shape[0], hidden.shape[0])
        if real is not None or torch.compiler.is_compiling() or hidden.shape[0] > _MOST_KEPT:
            return self._places(hidden, positions, real)
        if size not in self._kept:
            self._kept[size] = self._places(hidden, positions, None)
        return self._kept[size]

    def _places(self, hidden: torch.Tensor, positions: torch.Tensor, real: torch.Tensor | None) -> _Step:
        batch, tokens = positions.shape[0], hidden.shape[0]
        dim, queries, keys = self._dim, self._query_heads, self._key_heads
        joined = hidden.new_empty(tokens, (queries + 2 * keys) * dim)
        heads = joined.view(tokens, -1, dim)
        own_queries = heads[:, :queries]
        padded = own_queries if real is None else hidden.new_zeros(positions.numel(), queries, dim)
        gate_up = hidden.new_empty(tokens, self._layers[0].gate_up.shape[1])
        gate, up = gate_up.chunk(2, dim=-1)
        return _Step(
            joined=joined,
            turned=heads[:, : queries + keys].view(tokens, -1, 2, dim // 2),
            own_queries=own_queries,
            queries=padded.view(batch, -1, queries, dim).transpose(1, 2),
            keys=heads[:, queries : queries + keys],
            values=heads[:, queries + keys :],
            gate_up=gate_up,
            gate=gate,
            up=up,
            real=real,
            padded=padded,
        )

    def _attended(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        turns: _Turns,
        step: _Step,
        mask: torch.Tensor | None,
        store: SlotLayer,
    ) -> torch.Tensor:
        """What the heads found, [tokens, heads * dim]."""
        normed = layer.attention_norm(hidden)
        if layer.bias is None:
            torch.mm(normed, layer.queries_keys_values, out=step.joined)
        else:
            torch.addmm(layer.bias, normed, layer.queries_keys_values, out=step.joined)
        _turn(step.turned, turns.cosines, turns.sines)
        keys, values = store.store(step.keys, step.values)
        if step.real is not None:
            step.padded.index_copy_(0, step.real, step.own_queries)
        found = functional.scaled_dot_product_attention(
            step.queries, keys, values, attn_mask=mask, enable_gqa=self._query_heads != self._key_heads
        )
        of_tokens = found.transpose(1, 2).reshape(-1, found.shape[1] * found.shape[3])
        return of_tokens if step.real is None else of_tokens.index_select(0, step.real)


def can_be_joined(model: Any) -> bool:
    """Whether the model is of a kind whose layers are known here."""
    if type(model) not in _KINDS:
        return False
    config = model.config
    # Only the third kind has a mask for each type of layer; the others take one for all, whatever types are declared.
    of_one_type = type(model) is Qwen2ForCausalLM or len(set(getattr(config, "layer_types", None) or [""])) == 1
    return (
        of_one_type
        and config.hidden_act == "silu"
        and config._attn_implementation == "sdpa"
        and _without_bias(model.lm_head)
        and all(map(_is_known, model.model.layers))
    )


def _is_known(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    return (
        all(type(each) is nn.Linear for each in inputs)
        and len({each.bias is None for each in inputs}) == 1
        and all(map(_without_bias, (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)))
    )


def _without_bias(module: Any) -> bool:
    return type(module) is nn.Linear and module.bias is None


def _joined(layer: Any, kind: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    biased = inputs[0].bias is not None
    return _Layer(
        attention_norm=_Norm.of(layer.input_layernorm),
        queries_keys_values=lay_side_by_side(inputs),
        bias=torch.cat([each.bias.detach() for each in inputs]) if biased else None,
        attention_output=lay_side_by_side([attention.o_proj]),
        mlp_norm=_Norm.of(layer.post_attention_layernorm),
        gate_up=lay_side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=lay_side_by_side([mlp.down_proj]),
        mask=kind,
    )


def _plain_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    laid = lay_side_by_side([model.lm_head])
    return lambda hidden: torch.matmul(hidden, laid)


def _can_be_packed(model: Any) -> bool:
    """A head that shares its weight with the embedding gets a copy of its own in any case."""
    shared: bool = model.lm_head.weight is model.model.embed_tokens.weight
    return shared and can_pack()


def _packed_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return PackedProduct(model.lm_head.weight.detach())


def _is_fixed(rotary: Any) -> bool:
    """Whether heads at a position are turned alike in every step, however long the longest of its sessions is."""
    return "dynamic" not in rotary.rope_type and rotary.rope_type != "longrope"


def _turn(heads: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor) -> None:
    """Turns heads, [tokens, heads, 2, dim / 2], in place: each half of a head against the other."""
    other = heads.flip(2)
    heads.mul_(cosines).addcmul_(other, signed_sines)
