"""The forward of a model of Llama's kind in few operations, for a CPU.

A step of a small model is short, and on a CPU a third of it passed between the products: transformers writes a layer in some sixty
operations, most of them on a few hundred numbers. Here it has half as many: one product for queries, keys and values, one for
gate and up, the residual added by the product before it, a norm in four. Same values up to float32 rounding (docs/decisions.md has
the times).

The weights stay the model's own. Its linear layers see their parts of the joined ones, so the model itself can still be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM

from tandem.engine.slot_cache import SlotCache
from tandem.engine.weight_layout import lay_side_by_side

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
        return hidden / torch.hypot(length, self.floor) * self.weight


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


class JoinedLayers:
    """Takes the place of a transformers model whose cache is a SlotCache."""

    def __init__(self, model: Any) -> None:
        """Lays the model's weights out anew, in place. The model is one that `can_be_joined`."""
        base, config = model.model, model.config
        types: Sequence[str] = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        self._layers = [_joined(layer, kind) for layer, kind in zip(base.layers, types, strict=True)]
        self._head = lay_side_by_side([model.lm_head])
        self._embedding = base.embed_tokens.weight.detach()
        self._norm = _Norm.of(base.norm)
        self._rotary = base.rotary_emb
        attention = base.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._query_heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | dict[str, torch.Tensor],
        cache: SlotCache,
        keep: int,
    ) -> torch.Tensor:
        """Runs tokens at positions, both [batch, width], and stores their keys and values where the cache was told to. The
        mask is added to the scores. Returns the logits of the last `keep` tokens of each row, 0: of all."""
        batch, width = token_ids.shape
        hidden = functional.embedding(token_ids.reshape(-1), self._embedding)
        rotation = self._rotation(hidden, positions)
        for index, layer in enumerate(self._layers):
            seen = mask[layer.mask] if isinstance(mask, dict) else mask
            attended = self._attention(layer, hidden, rotation, seen, cache, index)
            hidden = torch.addmm(hidden, attended, layer.attention_output)
            gate, up = torch.mm(layer.mlp_norm(hidden), layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down)
        kept = hidden.view(batch, width, -1)[:, -keep:] if keep else hidden.view(batch, width, -1)
        return torch.matmul(self._norm(kept), self._head)

    def _rotation(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [batch * width, 1, dim]; the sines have the sign of what they are multiplied with."""
        cosines, sines = self._rotary(hidden, positions)
        half = self._dim // 2
        signed = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
        return cosines.reshape(-1, 1, self._dim), signed.reshape(-1, 1, self._dim)

    def _attention(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        cache: SlotCache,
        index: int,
    ) -> torch.Tensor:
        """What the heads found, [batch * width, heads * dim]."""
        dim, queries, keys = self._dim, self._query_heads, self._key_heads
        batch, tokens = mask.shape[0], hidden.shape[0]
        normed = layer.attention_norm(hidden)
        joined = (
            torch.mm(normed, layer.queries_keys_values)
            if layer.bias is None
            else torch.addmm(layer.bias, normed, layer.queries_keys_values)
        ).view(tokens, queries + 2 * keys, dim)
        rotated = _rotated(joined[:, : queries + keys], *rotation)
        held_keys, held_values = cache.layers[index].store(rotated[:, queries:], joined[:, queries + keys :])
        found = functional.scaled_dot_product_attention(
            rotated[:, :queries].view(batch, -1, queries, dim).transpose(1, 2),
            held_keys,
            held_values,
            attn_mask=mask,
            enable_gqa=queries != keys,
        )
        return found.transpose(1, 2).reshape(tokens, queries * dim)


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


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor) -> torch.Tensor:
    """Heads [tokens, heads, dim], each half of a head turned against the other."""
    halves = heads.view(*heads.shape[:2], 2, -1)
    return torch.addcmul(heads * cosines, halves.flip(2).view_as(heads), signed_sines)
