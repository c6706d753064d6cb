"""Output that has to be of a form (a JSON Schema, a regular expression, a grammar): which tokens it allows at a place.

llguidance knows the forms, reads tokens, and takes them back. What is here makes of that a function of the tokens alone: a
`Form` is asked about any tokens, goes back to where they part from those that it was asked about last, and goes on from
there. So neither a rejection, nor a retry, nor another block leaves a trace. Without torch, since the orchestrator checks forms
with it before any work.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from tandem.v1 import sampling_pb2
from tandem.wire import IdArray

log = logging.getLogger(__name__)

MAX_FORM_CHARACTERS = 32_768
_MAX_PROBLEM_CHARACTERS = 200
_FORMS_KEPT = 64
"""Compiling takes a millisecond, or tens for a large schema; the completions of one call share it, and so do retries."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # some milliseconds; a form that takes more is refused
    max_lexer_states=10_000,  # one or two kilobytes each, of all outputs of a form together
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class FormError(ValueError):
    """A form that is none, is too large, or uses what isn't supported; the message says what, in under 300 characters."""


@dataclass(slots=True)
class FormStats:
    """Counters since the start; written by the thread that asks the forms, to be read from anywhere."""

    recompilations: int = 0
    """Of forms in use, because a limit was met: by one output, or by all outputs of a form together."""
    dead_ends: int = 0
    """Outputs that a form was too complex to go on after, compiled anew or not."""


class Forms:
    """Compiles forms for one tokenizer, without the GIL. An object belongs to one thread; a Form goes to any other."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of transformers; raises FormError for one that isn't a fast one. Takes a second for a large
        vocabulary."""
        from llguidance.hf import from_tokenizer  # imports transformers, which takes seconds

        try:
            self._tokenizer = from_tokenizer(tokenizer)
        except Exception as error:  # it raises what it likes for a tokenizer of a kind that it doesn't know
            raise FormError(f"this model's tokenizer can't be used: {_one_line(str(error))}") from error
        self.stats = FormStats()
        self._compiled = lru_cache(maxsize=_FORMS_KEPT)(self._compile)

    def check(self, message: sampling_pb2.StructuredOutput) -> None:
        """Raises FormError."""
        self._compiled(message.SerializeToString(deterministic=True))

    def form(self, sampling: sampling_pb2.Sampling) -> Form:
        """What the output of one request has to be; raises FormError."""
        compiled = self._compiled(sampling.structured_output.SerializeToString(deterministic=True))
        return Form(compiled, sampling.prompt_length, sampling.end_token_ids, self.stats)

    def _compile(self, serialized: bytes) -> _Compiled:
        return _Compiled(self._tokenizer, _grammar(sampling_pb2.StructuredOutput.FromString(serialized)))


class _Compiled:
    """What the outputs of one form share: copies of a matcher have the states of its lexer in common, which become only more."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.size: int = tokenizer.vocab_size
        self.renew()

    def renew(self) -> None:
        """Forgets the states that outputs have led to; raises FormError."""
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what can't begin shows here
        if matcher.is_error():
            problem = matcher.get_error()
            raise FormError("nothing is of this form" if problem.startswith("NoExtension") else _one_line(problem))
        self._matcher = matcher

    def matcher(self) -> LLMatcher:
        """One that has read nothing."""
        return self._matcher.deep_copy()


class Form:
    """The form of one request's output, asked row by row."""

    def __init__(self, compiled: _Compiled, prompt_length: int, end_token_ids: Any, stats: FormStats) -> None:
        self._compiled = compiled
        self._stats = stats
        self._prompt_length = prompt_length
        self._end_ids = np.array(sorted(end_token_ids), dtype=np.uint32)
        self._matcher = compiled.matcher()
        self._read = np.empty(0, dtype=np.uint32)
        """The output that the matcher has read."""
        self._dead_end: IdArray | None = None
        """An output that the form is too complex to go on after."""

    def allowed_after(self, tokens: IdArray) -> NDArray[np.bool_] | None:
        """Which tokens may follow the prompt and the output `tokens`, [ids of the tokenizer]: an end token exactly where the
        output may end. None where no output begins like this, or it has ended: what follows there is of no account. All false
        where the form is too complex to go on with."""
        output = tokens[self._prompt_length :]
        if np.isin(output, self._end_ids).any():
            return None
        if self._dead_end is None or _common(self._dead_end, output) < self._dead_end.size:
            allowed = self._allowed() if self._follow(output) else None
            if not self._matcher.is_error():
                return allowed
            # What met a limit may be what was asked before, or other outputs; now these tokens alone are read.
            self._recompile(output.size)
            allowed = self._allowed() if self._follow(output) else None
            if not self._matcher.is_error():
                return allowed
            self._start_afresh()
            self._dead_end = output.copy()
            self._stats.dead_ends += 1
            log.info("a form is too complex to go on with after %d tokens", output.size)
        return np.zeros(self._compiled.size, dtype=np.bool_)

    def longest_run(self, tokens: IdArray, continuation: IdArray) -> int:
        """How many tokens of `continuation` may follow `tokens`, which are the prompt and the output so far."""
        for length, token_id in enumerate(continuation.tolist()):
            allowed = self.allowed_after(np.concatenate((tokens, continuation[:length])))
            if allowed is None or token_id >= allowed.size or not allowed[token_id]:
                return length
        return continuation.size

    def _follow(self, output: IdArray) -> bool:
        """Whether the form reads these tokens. The matcher may be in error after it: the form is too complex to read them."""
        common = _common(self._read, output)
        if common < self._read.size and not self._matcher.rollback(self._read.size - common):
            self._start_afresh()
            common = 0
        rest = output[common:]
        read = self._matcher.try_consume_tokens(rest.tolist()) if rest.size else 0
        self._read = output[: common + read].copy()
        if read < rest.size:
            self._matcher.compute_bitmask()  # where it was a limit that ended the reading, the error shows only now
        return read == rest.size

    def _allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow those that were read; may leave the matcher in error."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little", count=self._compiled.size).view(np.bool_)
        allowed[self._end_ids[self._end_ids < allowed.size]] = self._matcher.is_accepting()
        return allowed

    def _recompile(self, length: int) -> None:
        """Counted and logged, since it holds up everything else in this thread. Of the form nothing is told: it is the caller's."""
        began = time.perf_counter()
        self._compiled.renew()
        self._start_afresh()
        self._stats.recompilations += 1
        seconds = time.perf_counter() - began
        log.info("a form met a limit at token %d of an output, and was compiled anew in %.1f ms", length, seconds * 1e3)

    def _start_afresh(self) -> None:
        self._matcher = self._compiled.matcher()
        self._read = self._read[:0]


def _grammar(message: sampling_pb2.StructuredOutput) -> str:
    kind = message.WhichOneof("form")
    text = getattr(message, kind) if kind else ""
    if not text:
        raise FormError("is empty")
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if len(text) > MAX_FORM_CHARACTERS:
        raise FormError(f"has more than {MAX_FORM_CHARACTERS} characters")
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text)
    except ValueError as error:
        raise FormError(_one_line(str(error))) from error


def _common(one: IdArray, other: IdArray) -> int:
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def _one_line(problem: str) -> str:
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    return " ".join(lines)[:_MAX_PROBLEM_CHARACTERS] or "can't be used"
