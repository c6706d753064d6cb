"""What `make venv` runs; pip itself is for CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.services import REPOSITORY


@pytest.mark.parametrize("compiled", [False, True])
def test_packages_are_compiled_at_once_where_python_would_not_keep_what_it_compiles(
    tmp_path: Path, compiled: bool
) -> None:
    log, python = tmp_path / "log", tmp_path / "bin" / "python"
    python.parent.mkdir()
    # As compileall does where a file is no Python.
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *compileall*) exit 1 ;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1" if compiled else ""}
    command = ["make", "venv", f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    pip, *after = log.read_text().splitlines()
    assert pip.startswith("-m pip install ")
    assert after == ([f"-m compileall -q -j 0 {tmp_path}/lib"] if compiled else [])
    assert (tmp_path / ".stamp").exists()
