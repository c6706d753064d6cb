"""Tokens with and without colour."""

import dataclasses
import io

import pytest

from tandem.cli.render import TokenPainter, use_colour
from tandem.client import Chunk, FinishReason, GeneratedToken, GenerationFinish, Speculation, TokenKind


class Screen(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def token(text: str, kind: TokenKind = TokenKind.ACCEPTED) -> GeneratedToken:
    return GeneratedToken(1, kind, text)


def chunk(*tokens: GeneratedToken, text: str | None = None, finish: object = None) -> Chunk:
    return Chunk(None, tokens, "".join(token.text for token in tokens) if text is None else text, finish)


def shown(*chunks: Chunk, colour: bool = False, letters: bool = False, terminal: bool = False) -> str:
    stream = Screen(terminal)
    painter = TokenPainter(stream, colour=colour, letters=letters)
    for one in chunks:
        painter.show(one)
    return stream.getvalue()


def test_a_pipe_gets_the_text_byte_for_byte():
    assert shown(chunk(token("a\x1b[31m\r"), token("\tb"))) == "a\x1b[31m\r\tb"


def test_a_terminal_is_not_steered_by_the_model():
    assert shown(chunk(token("a\x1b[31m\x07 é\n\tb")), terminal=True) == "a\ufffd[31m\ufffd é\n\tb"
    assert "\x1b[31m" not in shown(chunk(token("\x1b[31m")), colour=True)


def test_each_kind_has_its_colour():
    text = shown(
        chunk(token("a"), token("b", TokenKind.RECOVERED), token("c", TokenKind.BONUS)), colour=True, terminal=True
    )
    assert text == "\x1b[32ma\x1b[0m\x1b[33mb\x1b[0m\x1b[36mc\x1b[0m"


def test_each_kind_has_its_letter():
    text = shown(chunk(token("a"), token(" b", TokenKind.RECOVERED), token("c", TokenKind.BONUS)), letters=True)
    assert text == "a[A] b[R]c[B]"


def test_a_letter_stays_on_the_line_of_its_token():
    assert shown(chunk(token("a\n\n"), token("b")), letters=True) == "a[A]\n\nb[A]"


def test_no_letter_stands_by_itself():
    finish = GenerationFinish(FinishReason.STOP, 1, 4, Speculation(1, 0, 0, (), (), 0.0, 1.0, 0, (), 0, 0, 0.0, 0.0))
    tokens = token("\n\n"), token(""), token("\N{GRINNING FACE}"), token("")
    assert shown(chunk(*tokens, finish=finish), letters=True) == "\\n\\n[A]\n\n<>[A]\N{GRINNING FACE}[A]<end>[A]"
    cut_off = dataclasses.replace(finish, reason=FinishReason.LENGTH)
    assert shown(chunk(*tokens, finish=cut_off), letters=True).endswith("<>[A]")
    assert shown(chunk(*tokens, finish=finish)) == "\n\n\N{GRINNING FACE}"


@pytest.mark.parametrize("colour", [True, False])
def test_text_held_back_until_the_end_is_shown(colour):
    chunks = [chunk(token("a")), chunk(token(""), text=""), chunk(text="bc", finish=object())]
    assert shown(*chunks, colour=colour, letters=not colour).endswith("bc")
    assert shown(*chunks) == "abc"


def test_the_legend_explains_every_mark():
    legend = TokenPainter(Screen(False), colour=False, letters=True).legend()
    assert all(f"[{letter}] " in legend for letter in "ARB")


@pytest.mark.parametrize(
    ("choice", "terminal", "environment", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_to_colour(choice, terminal, environment, expected):
    assert use_colour(choice, Screen(terminal), environment) is expected
