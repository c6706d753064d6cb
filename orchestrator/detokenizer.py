"""Text from tokens, one token at a time, never taking back what was sent.

A token may end in the middle of a character, and its text may depend on the token before it (SentencePiece drops the
leading space of a first piece). So a small window of earlier tokens is decoded along, and text that ends in a
replacement character waits for the next token. The cost of a token doesn't grow with the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MOST_SILENT = 32
"""Tokens without text that are decoded along: more of them than may wait for what comes after."""
_CHARACTER_TOKENS = 4
"""A character has no more bytes, and a token none of fewer than one."""


class Detokenizer:
    """Pieces that concatenate to `decode(all ids)`."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0
        """Tokens of the window whose text has been given out."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        piece = self._new_text()
        if not piece or piece.endswith(_REPLACEMENT):
            if len(self._window) - self._read <= _MOST_SILENT:
                return ""
            if piece:
                return self._certain_text()
            del self._window[self._read :]  # special tokens that are left out, one after the other
            return ""
        return self._give_out(piece, len(self._window))

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """What `push` says of each of them, in fewer calls."""
        decode, window, pieces = self._decode, self._window, []
        for token_id in token_ids:
            if self._read == 1 and len(window) == 1:  # the one before, whose text was given out: so it is nearly always
                piece = decode([window[0], token_id])[len(decode(window)) :]
                if piece and piece[-1] != _REPLACEMENT:
                    window[0] = token_id
                    pieces.append(piece)
                    continue
            pieces.append(self.push(token_id))
        return pieces

    def flush(self) -> str:
        """What is left when no token follows: an unfinished character, as replacement characters."""
        piece = self._new_text()
        self._read = len(self._window)
        return piece

    def _certain_text(self) -> str:
        """Where so many wait, most are bytes of no character: what stands before those that one could still be made of."""
        text, given = self._decode(self._window), len(self._decode(self._window[: self._read]))
        last = len(self._window) - _CHARACTER_TOKENS
        for count in range(last, last - _CHARACTER_TOKENS, -1):
            before = self._decode(self._window[:count])
            if text.startswith(before):  # else a character goes across
                return self._give_out(before[given:], count)
        return ""

    def _give_out(self, piece: str, count: int) -> str:
        """The text up to the first `count` tokens of the window; those whose text was given out before are of no use any more."""
        del self._window[: self._read]
        self._read = count - self._read
        return piece

    def _new_text(self) -> str:
        window, read = self._window, self._read
        return self._decode(window)[len(self._decode(window[:read])) if read else 0 :]


class StopStrings:
    """Finds the first stop string in text order, and holds back text that may become one."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = list(stops)
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Takes the next text; returns the text that can go out, and whether a stop string ended it."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._longest_unfinished(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The held text, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        # The one completed first wins; of those that end together, the one that starts first.
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _longest_unfinished(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
