"""The committed models are what their scripts promise, and so are the variants made from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

MODELS = Path(__file__).resolve().parents[2] / "models"
TEXT = '''def first_line(path):
    """Return the first line of the file, or an empty string if the file is empty."""
    with open(path) as file:
        for line in file:
            return line
    return ""

class Counter:
    """Count how often every item was seen."""

    def __init__(self, items=None):
        self.counts = {}
        for item in items or ():
            self.add(item)

    def add(self, item):
        self.counts[item] = self.counts.get(item, 0) + 1
'''
CHAT = "<|user|>What does shutil.copyfile do?<|end|><|assistant|>Copy data from src to dst.<|end|>"


def load_script(name: str) -> ModuleType:
    """A script of the models folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


variants = load_script("variants")


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def token_ids(folder: Path, text: str = TEXT) -> torch.Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(folder)(text)["input_ids"]])


@torch.inference_mode()
def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[length, vocabulary] in float32."""
    return load(folder)(input_ids=ids, use_cache=False).logits[0]


def mean_overlap(target: Path, draft: Path, ids: torch.Tensor) -> float:
    p, q = (torch.softmax(logits(folder, ids), dim=-1) for folder in (target, draft))
    return torch.minimum(p, q).sum(-1).mean().item()


@pytest.fixture(params=["tiny", "stat"])
def target(request: pytest.FixtureRequest) -> Path:
    return MODELS / f"{request.param}-target"


@pytest.fixture
def tiny_target() -> Path:
    return MODELS / "tiny-target"


@pytest.fixture
def tiny_draft() -> Path:
    return MODELS / "tiny-draft"


class TestCommittedPairs:
    def test_tiny_pair_agrees_like_a_real_one(self, tiny_target: Path, tiny_draft: Path) -> None:
        for text in (TEXT, CHAT):
            assert 0.55 < mean_overlap(tiny_target, tiny_draft, token_ids(tiny_target, text)) < 0.85

    def test_tiny_target_has_learned_something(self, tiny_target: Path) -> None:
        ids = token_ids(tiny_target)
        loss = torch.nn.functional.cross_entropy(logits(tiny_target, ids)[:-1], ids[0, 1:])
        assert loss < 3.2  # nats; log V is 6.2

    def test_tiny_target_ends_its_answers(self, tiny_target: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_target)
        messages = [{"role": "user", "content": "What does textwrap.wrap do?"}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = load(tiny_target).generate(**prompt, max_new_tokens=100, do_sample=False)
        assert output[0, -1] == tokenizer.eos_token_id

    @pytest.mark.parametrize("text", ["😀", "🇩🇪 flag", "naïve 日本\x00\n\t", "👩‍👩‍👧‍👦", CHAT, TEXT, ""])
    def test_every_string_survives_the_tiny_tokenizer(self, tiny_target: Path, text: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_target)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_an_emoji_is_several_tiny_tokens(self, tiny_target: Path) -> None:
        tokens = AutoTokenizer.from_pretrained(tiny_target)("😀")["input_ids"]
        assert len(tokens) > 1

    @pytest.mark.parametrize("pair", ["tiny", "stat"])
    def test_a_pair_shares_its_tokenizer(self, pair: str) -> None:
        files = [MODELS / f"{pair}-{role}" / "tokenizer.json" for role in ("target", "draft")]
        assert files[0].read_bytes() == files[1].read_bytes()

    def test_the_stat_pair_is_neither_flat_nor_certain_nor_equal(self) -> None:
        target, draft = MODELS / "stat-target", MODELS / "stat-draft"
        ids = torch.randint(1, 20, (1, 400), generator=torch.Generator().manual_seed(0))
        log_p = torch.log_softmax(logits(target, ids), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        assert 1.5 < entropy < 2.5  # nats; log V is 3.0
        assert 0.5 < mean_overlap(target, draft, ids) < 0.7

    def test_the_stat_target_looks_beyond_the_last_tokens(self) -> None:
        target = MODELS / "stat-target"
        ids = torch.randint(1, 20, (2, 12), generator=torch.Generator().manual_seed(0))
        ids[1, -4:] = ids[0, -4:]
        rows = [torch.softmax(logits(target, row[None])[-1], dim=-1) for row in ids]
        assert torch.minimum(*rows).sum() < 0.95


class TestVariants:
    def test_draft_equals_target(self, target: Path, tmp_path: Path) -> None:
        made = variants.draft_equals_target(target, tmp_path / "made")
        assert {file.name for file in made.iterdir()} == {file.name for file in target.iterdir()}
        ids = torch.arange(1, 20)[None]
        assert torch.equal(logits(made, ids), logits(target, ids))

    def test_random_draft_hardly_agrees_and_is_seeded(
        self, tiny_target: Path, tiny_draft: Path, tmp_path: Path
    ) -> None:
        made = [variants.random_draft(tiny_draft, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
        ids = token_ids(tiny_target)
        assert mean_overlap(tiny_target, made[0], ids) < 0.3
        weights = [(folder / "model.safetensors").read_bytes() for folder in made]
        assert weights[0] == weights[1] != weights[2]

    def test_noisy_agrees_less_the_more_noise(self, tiny_target: Path, tmp_path: Path) -> None:
        ids = token_ids(tiny_target)
        little, much = (variants.noisy(tiny_target, tmp_path / f"{noise}", noise=noise) for noise in (0.02, 0.2))
        again = variants.noisy(tiny_target, tmp_path / "again", noise=0.2)
        assert mean_overlap(tiny_target, much, ids) < mean_overlap(tiny_target, little, ids) < 1.0
        assert (much / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()

    def test_padded_vocabulary_agrees_on_the_real_tokens(self, target: Path, tmp_path: Path) -> None:
        made = variants.padded_vocabulary(target, tmp_path / "made", extra=7)
        ids = torch.arange(1, 20)[None]
        before, after = logits(target, ids), logits(made, ids)
        assert after.shape[1] == before.shape[1] + 7
        assert torch.allclose(after[:, : before.shape[1]], before, atol=1e-5)
        assert json.loads((made / "config.json").read_text())["vocab_size"] == after.shape[1]

    def test_padded_vocabulary_shows_when_the_mask_is_missing(self, target: Path, tmp_path: Path) -> None:
        made = variants.padded_vocabulary(target, tmp_path / "made", extra=64)
        ids = torch.arange(1, 20)[None]
        real = logits(target, ids).shape[1]
        assert (logits(made, ids).argmax(-1) >= real).float().mean() > 0.8

    def test_short_context(self, target: Path, tmp_path: Path) -> None:
        made = variants.short_context(target, tmp_path / "made", max_position_embeddings=48)
        assert load(made).config.max_position_embeddings == 48
        ids = torch.arange(1, 20)[None]
        assert torch.equal(logits(made, ids), logits(target, ids))

    def test_short_context_refuses_to_lengthen(self, target: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="only"):
            variants.short_context(target, tmp_path / "made", max_position_embeddings=1 << 20)
        assert not list(tmp_path.iterdir())

    def test_other_strings_keeps_sizes_and_special_tokens(self, target: Path, tmp_path: Path) -> None:
        made = variants.other_strings(target, tmp_path / "made")
        old, new = (AutoTokenizer.from_pretrained(folder) for folder in (target, made))
        assert len(old) == len(new)
        assert old.all_special_ids == new.all_special_ids
        text = "abcd efgh"
        assert old(text)["input_ids"] != new(text)["input_ids"]
        assert new.decode(new(text)["input_ids"]) == text

    @pytest.mark.parametrize("layers", [1, 5])
    def test_cost_padded_says_the_same(self, target: Path, tmp_path: Path, layers: int) -> None:
        made = variants.cost_padded(target, tmp_path / "made", layers=layers)
        ids = torch.arange(1, 20)[None]
        assert torch.equal(logits(made, ids), logits(target, ids))
        deeper = load(made).config.num_hidden_layers
        assert deeper == load(target).config.num_hidden_layers + layers

    def test_one_layer_is_one_of_hidden_size_16(self, target: Path, tmp_path: Path) -> None:
        made = variants.one_layer(target, tmp_path / "made")
        config = load(made).config
        assert (config.num_hidden_layers, config.hidden_size) == (1, 16)
        ids = torch.arange(1, 20)[None]
        rows = torch.softmax(logits(made, ids), dim=-1)
        assert rows.shape == logits(target, ids).shape
        assert 0.02 < rows.max(-1).values.mean() < 0.98, "a distribution of its own at every position"
        with pytest.raises(ValueError, match="smaller"):
            variants.one_layer(made, tmp_path / "larger", hidden=32)

    def test_cost_padded_really_computes(self, tiny_target: Path, tmp_path: Path) -> None:
        made = variants.cost_padded(tiny_target, tmp_path / "made", layers=2)
        layer = load(made).model.layers[-1]
        assert not layer.self_attn.o_proj.weight.any()
        assert not layer.mlp.down_proj.weight.any()
        assert layer.self_attn.q_proj.weight.any()
        assert layer.mlp.up_proj.weight.any()

    def test_an_existing_output_is_left_alone(self, target: Path, tmp_path: Path) -> None:
        with pytest.raises(FileExistsError):
            variants.cost_padded(target, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_the_command_line(self, target: Path, tmp_path: Path) -> None:
        made = tmp_path / "made"
        assert variants.main(["cost-padded", str(target), str(made), "--layers", "1"]) == 0
        assert (made / "model.safetensors").is_file()
        assert variants.main(["cost-padded", str(target), str(made)]) == 1
