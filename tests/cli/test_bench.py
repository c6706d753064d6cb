"""`tandem bench` is `python -m bench`, found beside the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tandem
from bench.arguments import COMMANDS
from tandem.cli.errors import FAILURE
from tandem.cli.main import main


def test_what_follows_is_the_measurements_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: tandem bench" in printed
    assert all(f"    {name} " in printed for name in COMMANDS)


def test_it_runs_one_with_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "simulated.json"
    chosen = ["--requests", "1", "--gamma", "4", "--targets-per-draft", "1"]
    assert main(["bench", "simulate", *chosen, "--json", str(numbers)]) == 0
    assert "Simulated: round trip" in capsys.readouterr().out
    assert json.loads(numbers.read_text())["simulate"]["capacity"]


def test_without_the_repository_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tandem, "__file__", str(tmp_path / "site-packages" / "tandem" / "__init__.py"))
    assert main(["bench", "overhead"]) == FAILURE
    assert "`tandem bench` needs a checkout" in capsys.readouterr().err


def test_without_stubs_it_says_how_to_make_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bench.__main__", "bench.overhead"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(name, raising=False)
    monkeypatch.setitem(sys.modules, "tandem.v1", None)
    assert main(["bench", "overhead"]) == FAILURE
    assert "make proto" in capsys.readouterr().err


def test_plots_without_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bench.plots", None)
    monkeypatch.delattr("bench.plots", raising=False)
    assert main(["bench", "plot", str(tmp_path / "none.json")]) == 1
    assert "need the extra `bench`" in capsys.readouterr().err
