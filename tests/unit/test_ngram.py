"""What an n-gram draft proposes; and the rule with its one-hot q, against the law computed directly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from transformers import AutoTokenizer

from draft_service.config import DraftConfig
from draft_service.methods import prepare
from draft_service.ngram import look_up
from tandem import config, model_info
from tandem.acceptance import TargetRow, accept, check_drafted
from tandem.randomness import Lane, uniforms
from tests.support.services import MODELS

VOCABULARY = 8
TOKENS = 40_000
FEWER_TOKENS = 10_000
ALPHA = 1e-3


def ids(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ((1, 2, 3, 4, 9, 1, 2), 3, (3, 4, 9)),  # what followed 1 2
        ((1, 2, 3, 1, 2, 4, 1, 2), 1, (4,)),  # of two occurrences, the later one
        ((7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2), 1, (3,)),  # the longer run decides, though it is the earlier one
        ((5, 5, 5, 5), 2, (5,)),  # an occurrence may overlap the end; no more follows than there is
        ((1, 2, 3, 4), 2, ()),
        ((1, 9, 1), 2, ()),  # one token is no run
        ((1,), 2, ()),
        ((1, 2), 2, ()),
    ],
)
def test_the_block_is_what_followed_the_same_run_before(
    tokens: tuple[int, ...], count: int, expected: tuple[int, ...]
) -> None:
    found, run = look_up(ids(*tokens), count)
    assert found.tolist() == list(expected)
    assert (run > 0) == bool(expected)


def test_it_is_so_for_every_text() -> None:
    """Against the definition, word by word."""
    rng, runs = np.random.default_rng(8), set()
    for _ in range(400):
        text = rng.integers(0, rng.integers(1, 7), rng.integers(1, 40)).tolist()
        expected, expected_run = [], 0
        for run in (2, 3, 4):
            starts = [start for start in range(len(text) - run) if text[start : start + run] == text[-run:]]
            if starts:
                expected, expected_run = text[starts[-1] + run :][:5], run
        found, run = look_up(ids(*text), 5)
        assert (found.tolist(), run) == (expected, expected_run), text
        runs.add(run)
    assert runs == {0, 2, 3, 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAYERS", "1"),
        ("AHEAD_ROWS", "4"),
        ("STOP_BELOW", "0.5"),
        ("GGUF_FILE", "a.gguf"),
        ("DEVICE", "cuda"),
        ("DTYPE", "float16"),
        ("COMPILE", "inductor"),
    ],
)
def test_what_needs_a_model_is_refused_without_one(name: str, value: str) -> None:
    asked = {"TANDEM_DRAFT_MODEL": "somewhere", f"TANDEM_DRAFT_{name}": value}
    config.load(DraftConfig, [], asked)
    with pytest.raises(config.ConfigError, match=f"TANDEM_DRAFT_{name}={value} needs a model"):
        config.load(DraftConfig, [], {**asked, "TANDEM_DRAFT_METHOD": "ngram"})


@pytest.mark.parametrize("head", [400, 512, 600])
def test_the_vocabulary_is_that_of_the_model(tmp_path: Path, head: int) -> None:
    """A head may be narrower than the tokenizer, or padded: the target compares names and number of what it can say."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "tiny-target", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "config.json").read_text())
    tokens = settings["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": head}))
    prepared = prepare(
        config.load(DraftConfig, [], {"TANDEM_DRAFT_MODEL": str(folder), "TANDEM_DRAFT_METHOD": "ngram"})
    )
    assert tokens == 512
    assert prepared.reads_later
    assert prepared.model.vocabulary_size == min(tokens, head)
    assert prepared.model.padded_vocabulary_size == prepared.model.lm.padded_vocabulary_size == head
    full = model_info.token_strings(AutoTokenizer.from_pretrained(folder))
    assert prepared.model.vocabulary_fingerprint == model_info.vocabulary_fingerprint(full[:head])


def _generate(transitions: NDArray[np.float64], tokens: int, *, strict: bool) -> NDArray[np.int64]:
    """A text of a Markov target, drafted by n-grams of itself with one-hot q; `strict` accepts by p > 1/2 instead."""
    text = [0]
    lanes = uniforms(11, 0, 2 * tokens)[:, [Lane.ACCEPT, Lane.RESIDUAL]].tolist()
    outside = np.random.default_rng(5).random(2 * tokens)
    while len(text) < tokens:
        context = np.array(text[-16:], dtype=np.uint32)
        block = [
            check_drafted(int(token), ids(int(token)), np.ones(1, dtype=np.float32), VOCABULARY)
            for token in look_up(context, 3)[0]
        ]
        rows = []
        last = text[-1]
        for index in range(len(block) + 1):
            law = transitions[last]
            support = block[index].support_ids if index < len(block) else ids()
            rest = law.copy()
            rest[support] = 0.0
            draw = int(np.searchsorted(rest.cumsum(), outside[len(text) + index] * rest.sum(), side="right"))
            rows.append(TargetRow(law[support].astype(np.float32), float(rest.sum()), min(draw, VOCABULARY - 1)))
            if index < len(block):
                last = block[index].token_id
        drawn = lanes[len(text) : len(text) + len(block) + 1]
        if strict:
            drawn = [(0.5, residual) for _, residual in drawn]
        text += accept(block, rows, drawn).token_ids
    return np.array(text[:tokens])


@pytest.mark.parametrize("strict", [False, True])
def test_the_law_of_transitions_with_a_one_hot_q(strict: bool) -> None:
    """Planted in the second case: a draft token stands where p is above a half, as greedy thinking would have it."""
    transitions = np.random.default_rng(3).dirichlet(np.full(VOCABULARY, 0.6), VOCABULARY)
    text = _generate(transitions, FEWER_TOKENS if strict else TOKENS, strict=strict)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    expected = counts.sum(axis=1, keepdims=True) * transitions
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    p_value = float(stats.chi2.sf(statistic, int(often.sum()) - VOCABULARY))
    assert (p_value < 1e-6) if strict else (p_value > ALPHA)
