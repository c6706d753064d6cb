"""What is said while services start."""

from __future__ import annotations

import io
import re

from rich.console import Console

from tandem.cli import progress


def test_without_a_terminal_what_is_waited_for_is_said_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "_SILENCE_SECONDS", 0.0)
    out = io.StringIO()
    shown = progress.Progress(Console(file=out))
    with shown:
        for name in ("redis", "target"):
            shown.begin(name, "")
        shown.update("redis", "connecting")
        shown.ready("redis", "")
        shown.update("target", "loading")
        shown.ready("target", "context 1,024 tokens")
    first, redis, loading, target = out.getvalue().splitlines()
    assert (first, loading) == ("waiting for redis (connecting)", "waiting for target (loading)")
    assert re.fullmatch(r"redis ready after [0-9.]+ s", redis)
    assert re.fullmatch(r"target ready after [0-9.]+ s, context 1,024 tokens", target)
