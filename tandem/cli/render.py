"""Tokens as a person sees them: told apart by colour, or by a letter where there is none."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from tandem.client import Chunk, FinishReason, GeneratedToken, TokenKind

_COLOURS = {TokenKind.ACCEPTED: "32", TokenKind.RECOVERED: "33", TokenKind.BONUS: "36", TokenKind.REPLAYED: "2"}
_LETTERS = {TokenKind.ACCEPTED: "A", TokenKind.RECOVERED: "R", TokenKind.BONUS: "B", TokenKind.REPLAYED: "="}
_MEANINGS = {
    TokenKind.ACCEPTED: "accepted from the draft",
    TokenKind.RECOVERED: "recovered after a rejection",
    TokenKind.BONUS: "bonus, from the target alone",
}
# A letter of a token that shows nothing would stand there by itself.
_END = "<end>"
_NO_TEXT = "<>"


def use_colour(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to colour: as asked, else on a terminal that can and whose user didn't say no."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def painter_for(arguments: argparse.Namespace, environment: Mapping[str, str]) -> TokenPainter:
    """Of standard output: kinds are told apart where that was asked for, by colour if there is any."""
    colour = arguments.kinds and use_colour(arguments.colour, sys.stdout, environment)
    return TokenPainter(sys.stdout, colour=colour, letters=arguments.kinds and not colour)


class TokenPainter:
    """Writes the chunks of one generation to a stream, as they come."""

    def __init__(self, stream: TextIO, *, colour: bool, letters: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._letters = letters
        self._text = ""
        self._shown = 0
        self._in_line = False

    def show(self, chunk: Chunk) -> None:
        """Writes what is new."""
        self._text += chunk.text
        if self._colour or self._letters:
            for place, token in enumerate(chunk.tokens, 1):
                ends = place == len(chunk.tokens) and _is_stopped(chunk)
                self._write(self._paint(token, ends), token.text)
                self._shown += len(token.text)
            if chunk.finish is not None:
                # Text that was held back until the end belongs to no token of this chunk.
                self._write(_visible(self._text[self._shown :]))
        else:
            self._write(_visible(chunk.text) if self._stream.isatty() else chunk.text)
        self._stream.flush()

    @contextlib.contextmanager
    def line_ended(self) -> Iterator[None]:
        """Ends the line when something else is about to be said: an error, on the same screen."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                self.end_line()
            raise

    def end_line(self) -> None:
        """Wherever something follows on the same screen, be it the shell's prompt."""
        if self._in_line and (self._stream.isatty() or _shares_its_place(self._stream)):
            print(file=self._stream, flush=True)
            self._in_line = False

    def _write(self, shown: str, text: str | None = None) -> None:
        if shown:
            # First: an interruption may come as soon as it is written.
            self._in_line = not (shown if text is None else text).endswith("\n")
        self._stream.write(shown)

    def _paint(self, token: GeneratedToken, ends: bool) -> str:
        """One token with its mark; `ends`: the answer, by itself."""
        text = _visible(token.text)
        if self._letters:
            body = text.rstrip("\n")
            line_ends = text[len(body) :]
            body = body or line_ends.replace("\n", "\\n") or (_END if ends else _NO_TEXT)
            # Before a line's end, so that the letter stays on the line of its token.
            text = f"{body}[{_LETTERS[token.kind]}]{line_ends}"
        if self._colour and text:
            text = f"\x1b[{_COLOURS[token.kind]}m{text}\x1b[0m"
        return text

    def legend(self) -> str:
        """What the marks mean."""
        parts = []
        for kind, meaning in _MEANINGS.items():
            mark = f"[{_LETTERS[kind]}] {meaning}" if self._letters else meaning
            parts.append(f"\x1b[{_COLOURS[kind]}m{mark}\x1b[0m" if self._colour else mark)
        return " · ".join(parts) if self._stream.encoding.lower().startswith("utf") else " | ".join(parts)


def _is_stopped(chunk: Chunk) -> bool:
    return chunk.finish is not None and chunk.finish.reason is FinishReason.STOP


def _shares_its_place(stream: TextIO) -> bool:
    """Whether errors are written to the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(stream.fileno(), sys.stderr.fileno())
    except OSError:  # not of the system
        return False


def _visible(text: str) -> str:
    """Without control characters: what a model writes must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t " or ord(character) > 0x9F
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
