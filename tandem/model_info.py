"""What identifies a model's vocabulary, without torch, so that the orchestrator can check it too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any


def token_strings(tokenizer: Any) -> list[str]:
    """The string of every token id of a transformers tokenizer, from 0; ids without a token are empty strings."""
    by_string: dict[str, int] = tokenizer.get_vocab()
    strings = [""] * (max(by_string.values()) + 1)
    for string, token_id in by_string.items():
        strings[token_id] = string
    return strings


def vocabulary_fingerprint(token_strings: Sequence[str]) -> bytes:
    """SHA-256 over the token strings in order, each as UTF-8 after its length in 4 bytes, little-endian."""
    digest = hashlib.sha256()
    for string in token_strings:
        encoded = string.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


def end_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text for this model: those of its generation config and its tokenizer's, rising."""
    declared = generation_config.eos_token_id if generation_config is not None else None
    ids = set(declared if isinstance(declared, Iterable) else [] if declared is None else [declared])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(int(token_id) for token_id in ids)
