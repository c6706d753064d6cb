"""Small models with random weights, as wide apart in their logits as trained ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.engine import loading
from tandem.engine.causal_lm import CausalLM
from tandem.engine.joined_layers import JoinedLayers, can_be_joined
from tandem.engine.slot_cache import SlotCache
from tandem.wire import IdArray

VOCABULARY = 96

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(model_type: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the given type, float32."""
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **changes})
    torch.manual_seed(seed)
    implementation = loading._attention_implementation(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def over_slots(model: Any, slots: int = 8, max_length: int = 64, *, join: bool = True) -> CausalLM:
    """The model with a slot cache; its layers are joined where the loader would do so, or run as they are, as on a GPU."""
    config = model.config.get_text_config()
    pattern = loading._attention_pattern(config)
    shapes = loading.layer_shapes(loading._probe(model))
    cache = SlotCache(shapes, slots, max_length, torch.float32, torch.device("cpu"))
    joined = JoinedLayers(model, pack_head=True) if join and can_be_joined(model) else None
    lm = CausalLM(model, pattern, cache, int(model.get_output_embeddings().weight.shape[0]), joined)
    loading._check_against_model(model, lm)
    return lm


@torch.inference_mode()
def plain_logits(model: Any, token_ids: IdArray) -> torch.Tensor:
    """The model's own forward over the whole sequence, [length, vocabulary]."""
    batch = torch.from_numpy(token_ids.astype(np.int64))[None]
    return model(input_ids=batch, use_cache=False).logits[0]


def plain_greedy(model: Any, token_ids: IdArray, count: int) -> list[int]:
    """`generate` of transformers, greedy, without an end."""
    batch = torch.from_numpy(token_ids.astype(np.int64))[None]
    output = model.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in output[0, token_ids.size :]]


def random_ids(seed: int, size: int, vocabulary: int = VOCABULARY) -> IdArray:
    """Token ids, no special ones among them."""
    return np.random.default_rng(seed).integers(3, vocabulary, size).astype(np.uint32)
