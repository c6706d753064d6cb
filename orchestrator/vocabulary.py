"""The target's tokenizer as the orchestrator uses it: encoding prompts, decoding tokens, checking workers' vocabularies."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tandem.model_info import token_strings, vocabulary_fingerprint
from tandem.sampling_limits import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SAMPLING_VERSION,
    in_range,
)
from tandem.structured_output import Forms
from tandem.v1 import sampling_pb2, worker_pb2

from .worker_stream import IncompatibleWorker

TOKEN_TEXTS = 32_768
"""Kept once decoded, which takes some ten microseconds each, and a round may need hundreds."""


class PromptNotEncodable(ValueError):
    """The chat template can't render the messages; the message says why, without their content."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults from the model's generation config, with the API's own where it has none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a value that no request could have."""
        if not (
            0.0 <= self.temperature <= MAX_TEMPERATURE
            and self.top_k >= 0
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
            and in_range(self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        ):
            raise ValueError(f"the model's generation config is out of range: {self}")


class Vocabulary:
    """A loaded tokenizer. Reads are thread-safe; encoding a long prompt belongs off the event loop."""

    def __init__(self, tokenizer: Any, generation_config: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        # How special-token text is read is a state of the tokenizer underneath, set by a call that wants it otherwise than the
        # one before. So there are two, and each is only ever asked for one way: no thread changes what another one reads.
        self._literal = copy.deepcopy(tokenizer)
        _settle(self._tokenizer, special_text_is_plain=False)
        _settle(self._literal, special_text_is_plain=True)
        self._strings = token_strings(tokenizer)
        self._special_strings = [text for text in tokenizer.all_special_tokens if text]
        self.defaults = _defaults(generation_config)
        self.size = len(self._strings)
        self.end_token_ids = _end_token_ids(tokenizer, generation_config)
        self._forms_thread = ThreadPoolExecutor(1, "forms")
        self._token_text = lru_cache(maxsize=TOKEN_TEXTS)(lambda token_id: str(tokenizer.decode([token_id])))
        # Of each token that comes out, its text by itself is asked for once: for the token after it.
        self._text_alone = lru_cache(maxsize=TOKEN_TEXTS)(
            lambda token_id: str(self._decode([token_id], skip_special_tokens=True))
        )
        self._fingerprint = lru_cache(maxsize=8)(lambda count: vocabulary_fingerprint(self._strings[:count]))

    async def check_form(self, form: sampling_pb2.StructuredOutput) -> None:
        """Compiles the form of an output, one at a time; raises FormError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._forms_thread, lambda: self._forms.check(form))

    def prepare_forms(self) -> None:
        """Begins what the first form would otherwise wait for, some seconds where there are many tokens, beside all else."""
        # A tokenizer that has no forms says so to each request that wants one.
        self._forms_thread.submit(lambda: self._forms)

    @cached_property
    def _forms(self) -> Forms:
        """Belongs to the one thread of `_forms_thread`."""
        return Forms(self._tokenizer)

    @cached_property
    def _decode(self) -> Callable[..., str]:
        return _decoder(self._tokenizer)

    @classmethod
    def load(cls, name: str, revision: str, gguf_file: str = "") -> Vocabulary:
        """Loads from a folder or by name; raises OSError or ValueError when there is none, ImportError where a GGUF file
        can't be read for want of a package."""
        # transformers is slow to import, and only this needs it.
        from transformers import AutoTokenizer
        from transformers.utils import cached_file

        source = {"gguf_file": gguf_file} if gguf_file else {}
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or None, **source)
        found = cached_file(
            name, "generation_config.json", revision=revision or None, _raise_exceptions_for_missing_entries=False
        )
        return cls(tokenizer, json.loads(Path(found).read_text()) if found else {})

    def encode_text(self, text: str) -> list[int]:
        """Encodes as it stands, special-token text included, with the tokenizer's BOS at most once."""
        ids = self._ids_of(text, add_special_tokens=True)
        bos = self._tokenizer.bos_token_id
        # Templated text already starts with BOS, and the tokenizer adds another.
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            return ids[1:]
        return ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Renders (role, content) messages with the chat template and encodes; special-token text in a content is
        encoded as plain text. Raises PromptNotEncodable."""
        if not self._tokenizer.chat_template:
            raise PromptNotEncodable("the model has no chat template; send text or token_ids")
        if not any(special in content for _, content in messages for special in self._special_strings):
            return self._ids_of(self._render(messages))
        return self._encode_with_plain_contents(messages)

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the model's own program and raises what it likes
            raise PromptNotEncodable(f"the chat template refused the messages: {type(error).__name__}") from error
        return rendered

    def _ids_of(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """With special-token text as special tokens."""
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _literal_ids_of(self, text: str) -> list[int]:
        """With special-token text as plain text."""
        ids: list[int] = self._literal(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _encode_with_plain_contents(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        # The template is rendered around marks, so that only its own special tokens are read as such.
        marks = [f"\ue000{index}\ue001" for index in range(len(messages))]
        rest = self._render([(role, mark) for (role, _), mark in zip(messages, marks, strict=True)])
        ids: list[int] = []
        for (_, content), mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise PromptNotEncodable("special-token text in a message that the chat template rewrites")
            ids += self._ids_of(before)
            ids += self._literal_ids_of(content)
        return ids + self._ids_of(rest)

    def encode_bad_word(self, text: str) -> list[list[int]]:
        """The token sequences of a text, without and with a space before it; one where both are the same."""
        bare = self._ids_of(text.lstrip())
        spaced = self._ids_of(" " + text.lstrip())
        return [bare] if spaced == bare else [bare, spaced]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        if len(ids) == 1:
            return self._text_alone(ids[0])
        text: str = self._decode(ids, skip_special_tokens=True)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._decode(ids, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones too; a part of a character is U+FFFD."""
        return self._token_text(token_id)

    def check_target(self, info: worker_pb2.GetModelInfoResponse) -> None:
        """Raises IncompatibleWorker unless the target speaks of the same tokens as this tokenizer."""
        self._check(info, "target")

    def check_draft(self, info: worker_pb2.GetModelInfoResponse) -> None:
        """Raises IncompatibleWorker unless the draft's tokens are the target's, or the first of them."""
        self._check(info, "draft")

    def _check(self, info: worker_pb2.GetModelInfoResponse, role: str) -> None:
        if info.vocabulary_size > self.size:
            raise IncompatibleWorker(
                f"the {role} model {info.model} has {info.vocabulary_size} tokens, the tokenizer {self.size}"
            )
        if info.vocabulary_fingerprint != self._fingerprint(info.vocabulary_size):
            raise IncompatibleWorker(
                f"the {role} model {info.model} has other token strings than the tokenizer of the orchestrator"
            )
        if info.sampling_version < SAMPLING_VERSION:
            raise IncompatibleWorker(
                f"the {role} service applies sampling version {info.sampling_version}, {SAMPLING_VERSION} is needed"
            )


def _settle(tokenizer: Any, *, special_text_is_plain: bool) -> None:
    """Makes the state of the tokenizer underneath, where there is one, what a first call would make of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = special_text_is_plain


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """Ids to text. Where transformers adds nothing to what the tokenizer underneath does, it is called itself, at a quarter of
    the time."""
    from transformers import PreTrainedTokenizerFast

    plain: Any = PreTrainedTokenizerFast
    kind: Any = type(tokenizer)
    adds_nothing = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is plain.decode
        and kind._decode is plain._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if adds_nothing else tokenizer.decode
    return decode


_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _defaults(generation_config: dict[str, Any]) -> GenerationDefaults:
    """Raises ValueError."""
    known = {name: generation_config[name] for name in _DEFAULTED if generation_config.get(name) is not None}
    for name, value in known.items():
        if not isinstance(value, int | float):
            raise ValueError(f"the model's generation config: {name} is no number")
    return GenerationDefaults(**known)


def _end_token_ids(tokenizer: Any, generation_config: dict[str, Any]) -> frozenset[int]:
    configured = generation_config.get("eos_token_id")
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)
