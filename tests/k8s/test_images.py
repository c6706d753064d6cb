"""What is in the built images, and the demo played with them. `make check-images` builds them first, which takes minutes."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.k8s.kubectl import REPOSITORY, kubectl
from tests.k8s.test_kube_demo import load_script

VERSION = "0.1.0"
LARGEST_ORCHESTRATOR_MIB = 200
"""Over its base."""
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "as", "ld", "make")
PACKAGES = '{{index .Labels "tandem.packages"}}'
"""Where an image says that its list is."""
PIP_LIST = '{{index .Labels "tandem.pip-list"}}'
"""The list."""

SUFFIX = os.environ.get("TANDEM_CHECK_SUFFIX", "")
TARGETS = {
    "orchestrator": f"tandem-orchestrator{SUFFIX}:{VERSION}",
    "worker-cpu": f"tandem-worker{SUFFIX}:{VERSION}-cpu",
}
BUILT = os.environ.get("TANDEM_CHECK_IMAGES", "").split()
"""Targets of the Dockerfile."""

pytestmark = pytest.mark.timeout(600)


def needs(*targets: str) -> pytest.MarkDecorator:
    missing = ", ".join(target for target in targets if target not in BUILT)
    return pytest.mark.skipif(
        bool(missing), reason=f"not built: {missing}; make check-images does, and CI where a container runs"
    )


each_image = pytest.mark.parametrize(
    "image", [pytest.param(image, marks=needs(target), id=target) for target, image in TARGETS.items()]
)


def podman(*arguments: str) -> str:
    path = shutil.which("podman")
    assert path is not None, "podman is not installed"
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def inside(image: str, script: str) -> str:
    """What a shell script prints in a container as closed as the manifests make it."""
    closed = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--network", "none")
    return podman("run", "--rm", *closed, image, "sh", "-c", script)


@each_image
def test_an_image_runs_as_nobody_and_compiles_nothing(image: str) -> None:
    assert inside(image, "id -u; id -g").split() == ["10001", "10001"]
    assert inside(image, "touch /tmp/here; touch /opt/tandem/here 2>&1 || true").endswith("Read-only file system")
    found = inside(image, f"for tool in {' '.join(COMPILERS)} pip; do command -v $tool || true; done")
    assert found == ""


@each_image
def test_an_image_lists_its_packages(image: str) -> None:
    listed = inside(image, f"cat {podman('image', 'inspect', '--format', PACKAGES, image)}").splitlines()
    assert podman("image", "inspect", "--format", PIP_LIST, image).split() == " ".join(listed).split()
    packages = {line.replace("+cpu", "") for line in listed if "==" in line}
    pinned = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert packages <= {line.partition(";")[0].strip() for line in pinned}
    assert {"grpcio", "starlette", "transformers"} <= {line.partition("==")[0] for line in packages}


@needs("orchestrator")
def test_the_orchestrators_image_has_no_torch_and_is_small() -> None:
    image = TARGETS["orchestrator"]
    assert inside(image, "python -c 'import importlib.util; print(importlib.util.find_spec(\"torch\"))'") == "None"
    base = next(
        line.partition("=")[2]
        for line in (REPOSITORY / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG PYTHON_IMAGE=")
    )
    size, under = (int(podman("image", "inspect", "--format", "{{.Size}}", name)) for name in (image, base))
    assert (size - under) >> 20 <= LARGEST_ORCHESTRATOR_MIB


@needs("orchestrator-demo", "worker-cpu-demo")
@pytest.mark.parametrize("components", [[], ["mtls"]], ids=["plain", "mtls"])
def test_the_demo_plays(components: list[str]) -> None:
    assert load_script().main([kubectl(), *components]) == 0
