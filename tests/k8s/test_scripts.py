"""The scripts behind `make smoke` and `make images`, with stand-ins for the cluster and for the builder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.transport_security import ClientFiles
from tests.k8s.kubectl import REPOSITORY, build
from tests.k8s.test_manifests import OVERLAYS
from tests.support.authority import Authority
from tests.support.ports import free_port
from tests.support.services import ServiceProcess, Stack

VERSION = "0.1.0"


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def smoke(kubectl: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REPOSITORY / "k8s" / "smoke.sh"],
        env={**os.environ, "KUBECTL": kubectl, "BIN": str(Path(sys.executable).parent), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def forwarding(tmp_path: Path, tiny_stack: Stack) -> str:
    """A kubectl whose port-forward leads to services that run here."""
    address = tiny_stack.orchestrator.address
    return executable(tmp_path / "kubectl", f'echo "Forwarding from {address} -> 50051"; exec sleep 300')


def test_the_smoke_test_passes_with_speculation(forwarding: str) -> None:
    done = smoke(forwarding, EXPECT="speculation")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("answered: 32 tokens of ")


def test_the_smoke_test_fails_when_the_draft_was_to_be_away(forwarding: str) -> None:
    done = smoke(forwarding, EXPECT="plain")
    assert done.returncode != 0
    assert "expected plain" in done.stderr


@pytest.fixture
def encrypting(tiny_stack: Stack, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Another orchestrator of the stack, which speaks TLS. As in a cluster its certificate has names, and no address."""
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("orchestrator", "orchestrator.tandem.svc", "localhost")
    address = f"127.0.0.1:{free_port()}"
    original = tiny_stack.orchestrator
    environment = {
        **original.environment,
        "TANDEM_ORCHESTRATOR_LISTEN": address,
        "TANDEM_ORCHESTRATOR_METRICS_LISTEN": "",
        "TANDEM_TLS_CERTIFICATE": certificate,
        "TANDEM_TLS_KEY": key,
    }
    process = ServiceProcess(original.module, address.replace("127.0.0.1", "localhost"), environment, tmp_path / "log")
    process.security = ClientFiles(str(authority.folder / "ca.pem"))
    process.start()
    try:
        process.wait_serving()
        yield process
    finally:
        process.stop()


def test_the_smoke_test_speaks_tls(encrypting: ServiceProcess, tmp_path: Path) -> None:
    port = encrypting.address.rpartition(":")[2]
    kubectl = executable(tmp_path / "kubectl", f'echo "Forwarding from 127.0.0.1:{port} -> 50051"; exec sleep 300')
    done = smoke(kubectl, TANDEM_TLS_ORCHESTRATOR_CA=encrypting.security.ca)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("answered: 32 tokens of ")


def test_the_smoke_test_says_why_there_is_no_cluster(tmp_path: Path) -> None:
    done = smoke(executable(tmp_path / "kubectl", "echo 'connection refused' >&2; exit 1"))
    assert done.returncode == 1
    assert "no port-forward to service/orchestrator" in done.stderr
    assert "connection refused" in done.stderr


@pytest.mark.parametrize("failing", ["never", "statefulset/draft"])
def test_a_deployment_is_applied_and_waited_for(tmp_path: Path, failing: str) -> None:
    log = tmp_path / "log"
    cluster = executable(tmp_path / "kubectl", f'echo "$@" >> {log}; case "$*" in *{failing}*) exit 1 ;; esac')
    command = ["make", "deploy", "OVERLAY=gpu", f"KUBECTL={cluster}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    calls = log.read_text().splitlines()
    assert calls[0] == "apply -k k8s/overlays/gpu"
    waited = [call.split()[-1] for call in calls[1:]]
    # Orchestrators last: they are ready once a target is.
    everything = ["statefulset/target", "statefulset/draft", "deployment/orchestrator"]
    assert (done.returncode == 0, waited) == ((True, everything) if failing == "never" else (False, everything[:2]))


BUILDER = """
case "$1 $4" in
  build*) printf '%s\\n' "$@" >> {folder}/log ;;
  create*) echo "a container of $2" ;;
  cp*) case $2 in
         "a container of tandem-orchestrator"*:/opt/tandem/packages.txt) cp {folder}/packages.txt "$3" ;;
         *:/opt/tandem/packages.txt) cp {folder}/other/packages.txt "$3" ;;
       esac ;;
  rm*) ;;
  *stand-in*) echo "Debian's own Python" ;;
  *) case $5 in */python:*) echo 104857600 ;; *) echo 209715200 ;; esac ;;
esac
"""


def builder_in(folder: Path) -> str:
    """One that logs what is to be built, and has images with a list of packages."""
    for place, packages in ((folder, "grpcio==1\nredis==2\n"), (folder / "other", "torch==3\n")):
        place.mkdir(exist_ok=True)
        (place / "packages.txt").write_text(packages)
    return executable(folder / "builder", BUILDER.format(folder=folder))


@pytest.mark.parametrize("suffix", ["", "-a"])
def test_images_are_built_under_the_names_that_the_manifests_use(tmp_path: Path, suffix: str) -> None:
    log, builder = tmp_path / "log", builder_in(tmp_path)
    targets = ["orchestrator", "orchestrator-demo", "worker-cpu", "worker-cpu-demo", "worker-cuda"]
    done = subprocess.run(
        [REPOSITORY / "k8s" / "build-images.sh", *targets],
        env={
            **os.environ,
            "CONTAINER": builder,
            "IMAGE_ARGS": "--build-arg 'PIP_ARGS=--pre --quiet'",
            "TANDEM_CHECK_SUFFIX": suffix,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    arguments = log.read_text().splitlines()
    assert arguments[:3] == ["build", "--build-arg", "PIP_ARGS=--pre --quiet"]
    built = {arguments[at + 1] for at, word in enumerate(arguments) if word == "--tag"}
    assert f"tandem-orchestrator{suffix}:{VERSION}: 200 MiB, 100 MiB over its base" in done.stdout
    assert "is a stand-in on this machine, Debian's own Python" in done.stderr
    labels = {arguments[at + 3]: arguments[at + 1] for at, word in enumerate(arguments) if word == "--label"}
    assert labels.keys() == built
    assert labels[f"tandem-orchestrator{suffix}:{VERSION}"] == "tandem.pip-list=grpcio==1 redis==2"
    assert labels[f"tandem-worker{suffix}:{VERSION}-cpu"] == "tandem.pip-list=torch==3"
    used = {
        container["image"].removeprefix("registry.example.com/tandem/")
        for name in OVERLAYS
        for item in build(REPOSITORY / "k8s" / "overlays" / name)
        if item["kind"] in ("Deployment", "StatefulSet")
        for container in item["spec"]["template"]["spec"]["containers"]
    }
    ours = {image for image in used if "/" not in image}
    assert len(ours) == 4
    assert {image.replace(":", f"{suffix}:") for image in ours} <= built


def test_every_image_target_exists() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    stages = {line.split(" AS ")[1] for line in text.splitlines() if line.startswith("FROM ")}
    wanted = next(line for line in makefile.splitlines() if line.startswith("IMAGES "))
    assert set(wanted.partition("?=")[2].split()) <= stages


def test_the_image_copies_every_package() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    ignored = (REPOSITORY / ".dockerignore").read_text()
    for package in ("tandem", "orchestrator", "draft_service", "target_service", "proto"):
        assert f"COPY {package} {package}\n" in text
        assert f"!{package}\n" in ignored
