"""Very short runs: the numbers mean nothing, but every part of a measurement works."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from bench import acceptance
from bench.__main__ import main
from bench.prompts import PROMPT_CLASSES
from bench.services import Service
from tests.support.forked_services import ForkedService
from tests.support.services import MODELS, REPOSITORY


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    arguments = ["overhead", "--requests", "1,3", "--gamma", "5,0", "--rounds", "30", "--repeats", "1"]
    assert main([*arguments, "--profile", "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    cases = numbers["overhead"]["cases"]
    assert [(case["concurrency"], case["gamma"]) for case in cases] == [(1, 5), (1, 0), (3, 5), (3, 0)]
    for case in cases:
        assert 0 < case["round_p50"] <= case["round_p95"]
        assert case["rounds"] >= 15 * case["concurrency"]
    assert numbers["overhead"]["bytes_per_round"][-1]["total"] < 10_000
    printed = capsys.readouterr().out
    assert "bytes per round" in printed
    assert "orchestrator/decoder.py" in printed


def test_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    amount = ["--gamma", "2", "--classes", "prose", "--temperature", "1", "--tokens", "24", "--samples", "4"]
    ways = ["--ways", "auto,2+ahead"]
    assert main(["pair", *models, *amount, *ways, "--overhead-ms", "1", "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    assert [(row["way"], row["speedup"] > 0) for row in numbers["pair"]["ways"]] == [("auto", True), ("2+ahead", True)]
    assert numbers["pair"]["ahead_items"]["tandem_draft_ahead_tokens_total"] > 0
    [row] = numbers["pair"]["rows"]
    assert 1 <= row["tokens_per_round"] <= 3
    assert len(row["acceptance_per_position"]) == 2
    assert row["degraded_rounds"] == 0
    assert all(cost > 0 for cost in row["costs"].values())
    assert row["of_prediction"] > 0
    assert "tiny-target with tiny-draft" in capsys.readouterr().out


def test_tracing(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    amount = ["--requests", "2", "--rounds", "5", "--waves", "1", "--repeats", "1"]
    assert main(["tracing", *amount, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["tracing"]["cases"]
    assert [case["name"] for case in cases] == ["off", "1 % of the requests", "1 %, dead collector", "every request"]
    assert all(case["rounds_per_second"] > 0 and case["cpu"] > 0 for case in cases)


def forked(fault: str | None) -> Callable[..., contextlib.AbstractContextManager[Service]]:
    """What `bench.services.running` is, with the tests' quick start, and the draft's fault."""

    @contextlib.contextmanager
    def running(name: str, _: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[Service]:
        command = ["tests.support.faulty_service", name, fault] if fault and name == "draft_service" else [name]
        log = folder / f"{name}.log"
        process = ForkedService(command, {**os.environ, **environment}, REPOSITORY, log)
        service = Service(name, process, log)  # type: ignore[arg-type]
        try:
            yield service
        finally:
            service.stop()

    return running


def test_acceptance_fails_where_a_cache_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell: the text is right whatever the draft proposes."""
    monkeypatch.setattr(acceptance, "PROMPT_CLASSES", PROMPT_CLASSES[:1])
    monkeypatch.setattr(acceptance, "TEMPERATURES", (0.0,))
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    arguments = ["acceptance", *models, "--recorded", str(tmp_path / "record.json")]
    monkeypatch.setattr("bench.pair.running", forked(None))
    assert main([*arguments, "--record"]) == 0
    monkeypatch.setattr("bench.pair.running", forked("rollback_off_by_one"))
    assert main(arguments) == 1


def test_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    amount = ["--requests", "1,3", "--gamma", "0,2", "--tokens", "8", "--repeats", "1", "--shared-tokens", "100"]
    assert main(["serving", *models, *amount, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["serving"]["cases"]
    assert [(case["concurrency"], case["gamma"]) for case in cases] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    for case in cases:
        assert case["tokens_per_second"] > 0
        assert 1 <= case["batch_size"] <= case["concurrency"]
        assert 0 < case["first_token"]["p50"] <= case["first_token"]["p99"]
        assert case["per_output_token"]["p50"] > 0
    assert json.loads(file.read_text())["serving"]["prefix"]["ratio"] > 0
    assert "one by one" in capsys.readouterr().out
