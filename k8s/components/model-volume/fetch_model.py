"""Init step: puts a model into a folder, from a hub or from another folder, complete or not at all.

Everything is collected beside the destination and appears under its name in one rename. What a killed run leaves behind
is taken up by the next one: a download goes on where it stopped. A folder that is already there, from the same source, is
left as it is; one from another source or revision is replaced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

SOURCE_FILE = ".tandem-source"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES)
"""No pickles: loading one runs code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="name on the hub, or a folder")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--revision", default="", help="branch, tag or commit on the hub")
    parser.add_argument("--tokenizer-only", action="store_true", help="all but the weights")
    options = parser.parse_args(arguments)
    wanted = f"{options.source}@{options.revision}"
    patterns = TOKENIZER_FILES if options.tokenizer_only else MODEL_FILES
    try:
        if fetch(options.source, options.revision, wanted, options.destination, patterns):
            print(f"{options.destination}: {wanted} is complete")
        else:
            print(f"{options.destination}: {wanted} is already there")
    except Exception as error:  # noqa: BLE001 - a hub's client raises what it likes, and one line says it best
        print(f"error: {wanted} can't be fetched: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


def fetch(source: str, revision: str, wanted: str, destination: Path, patterns: Sequence[str]) -> bool:
    """Whether anything had to be done."""
    if source_of(destination) == wanted:
        return False
    stage = destination.with_name(f".{destination.name}.partial")
    if source_of(stage) != wanted:
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        (stage / SOURCE_FILE).write_text(wanted)
    if Path(source).is_dir():
        copy(Path(source), stage, patterns)
    else:
        download(source, revision, stage, patterns)
    if not (stage / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json")
    flush(stage)
    if destination.exists():
        # Between these two renames there is no model, and a pod that dies there starts over; never half of one.
        old = destination.with_name(f".{destination.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        destination.rename(old)
        stage.rename(destination)
        shutil.rmtree(old)
    else:
        stage.rename(destination)
    flush_folder(destination.parent)
    return True


def source_of(folder: Path) -> str:
    """What a folder was made from; empty where there is none, or one that this script did not make."""
    try:
        return (folder / SOURCE_FILE).read_text()
    except OSError:
        return ""


def copy(source: Path, stage: Path, patterns: Sequence[str]) -> None:
    """Copies a flat folder, following links. Files of an earlier try are copied again: they may be cut off."""
    for path in sorted(source.iterdir()):
        if path.is_file() and any(path.match(pattern) for pattern in patterns):
            shutil.copyfile(path, stage / path.name)


def download(name: str, revision: str, stage: Path, patterns: Sequence[str]) -> None:
    """Downloads from the hub, going on with what is there, and checks that all has come.

    The hub's client returns quietly what an earlier try left in the folder when the hub does not answer, so what there
    should be is asked for first, and compared afterwards.
    """
    from huggingface_hub import HfApi, snapshot_download

    described = HfApi().model_info(name, revision=revision or None, files_metadata=True)
    files = {item.rfilename: item.size for item in described.siblings or []}
    wanted = {path: size for path, size in files.items() if any(fnmatch(path, pattern) for pattern in patterns)}
    snapshot_download(name, revision=described.sha, local_dir=stage, allow_patterns=list(patterns))
    for path, size in wanted.items():
        there = (stage / path).stat().st_size if (stage / path).is_file() else None
        if there is None or (size is not None and there != size):
            raise OSError(f"{path} has {there} of {size} bytes")
    shutil.rmtree(stage / ".cache", ignore_errors=True)


def flush(folder: Path) -> None:
    """Writes files and names to the disk, so that a lost node can't leave a complete folder of incomplete files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """The names in one folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
