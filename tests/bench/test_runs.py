"""Very short runs: the numbers mean nothing, but every part of a measurement works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from bench import acceptance, forwards, services, weight_layouts
from bench.__main__ import main
from bench.placement import allowed_cores
from bench.prompts import PROMPT_CLASSES
from tests.support.forked_services import ForkedService
from tests.support.services import MODELS, REPOSITORY

_PLACES_SHOWN = """
import json, sys
from bench import overhead, services
from bench.__main__ import main
from bench.placement import allowed_cores

def show(name):
    print("placed", json.dumps([name, sorted(allowed_cores())]))

def running(name, *arguments):
    show(name)
    return services.running(name, *arguments)

overhead.running = running
code = main(sys.argv[1:])
show("at the end")
sys.exit(code)
"""


def forking(fault: str | None = None) -> Callable[..., ForkedService]:
    """What `bench.services.start_process` is, with the tests' quick start, and a fault of the draft."""

    def start_process(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedService:
        minus_m, *command = arguments
        assert minus_m == "-m"
        if fault and command == ["draft_service"]:
            command = ["tests.support.faulty_service", *command, fault]
        return ForkedService(command, environment, REPOSITORY, log)

    return start_process


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Services start in a second instead of ten; those of `overhead` really start."""
    if request.node.name != "test_overhead":
        monkeypatch.setattr(services, "start_process", forking())


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    arguments = ["overhead", "--requests", "1,3", "--gamma", "5", "--rounds", "30", "--repeats", "1"]
    assert main([*arguments, "--profile", "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    cases = numbers["overhead"]["cases"]
    assert [(case["concurrency"], case["gamma"]) for case in cases] == [(1, 5), (3, 5)]
    for case in cases:
        assert 0 < case["round_p50"] <= case["round_p95"]
        assert case["rounds"] >= 15 * case["concurrency"]
    assert numbers["overhead"]["plain"] is None
    assert numbers["overhead"]["bytes_per_round"][-1]["total"] < 10_000
    printed = capsys.readouterr().out
    assert "bytes per round" in printed
    assert "orchestrator/decoder.py" in printed


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores and a system where processes can be placed")
def test_an_orchestrator_with_a_core_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: threads and the fork server that start meanwhile would stay where they were placed."""
    before = allowed_cores()
    amount = ["--requests", "1", "--gamma", "0", "--rounds", "30", "--repeats", "1"]
    command = [sys.executable, "-c", _PLACES_SHOWN, "overhead", *amount, "--own-core"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = dict(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("placed "))
    own = min(before)
    rest = sorted(before - {own})
    assert seen == {"workers": rest, "orchestrator": [own], "without-draft": [own], "at the end": sorted(before)}


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


def test_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    assert main(["ahead", *models, "--quick", "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    [row] = numbers["ahead"]
    assert (row["prompts"], row["gamma"], row["same_tokens"]) == ("prose", 4, True)
    assert row["plain_tokens_per_second"] > 0
    assert 1 <= row["tokens_per_round"] <= 5
    assert sum(row["outcomes"]) > 0
    assert 0 <= row["ready"] <= 1
    assert len(numbers["goals"]) == 2
    assert "Drafting ahead, 12 outcomes at a time" in capsys.readouterr().out


def test_tracing(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    # So many that they take more than a tick of the clock by which CPU time goes, 10 ms.
    amount = ["--requests", "2", "--rounds", "20", "--waves", "3", "--repeats", "1"]
    assert main(["tracing", *amount, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["tracing"]["cases"]
    assert [case["name"] for case in cases] == ["off", "1 % of the requests", "1 %, dead collector", "every request"]
    assert all(case["rounds_per_second"] > 0 and case["cpu"] > 0 for case in cases)


def test_forwards_beside_transformers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Set here, they are not the run's to set, and gone after it.
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    threads = torch.get_num_threads()
    try:
        assert forwards.main(["--model", str(MODELS / "tiny-target"), "--repeats", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("x")]
    assert [int(row[0]) for row in rows] == list(forwards.ROWS)
    assert all(len(row) == 4 for row in rows)


def test_layouts_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert weight_layouts.main(["--model", str(MODELS / "tiny-target"), "--repeats", "1"]) == 0
    finally:
        torch.set_num_threads(threads)  # the tests after this one are to have them all
    shown = capsys.readouterr().out
    assert [name for name in ("outputs first", "inputs first", "oneDNN's own") if name not in shown] == []
    rows = [line.split() for line in shown.splitlines() if line.lstrip()[:1].isdigit()][: len(weight_layouts.ROWS)]
    assert [int(row[0]) for row in rows] == list(weight_layouts.ROWS)
    assert all(len(row) == 4 for row in rows)


def test_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    amount = ["--requests", "3", "--gamma", "5,0", "--rounds", "20", "--repeats", "1"]
    assert main(["rounds", *amount, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["rounds"]["cases"]
    assert [(case["side"], case["gamma"]) for case in cases] == [(s, g) for g in (5, 0) for s in ("fixed", "one layer")]
    for case in cases:
        assert case["rounds_per_second"] > 0
        assert case["rounds"] >= 3 * (20 if case["gamma"] == 0 else 8)
        if case["side"] == "one layer":
            assert case["models"] > 0
            assert case["overhead_p50"] == case["round_p50"] - case["models"]
            assert 1 <= case["items_per_forward"] <= 3
    assert "one layer and hidden size 16" in capsys.readouterr().out


def test_acceptance_fails_where_a_cache_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would tell: the text is right whatever the draft proposes."""
    monkeypatch.setattr(acceptance, "PROMPT_CLASSES", PROMPT_CLASSES[:1])
    monkeypatch.setattr(acceptance, "TEMPERATURES", (0.0,))
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    arguments = ["acceptance", *models, "--recorded", str(tmp_path / "record.json")]
    assert main([*arguments, "--record"]) == 0
    monkeypatch.setattr(services, "start_process", forking("rollback_off_by_one"))
    assert main(arguments) == 1


def test_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    amount = ["--requests", "1,3", "--gamma", "0,2", "--tokens", "8", "--repeats", "1", "--shared-tokens", "100"]
    amount += ["--samples", "2", "--auto"]
    assert main(["serving", *models, *amount, "--json", str(file)]) == 0
    cases = json.loads(file.read_text())["serving"]["cases"]
    assert [(case["concurrency"], case["gamma"]) for case in cases] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    for case in cases:
        assert case["tokens_per_second"] > 0
        assert 1 <= case["batch_size"] <= case["concurrency"]
        assert 0 < case["first_token"]["p50"] <= case["first_token"]["p99"]
        assert case["per_output_token"]["p50"] > 0
        assert len(case["acceptance"]) == case["gamma"]
    adaptive = json.loads(file.read_text())["serving"]["adaptive"]
    assert [case["concurrency"] for case in adaptive] == [1, 3]
    assert all(case["of_plain"] > 0 and case["of_best"] > 0 for case in adaptive)
    assert json.loads(file.read_text())["serving"]["prefix"]["ratio"] > 0
    assert "one by one" in capsys.readouterr().out
    # What was measured is what a simulation starts from, and is compared with.
    assert main(["simulate", "--from", str(file), "--requests", "1", "--targets-per-draft", "1", "--gamma", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Simulated beside measured" in printed
    assert "draft on the target's device" in printed


def test_network(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    models = ["--target", str(MODELS / "tiny-target"), "--draft", str(MODELS / "tiny-draft")]
    amount = ["--rtt-ms", "0,200", "--gamma", "0,2", "--tokens", "12", "--repeats", "1"]
    assert main(["network", *models, *amount, "--json", str(file)]) == 0
    rows = {(row["round_trip"], row["gamma"]): row for row in json.loads(file.read_text())["network"]["rows"]}
    assert set(rows) == {(0.0, 0), (0.0, 2), (200.0, 0), (200.0, 2)}
    assert all(row["round"] > 0 and 1 <= row["tokens_per_round"] <= 1 + row["gamma"] for row in rows.values())
    # The caller may hear of the first of eleven rounds a second late, and the mean is still above this.
    assert rows[200.0, 0]["round"] >= 100
