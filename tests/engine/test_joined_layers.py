"""Layers in few operations say what the model's own say; tests/engine/test_causal_lm.py has the batches."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from draft_service.config import DraftConfig
from tandem import config
from tandem.engine import joined_layers
from tandem.engine.faults import ModelError
from tandem.engine.feed import Feed
from tandem.engine.joined_layers import JoinedLayers, can_be_joined
from tandem.engine.loading import ModelOptions, load
from tandem.engine.weight_layout import PackedProduct
from tandem.engine.worker_settings import WorkerSettings
from target_service.config import TargetConfig
from tests.engine.models import over_slots, plain_logits, random_ids, random_model
from tests.engine.test_causal_lm import TOLERANCE, greedy, relative
from tests.support.services import MODELS

TINY = MODELS / "tiny-target"


@pytest.mark.parametrize(
    ("model_type", "changes", "known"),
    [
        ("llama", {}, True),
        ("mistral", {"sliding_window": 6}, True),
        ("qwen2", {}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, True),
        # Takes one mask for all layers, whatever types they are declared to be of.
        ("mistral", {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, False),
        ("llama", {"attention_bias": True}, False),
        ("llama", {"mlp_bias": True}, False),
        ("llama", {"hidden_act": "gelu"}, False),
        ("qwen3", {}, False),  # norms of queries and keys
        ("gemma3_text", {"sliding_window": 6}, False),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, False),
    ],
)
def test_only_layers_of_a_known_form_are_joined(model_type: str, changes: dict[str, object], known: bool) -> None:
    assert can_be_joined(random_model(model_type, **changes)) is known


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_layers_with_other_modules_are_not_joined(name: str) -> None:
    """As adapters and quantization put them there, in some layers alone."""
    model = random_model()
    last = model.model.layers[-1]
    changed = last.get_submodule(name)
    changed.__class__ = type("Adapted", (type(changed),), {})
    assert not can_be_joined(model)


def test_a_bias_of_some_inputs_alone_is_not_dropped() -> None:
    model = random_model("qwen2")
    model.model.layers[-1].self_attn.q_proj.bias = None
    assert not can_be_joined(model)


def test_what_fails_while_layers_are_joined_leaves_them_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_ids(3, 30, 512)
    expected = greedy(load(ModelOptions(str(TINY), slots=2, threads=1)).lm, prompt, 20)  # type: ignore[arg-type]
    monkeypatch.setattr(joined_layers, "_joined", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        plain = load(ModelOptions(str(TINY), slots=2, threads=1))
    assert "layers are not joined" in caplog.text
    assert greedy(plain.lm, prompt, 20) == expected  # type: ignore[arg-type]


def test_a_class_derived_from_a_known_one_is_not_joined() -> None:
    model = random_model()
    model.__class__ = type("Changed", (type(model),), {})
    assert not can_be_joined(model)


def test_the_models_own_layers_see_parts_of_the_joined_weights() -> None:
    model = random_model(tie_word_embeddings=True)
    ids = random_ids(1, 20)
    expected, embedding = plain_logits(model, ids), model.get_input_embeddings().weight
    joined = JoinedLayers(model)
    assert relative(plain_logits(model, ids), expected) < TOLERANCE
    assert model.get_input_embeddings().weight is embedding
    held = {module.weight.untyped_storage().data_ptr() for module in model.modules() if type(module) is torch.nn.Linear}
    assert len(held) == 2 * 4 + 1  # four products a layer, and the head's own copy
    assert model.lm_head.weight is not embedding
    assert not isinstance(joined._head, PackedProduct)


@pytest.mark.parametrize(("rope_type", "once"), [("default", True), ("linear", True), ("dynamic", False)])
def test_heads_are_turned_by_a_table_only_where_steps_turn_alike(rope_type: str, once: bool) -> None:
    model = random_model(rope_parameters={"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4})
    lm, ids = over_slots(model), random_ids(1, 20)
    logits = lm.forward([Feed(3, 0, ids, 20)])
    assert relative(logits, plain_logits(model, ids)) < TOLERANCE
    assert lm._joined is not None
    assert (lm._joined._turns is not None) == once


def test_a_packed_head_leaves_the_models_own_to_the_model() -> None:
    """Which is what it is compared with at the start."""
    model = random_model(tie_word_embeddings=True)
    ids = random_ids(1, 20)
    expected = plain_logits(model, ids)
    joined = JoinedLayers(model, pack_head=True)
    assert isinstance(joined._head, PackedProduct)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert relative(plain_logits(model, ids), expected) < TOLERANCE


def test_a_head_with_a_weight_of_its_own_is_not_copied() -> None:
    assert not isinstance(JoinedLayers(random_model(tie_word_embeddings=False), pack_head=True)._head, PackedProduct)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 64])
def test_a_packed_product_is_the_product(rows: int) -> None:
    weight, hidden = torch.randn(96, 32), torch.randn(2, rows, 32)
    assert relative(PackedProduct(weight)(hidden), hidden @ weight.t()) < TOLERANCE


@pytest.mark.parametrize(("service", "packed"), [(TargetConfig, True), (DraftConfig, False)])
def test_the_head_of_a_target_is_packed(service: type[WorkerSettings], packed: bool) -> None:
    """One row is what a draft wants, and what a packed head is slower for."""
    asked = ["--model", str(TINY), "--slots", "2", "--threads", "1", "--device", "cpu"]
    lm = load(config.load(service, asked, {}).model_options()).lm
    assert isinstance(lm._joined._head, PackedProduct) is packed  # type: ignore[attr-defined]


def _turned_the_other_way(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    other = heads.flip(2)
    heads.mul_(cosines).addcmul_(other, -sines)


def _of_other_tokens(self: PackedProduct, hidden: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _PACKED(self, hidden)
    return product.roll(1, -1)


_PACKED = PackedProduct.__call__


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [(joined_layers, "_turn", _turned_the_other_way), (PackedProduct, "__call__", _of_other_tokens)],
)
def test_layers_that_would_be_wrong_are_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: object, name: str, fault: object
) -> None:
    prompt = random_ids(3, 30, 512)
    options = ModelOptions(str(TINY), slots=2, threads=1, verifies=True)
    joined = load(options)
    assert joined.lm._joined is not None  # type: ignore[attr-defined]
    expected = greedy(joined.lm, prompt, 20)  # type: ignore[arg-type]

    monkeypatch.setattr(where, name, fault)
    with caplog.at_level(logging.WARNING):
        plain = load(options)
    assert "layers are not joined, since joined ones would be wrong" in caplog.text
    assert plain.lm._joined is None  # type: ignore[attr-defined]
    assert greedy(plain.lm, prompt, 20) == expected  # type: ignore[arg-type]


def test_reserved_tokens_that_are_all_alike_hide_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens of many vocabularies were never trained: of them it says nothing where each stands."""
    model = random_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[:32] = model.model.embed_tokens.weight[0]
    over_slots(model)
    monkeypatch.setattr(joined_layers, "_turn", _turned_the_other_way)
    with pytest.raises(ModelError, match="gives other logits over the slot cache"):
        over_slots(model)


def test_weights_take_no_more_memory() -> None:
    model = random_model(tie_word_embeddings=False)
    before = sum(parameter.nbytes for parameter in model.parameters())
    JoinedLayers(model)
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) == before
    assert np.isfinite(plain_logits(model, random_ids(1, 5)).numpy()).all()
