"""The init step: a model is there whole or not at all, whatever happens on the way."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.k8s.test_manifests import K8S
from tests.support.services import MODELS

SCRIPT = K8S / "components" / "model-volume" / "fetch_model.py"
SOURCE = MODELS / "tiny-draft"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_arrives_and_stays(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    destination = tmp_path / "draft"
    assert script.main([str(SOURCE), str(destination)]) == 0
    assert "is complete" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (destination / name).read_bytes() == (SOURCE / name).read_bytes()
    assert names(tmp_path) == {"draft"}
    written = (destination / "config.json").stat().st_mtime_ns
    assert script.main([str(SOURCE), str(destination)]) == 0
    assert "already there" in capsys.readouterr().out
    assert (destination / "config.json").stat().st_mtime_ns == written


def test_the_orchestrator_gets_no_weights_and_nobody_gets_pickles(tmp_path: Path, script: ModuleType) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    (source / "pytorch_model.bin").write_bytes(b"code")
    assert script.main([str(source), str(tmp_path / "tokenizer"), "--tokenizer-only"]) == 0
    assert script.main([str(source), str(tmp_path / "all")]) == 0
    assert names(tmp_path / "all") - names(tmp_path / "tokenizer") == {"model.safetensors"}
    assert "pytorch_model.bin" not in names(tmp_path / "all")


KILLED = """
import os, pathlib, runpy, shutil, signal, sys
original, calls = {moment}, 0
def dies(*arguments, **options):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
{moment} = dies
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("moment", "call"), [("shutil.copyfile", 2), ("os.fsync", 2), ("pathlib.Path.rename", 1)])
def test_a_killed_run_leaves_nothing_that_looks_like_a_model(moment: str, call: int, tmp_path: Path) -> None:
    destination = tmp_path / "draft"
    kill = KILLED.format(moment=moment, call=call)
    command = [sys.executable, "-c", kill, str(SCRIPT), str(SOURCE), str(destination)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not destination.exists()
    assert names(tmp_path) == {".draft.partial"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(SOURCE), str(destination)], check=False)
    assert done.returncode == 0
    assert names(tmp_path) == {"draft"}
    assert (destination / "model.safetensors").read_bytes() == (SOURCE / "model.safetensors").read_bytes()


def test_another_revision_replaces(tmp_path: Path, script: ModuleType) -> None:
    destination = tmp_path / "draft"
    assert script.main([str(SOURCE), str(destination), "--revision", "1"]) == 0
    (destination / "left.json").write_text("{}")
    assert script.main([str(SOURCE), str(destination), "--revision", "2"]) == 0
    assert "left.json" not in names(destination)
    assert names(tmp_path) == {"draft"}


def test_what_another_source_began_is_not_mixed_in(tmp_path: Path, script: ModuleType) -> None:
    stage = tmp_path / ".draft.partial"
    stage.mkdir()
    (stage / "other.safetensors").write_bytes(b"")
    (stage / script.SOURCE_FILE).write_text("other@")
    assert script.main([str(SOURCE), str(tmp_path / "draft")]) == 0
    assert "other.safetensors" not in names(tmp_path / "draft")


def test_a_source_that_is_no_model(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").mkdir()
    assert script.main([str(tmp_path / "source"), str(tmp_path / "draft")]) == 1
    assert "has no config.json" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    # The real client, which would return what an earlier try has left, as if it were all.
    stage = tmp_path / ".draft.partial"
    stage.mkdir()
    (stage / ".tandem-source").write_text("nobody/nothing@main")
    (stage / "config.json").write_text("{}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(SCRIPT), "nobody/nothing", str(tmp_path / "draft"), "--revision=main"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nobody/nothing@main can't be fetched: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "draft").exists()


class Hub:
    """Stands in for the hub's client: `brings` is what a download puts into the folder."""

    FILES: Mapping[str, bytes] = {"config.json": b"{}", "model.safetensors": b"1234", "model.bin": b"code"}

    def __init__(self, brings: Mapping[str, bytes]) -> None:
        self.brings = brings
        self.revisions: list[str] = []

    def HfApi(self) -> Hub:
        return self

    def model_info(self, name: str, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        files = [SimpleNamespace(rfilename=path, size=len(content)) for path, content in self.FILES.items()]
        return SimpleNamespace(sha="abc", siblings=files)

    def snapshot_download(self, name: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        self.revisions.append(revision)
        for path, content in self.brings.items():
            (local_dir / path).write_bytes(content)


@pytest.mark.parametrize(
    ("brings", "status"),
    [
        ({"config.json": b"{}", "model.safetensors": b"1234"}, 0),
        ({"config.json": b"{}", "model.safetensors": b"12"}, 1),
        ({"config.json": b"{}"}, 1),
    ],
    ids=["all", "a file cut off", "a file missing"],
)
def test_a_download_must_be_complete(
    brings: Mapping[str, bytes], status: int, tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(brings)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert script.main(["org/model", str(tmp_path / "draft"), "--revision=main"]) == status
    assert (tmp_path / "draft").exists() == (status == 0)
    # The files of one commit, even if the branch moves meanwhile.
    assert hub.revisions == ["abc"]
