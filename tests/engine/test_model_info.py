"""Two models speak of the same tokens if their fingerprints agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem import model_info


def test_fingerprints_tell_strings_and_their_borders_apart() -> None:
    fingerprints = [
        model_info.vocabulary_fingerprint(strings)
        for strings in (["a", "b"], ["b", "a"], ["ab", ""], ["", "ab"], ["a"], ["a", "b", ""], ["\ud800"])
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert all(len(fingerprint) == 32 for fingerprint in fingerprints)


def test_ids_without_a_token_are_empty_strings() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "added": 3})
    assert model_info.token_strings(tokenizer) == ["a", "", "", "added"]


@pytest.mark.parametrize(
    ("declared", "of_tokenizer", "expected"),
    [(None, None, []), (5, None, [5]), ([7, 5], 2, [2, 5, 7]), (5, 5, [5]), (None, 0, [0])],
)
def test_end_tokens_are_a_union(declared: object, of_tokenizer: int | None, expected: list[int]) -> None:
    config, tokenizer = SimpleNamespace(eos_token_id=declared), SimpleNamespace(eos_token_id=of_tokenizer)
    assert model_info.end_token_ids(config, tokenizer) == expected
    assert model_info.end_token_ids(None, tokenizer) == ([] if of_tokenizer is None else [of_tokenizer])
