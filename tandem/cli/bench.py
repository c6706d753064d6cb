"""`tandem bench`: the measurements. They are no part of the installed package but of the repository, beside it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import tandem
from tandem.cli.errors import CliError
from tandem.cli.interruptions import Interruptions


def run(arguments: argparse.Namespace, _environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Does what `python -m bench` does in the repository, wherever it is called; raises CliError where there is none."""
    repository = Path(tandem.__file__).resolve().parents[1]
    if not (repository / "bench" / "__main__.py").is_file():
        raise CliError(
            "`tandem bench` needs a checkout of the repository, which has the measurements and their models: there, `make bench`"
        )
    sys.path.insert(0, str(repository))
    try:
        bench = importlib.import_module("bench.__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tandem.v1"):
            raise CliError("the stubs are missing: run `make proto`") from error
        raise CliError(f"`tandem bench` needs the extras `worker` and `cli`: {error}") from error
    interruptions.leave_ctrl_c_to_python()
    code: int = bench.main(arguments.arguments, prog="tandem bench")
    return code
