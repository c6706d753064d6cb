"""What changes logits before the temperature: bias, penalties, tokens without mass (torch).

Order and meaning are stated at `Sampling` in proto/tandem/v1/sampling.proto; each step is that of the transformers
processor of its name, presence and frequency are vLLM's. Every row is adjusted by exactly the tokens before it, read anew from the
session's tokens each time: there are no counts that a rejection could leave behind, and reading them costs under 0.1 ms for
8,000 tokens. Rows of requests that ask for none of this are not looked at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.sampling_limits import (
    MAX_ADDITIVE_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    check_counts,
    in_range,
)
from tandem.v1 import sampling_pb2
from tandem.wire import IdArray

_NO_LOGIT = -math.inf


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """Sequences of one length, all but their last token and the last token apart."""

    beginnings: IdArray
    """[n, length - 1]"""
    endings: IdArray
    """[n]"""

    def endings_after(self, context: IdArray) -> IdArray:
        """The tokens that would complete a sequence."""
        length = self.beginnings.shape[1]
        if length > context.size:
            return self.endings[:0]
        matches: NDArray[np.bool_] = (self.beginnings == context[context.size - length :]).all(axis=-1)
        endings: IdArray = self.endings[matches]
        return endings


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """What one request asks for; it asks for something."""

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_length: int
    bias_ids: IdArray
    biases: NDArray[np.float32]
    banned_ids: IdArray
    allowed_ids: IdArray
    """Empty where all are allowed."""
    bad_words: tuple[BadWords, ...]

    @classmethod
    def from_proto(cls, message: sampling_pb2.Sampling) -> Adjustments | None:
        """None where the message asks for nothing; raises ValueError, naming the field, for a value out of range."""
        check_counts(message)
        _check_values(message)
        found = cls(
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            prompt_length=message.prompt_length,
            bias_ids=_ids(message.bias_token_ids),
            biases=np.array(message.biases, dtype=np.float32),
            banned_ids=_ids(message.banned_token_ids),
            allowed_ids=_ids(message.allowed_token_ids),
            bad_words=tuple(_by_length(tuple(word.ids) for word in message.bad_words)),
        )
        return found if found._asks_for_something else None

    @property
    def reads_context(self) -> bool:
        """Whether the tokens before a row matter."""
        return self._penalises or any(words.beginnings.shape[1] for words in self.bad_words)

    @property
    def _penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def _asks_for_something(self) -> bool:
        return bool(
            self._penalises or self.bias_ids.size or self.banned_ids.size or self.allowed_ids.size or self.bad_words
        )


def adjust(
    scores: Tensor,
    adjustments: Sequence[Adjustments | None],
    positions: Sequence[int],
    contexts: Sequence[IdArray | None] | None,
) -> Tensor:
    """Adjusted scores [R, V]; the very same tensor where there is nothing to do, and never written to.

    The tokens before row i are the first `positions[i]` of `contexts[i]`. Rows of one block share one array, which is then read
    once; it is needed only where an adjustment reads its context.
    """
    if not any(adjustments):
        return scores
    edits = _Edits(scores.shape[-1])
    for rows in _blocks(adjustments, contexts):
        adjustment = adjustments[rows[0]]
        if adjustment is not None:
            tokens = contexts[rows[0]] if contexts is not None else None
            edits.add(adjustment, rows, [positions[row] for row in rows], tokens)
    return edits.applied(scores)


class _Entries:
    """(row, token id, value) triples, of many rows."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, rows: NDArray[np.int64], ids: NDArray[Any], values: NDArray[np.float32] | float = 0.0) -> None:
        self._rows.append(rows)
        self._ids.append(ids.astype(np.int64))
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), ids.shape))

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """The places and the values; None where there are none."""
        if not self._rows:
            return None
        rows, ids, values = (np.concatenate(parts) for parts in (self._rows, self._ids, self._values))
        place = torch.from_numpy(np.stack((rows, ids))).to(device)
        return (place[0], place[1]), torch.from_numpy(values).to(device)


@dataclass(slots=True)
class _Edits:
    """All that is to be done with a batch of rows, step by step over all of them."""

    vocabulary_size: int
    biases: _Entries = field(default_factory=_Entries)
    repetitions: _Entries = field(default_factory=_Entries)
    frequencies: _Entries = field(default_factory=_Entries)
    presences: _Entries = field(default_factory=_Entries)
    banned: _Entries = field(default_factory=_Entries)
    allowed: _Entries = field(default_factory=_Entries)
    restricted_rows: list[int] = field(default_factory=list)

    def add(
        self, adjustment: Adjustments, rows: Sequence[int], positions: Sequence[int], tokens: IdArray | None
    ) -> None:
        """The rows of one block of one request."""
        if adjustment.reads_context:
            if tokens is None or tokens.size < max(positions):
                raise ValueError(f"row {rows[0]}: the tokens before it are missing")
            self._add_penalties(adjustment, np.array(rows), positions, tokens)
        for row, position in zip(rows, positions, strict=True):
            self._add_everywhere(self.biases, row, adjustment.bias_ids, adjustment.biases)
            self._add_everywhere(self.banned, row, adjustment.banned_ids)
            for words in adjustment.bad_words:
                context = tokens[:position] if tokens is not None else words.endings[:0]
                self._add_everywhere(self.banned, row, words.endings_after(context))
            if adjustment.allowed_ids.size:
                self._add_everywhere(self.allowed, row, adjustment.allowed_ids)
                self.restricted_rows.append(row)

    def _add_everywhere(
        self, entries: _Entries, row: int, ids: IdArray, values: NDArray[np.float32] | float = 0.0
    ) -> None:
        if not ids.size:
            return
        known = ids < self.vocabulary_size  # a draft may have fewer tokens than the target
        if not known.all():
            values = values[known] if isinstance(values, np.ndarray) else values
            ids = ids[known]
        entries.add(np.full(ids.size, row), ids, values)

    def _add_penalties(
        self, adjustment: Adjustments, rows: NDArray[np.int64], positions: Sequence[int], tokens: IdArray
    ) -> None:
        if adjustment.repetition_penalty != 1.0:
            ids, counts = self._counts(tokens, 0, positions)
            row, seen = np.nonzero(counts)
            self.repetitions.add(rows[row], ids[seen], adjustment.repetition_penalty)
        if adjustment.frequency_penalty == adjustment.presence_penalty == 0.0:
            return
        ids, counts = self._counts(tokens, adjustment.prompt_length, positions)
        row, seen = np.nonzero(counts)
        if adjustment.frequency_penalty:
            times = counts[row, seen].astype(np.float32)
            self.frequencies.add(rows[row], ids[seen], times * np.float32(adjustment.frequency_penalty))
        if adjustment.presence_penalty:
            self.presences.add(rows[row], ids[seen], adjustment.presence_penalty)

    def _counts(self, tokens: IdArray, start: int, positions: Sequence[int]) -> tuple[IdArray, NDArray[np.int64]]:
        """Ids among the tokens from `start`, [n], and how often each stands before each position, [positions, n]."""
        longest = max(positions)
        ids, totals = np.unique(tokens[start:longest], return_counts=True)
        counts = np.repeat(totals[None], len(positions), axis=0)
        for row, position in enumerate(positions):
            later = tokens[max(position, start) : longest]
            np.subtract.at(counts[row], np.searchsorted(ids, later), 1)
        known = np.searchsorted(ids, self.vocabulary_size)
        return ids[:known], counts[:, :known]

    def applied(self, scores: Tensor) -> Tensor:
        """All steps in their order, on a copy."""
        device = scores.device
        scores = scores.clone()
        if (entries := self.biases.on(device)) is not None:
            place, biases = entries
            scores[place] += biases
        if (entries := self.repetitions.on(device)) is not None:
            place, penalties = entries
            seen = scores[place]
            scores[place] = torch.where(seen < 0, seen * penalties, seen / penalties)
        for subtracted in (self.frequencies, self.presences):
            if (entries := subtracted.on(device)) is not None:
                place, penalties = entries
                scores[place] -= penalties
        if (entries := self.banned.on(device)) is not None:
            scores[entries[0]] = _NO_LOGIT
        if self.restricted_rows:
            return self._restricted(scores)
        return scores

    def _restricted(self, scores: Tensor) -> Tensor:
        rows = torch.tensor(self.restricted_rows, device=scores.device)
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        forbidden[rows] = True
        entries = self.allowed.on(scores.device)
        if entries is not None:
            forbidden[entries[0]] = False
        return scores.masked_fill_(forbidden, _NO_LOGIT)


def _blocks(
    adjustments: Sequence[Adjustments | None], contexts: Sequence[IdArray | None] | None
) -> Iterable[list[int]]:
    """Runs of rows that share request and context."""
    block: list[int] = []
    for row, adjustment in enumerate(adjustments):
        same = block and adjustment is adjustments[block[0]]
        if same and (contexts is None or contexts[row] is contexts[block[0]]):
            block.append(row)
            continue
        if block:
            yield block
        block = [row]
    if block:
        yield block


def _check_values(message: sampling_pb2.Sampling) -> None:
    penalty = message.repetition_penalty
    if penalty != 0.0 and not in_range(penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY):
        raise ValueError(
            f"repetition_penalty must be in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}], got {penalty}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(message, name)
        if not in_range(value, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY):
            raise ValueError(f"{name} must be in [-2, 2], got {value}")
    if len(message.biases) != len(message.bias_token_ids):
        raise ValueError(f"biases: {len(message.biases)} for {len(message.bias_token_ids)} bias_token_ids")
    if not all(map(math.isfinite, message.biases)):
        raise ValueError("biases must be finite")
    if len(set(message.bias_token_ids)) != len(message.bias_token_ids):
        raise ValueError("bias_token_ids must be all different")


def _ids(values: Iterable[int]) -> IdArray:
    return np.fromiter(values, dtype=np.uint32)


def _by_length(words: Iterable[tuple[int, ...]]) -> Iterable[BadWords]:
    groups: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for word in words:
        groups[len(word)].add(word)
    for _, group in sorted(groups.items()):
        ids = np.array(sorted(group), dtype=np.uint32)
        yield BadWords(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, -1]))
