"""Loading: what is refused, and what is said of the model that is served."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tandem import model_info
from tandem.engine import loading
from tandem.engine.faults import ModelError
from tandem.engine.feed import Feed
from tandem.engine.loading import ModelOptions, load
from tandem.engine.ranks import Ranks
from tandem.engine.weight_layout import inputs_first_pays, lay_inputs_first
from tests.engine.models import over_slots, plain_logits, random_ids, random_model
from tests.support.services import MODELS

TINY = MODELS / "tiny-target"


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(TINY, folder / "model"))


def refused(model: Path | str, **options: object) -> str:
    with pytest.raises(ModelError) as raised:
        load(ModelOptions(str(model), **options))  # type: ignore[arg-type]
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_first_layers_alone_are_those_of_the_whole_model() -> None:
    whole, cut = (load(ModelOptions(str(TINY), slots=2, threads=1, layers=layers)) for layers in (0, 1))
    assert (cut.vocabulary_size, cut.context_length) == (whole.vocabulary_size, whole.context_length)
    assert cut.name.endswith("1 layers")
    kept, all_of_it = cut.lm._model.state_dict(), whole.lm._model.state_dict()  # type: ignore[attr-defined]
    assert len(cut.lm._model.model.layers) == 1 < len(whole.lm._model.model.layers)  # type: ignore[attr-defined]
    assert all(torch.equal(value, all_of_it[name]) for name, value in kept.items())
    assert "99 layers of a model that has" in refused(TINY, layers=99)
    assert "GGUF" in refused(TINY, layers=1, gguf_file="any.gguf")


def test_what_is_said_of_the_model() -> None:
    served = load(ModelOptions(str(TINY), slots=4, threads=1))
    assert served.vocabulary_size == served.padded_vocabulary_size == 512
    assert (served.context_length, served.slots) == (1024, 4)
    assert served.end_token_ids == (0,)
    assert (served.dtype, served.device) == ("float32", "cpu")
    strings = model_info.token_strings(AutoTokenizer.from_pretrained(TINY))
    assert served.vocabulary_fingerprint == model_info.vocabulary_fingerprint(strings)


def test_the_context_is_what_the_memory_holds() -> None:
    served = load(ModelOptions(str(TINY), slots=4, kv_memory_bytes=1 << 20))
    memory = served.lm.cache.memory_bytes
    assert served.context_length < 1024
    assert 0.95 * (1 << 20) < memory <= 1 << 20
    assert "holds no token" in refused(TINY, slots=4, kv_memory_bytes=100)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_caches_are_checked_too(context: int, slots: int) -> None:
    served = load(ModelOptions(str(TINY), slots=slots, threads=1, context_length=context))
    assert served.context_length == context
    assert served.lm._joined is not None  # type: ignore[attr-defined]


def test_other_dtypes_run() -> None:
    for dtype in ("bfloat16", "float16"):
        assert load(ModelOptions(str(TINY), slots=2, dtype=dtype)).dtype == dtype


def test_the_weights_lie_inputs_first_and_say_the_same() -> None:
    model = random_model(tie_word_embeddings=True)
    token_ids = np.arange(9, dtype=np.uint32)
    expected, embedding = plain_logits(model, token_ids), model.get_input_embeddings().weight
    assert inputs_first_pays(model)
    assert lay_inputs_first(model) == 2 * 7 + 1  # seven of each layer, and the head
    assert torch.allclose(plain_logits(model, token_ids), expected, atol=1e-4)
    assert {module.weight.stride(0) for module in model.modules() if type(module) is torch.nn.Linear} == {1}
    # Tokens are looked up by row: the head's copy is its own.
    assert model.get_input_embeddings().weight is embedding
    assert embedding.is_contiguous()
    assert not inputs_first_pays(random_model().to(torch.bfloat16))


def test_a_head_with_more_rows_than_tokens(tmp_path: Path) -> None:
    """Padding of the embedding is no vocabulary; a head that is too short cuts the vocabulary."""
    for rows in (576, 400):
        model = random_model("llama", vocab_size=rows)
        folder = tmp_path / str(rows)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, folder)
        served = load(ModelOptions(str(folder), slots=2))
        assert (served.vocabulary_size, served.padded_vocabulary_size) == (min(rows, 512), rows)


def test_a_missing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # A hub that can't be reached is asked again for most of a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("models/no-such-model")
    assert message.startswith("can't load model 'models/no-such-model' (no local folder of that name")


def test_a_corrupt_file(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"can't load model '{folder}' (folder)" in refused(folder)


def test_weights_that_are_not_safetensors_are_not_read(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in refused(folder)


def test_a_context_beyond_the_models() -> None:
    assert "context length 5000 is beyond the 1024 tokens" in refused(TINY, context_length=5000)


@pytest.mark.parametrize(
    ("model_type", "changes", "common"),
    [
        ("llama", {"sliding_window": 40}, 40),  # another one's, that it knows nothing of
        ("llama", {"sliding_window": 40, "layer_types": ["full_attention"] * 2}, 0),
        (
            "mistral",
            {"sliding_window": 40, "layer_types": ["full_attention"] * 2},
            40,
        ),  # which knows no other but sliding ones
        ("mistral", {"sliding_window": 40}, 0),
        ("mistral", {"sliding_window": 1}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}, 0),
        ("gemma2", {"sliding_window": 40, "layer_types": ["sliding_attention"] * 2}, 0),
    ],
)
def test_a_window_that_the_model_makes_something_else_of(
    model_type: str, changes: dict[str, object], common: int
) -> None:
    model = random_model(model_type, **changes)
    window = model.config.sliding_window
    pattern = loading._attention_pattern(model.config)
    assert loading._common_context(model, pattern) == common
    assert model.config.sliding_window == window
    ids = random_ids(1, common or 60)
    said = over_slots(model).forward([Feed(0, 0, ids, ids.size)])
    assert torch.allclose(said, plain_logits(model, ids), atol=1e-3)


def test_a_model_with_a_window_of_its_own_is_asked_by_nobody_else() -> None:
    model = random_model("llama", sliding_window=40)
    model.__class__ = type("Remote", (type(model),), {"__module__": "modeling_remote"})
    assert loading._common_context(model, loading._attention_pattern(model.config)) == 0


def test_no_session_goes_past_a_window_that_the_model_ignores(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"sliding_window": 40,', 1))
    assert load(ModelOptions(str(folder), slots=2)).context_length == 40
    assert "context length 41 is beyond the 40 tokens" in refused(folder, slots=2, context_length=41)


def test_a_device_that_is_not_there() -> None:
    assert "device 'cuda:77' can't be used" in refused(TINY, device="cuda:77")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    config = folder / "config.json"
    config.write_text(
        config.read_text()
        .replace('"model_type": "llama"', '"model_type": "own"')
        .replace("{", '{"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},', 1)
    )
    (folder / "own.py").write_text("raise SystemExit('code was run')")
    assert "custom code" in refused(folder)


def test_parts_that_cannot_be_even(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(TINY)
    options = ModelOptions(str(TINY), ranks=Ranks(3))
    with pytest.raises(ModelError, match="num_attention_heads is 4, which 3 ranks can't share evenly"):
        loading._check_parts(config, options)
    with pytest.raises(ModelError, match="no plan for tensor parallelism"):
        loading._check_parts(AutoConfig.for_model("gpt2"), options)
    with pytest.raises(ModelError, match="one alone, for 3 ranks"):
        loading._device("cuda:1", options.ranks)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ModelError, match="their parts go to the GPU that is there"):
        loading._device("cpu", options.ranks)
