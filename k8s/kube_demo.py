"""`make kube-demo`: plays overlays/cpu-demo with podman, without a cluster, and shows that the draft is optional.

podman has no Services, StatefulSets, claims or gRPC probes. So each workload becomes one pod, with an address of its own, and
the names that its Service would have are given to all pods as host aliases; claims become empty directories; certificates, which
cert-manager would make, are made here; probes go, and what they would ask is asked here; ports go, since podman would take the
same ones of this machine, which two pods can't share. All else is played as it stands: images,
settings, users, capabilities, read-only root file systems, limits.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trustme
import yaml

Object = dict[str, Any]

K8S = Path(__file__).resolve().parent
SUFFIX = os.environ.get("TANDEM_CHECK_SUFFIX", "")
"""Behind the names that podman knows, of images, pods, volumes and the network: runs with different ones leave each other alone."""
NETWORK = f"tandem-kube-demo{SUFFIX}"
PREFIX = f"10.91.{zlib.crc32(SUFFIX.encode()) % 256}." if SUFFIX else "10.89.77."
CLIENT = f"orchestrator-0{SUFFIX}-orchestrator"
"""The container that questions are asked in."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
READY_SECONDS = 180.0
TOKENS = 32
PROMPT = "def main():"
# Prints the health of an address: as a whole, and of the process alone.
HEALTH = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    for name in ("", "liveness"):
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
"""
HEALTH_PORT = 50050


class DemoFailed(Exception):
    """What went wrong."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status; the arguments are the kubectl to use, and components to add to the overlay."""
    kubectl, podman = shutil.which(arguments[0]), shutil.which("podman")
    if podman is None or kubectl is None:
        print(f"kube-demo did not run: it needs podman ({podman}) and kubectl ({kubectl})", file=sys.stderr)
        return 1
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)  # the pods' users read certificates in it
            objects = build(kubectl, arguments[1:], folder)
            issue([item for item in objects if item["kind"] == "Certificate"], folder)
            play(Podman(podman), pods(objects, folder), folder)
    except DemoFailed as failed:
        print(f"kube-demo failed: {failed}", file=sys.stderr)
        return 1
    return 0


def build(kubectl: str, components: Sequence[str], folder: Path) -> list[Object]:
    """The objects of the overlay with these components, built in `folder`. Raises DemoFailed."""
    relative = Path(os.path.relpath(K8S, folder.resolve()))
    kustomization = {
        "resources": [str(relative / "overlays" / "cpu-demo")],
        "components": [str(relative / "components" / name) for name in components],
        "images": [{"name": name, "newName": name + SUFFIX} for name in ("tandem-orchestrator", "tandem-worker")],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(done.stderr.strip())
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def issue(certificates: list[Object], folder: Path) -> None:
    """Makes a folder for each certificate's Secret, with its files, from a CA of this run's own."""
    authority = trustme.CA()
    for certificate in certificates:
        secret = folder / certificate["spec"]["secretName"]
        if certificate["spec"].get("isCA"):
            continue
        secret.mkdir()
        issued = authority.issue_cert(*certificate["spec"]["dnsNames"])
        (secret / "tls.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        (secret / "tls.key").write_bytes(issued.private_key_pem.bytes())
        (secret / "ca.crt").write_bytes(authority.cert_pem.bytes())


def pods(objects: list[Object], folder: Path) -> dict[str, list[Object]]:
    """For the address of each pod: the pod, after the ConfigMaps that it may need. Secrets are folders of `folder`."""
    config_maps = [item for item in objects if item["kind"] == "ConfigMap"]
    workloads = [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    addresses = {item["metadata"]["name"]: f"{PREFIX}{number}" for number, item in enumerate(workloads, 11)}
    aliases = [
        {"ip": addresses[item["spec"]["selector"]["app.kubernetes.io/name"]], "hostnames": names_of(item)}
        for item in objects
        if item["kind"] == "Service"
    ]
    return {addresses[item["metadata"]["name"]]: [*config_maps, pod_of(item, aliases, folder)] for item in workloads}


def names_of(service: Object) -> list[str]:
    """The Service's name, and its first pod's if it is headless."""
    name: str = service["metadata"]["name"]
    return [name, f"{name}-0.{name}"] if service["spec"].get("clusterIP") == "None" else [name]


def pod_of(workload: Object, aliases: list[Object], folder: Path) -> Object:
    """One pod of a Deployment or a StatefulSet."""
    template = copy.deepcopy(workload["spec"]["template"])
    spec = template["spec"]
    spec["hostAliases"] = aliases
    for container in spec["containers"]:
        for field in (*PROBES, "ports"):
            container.pop(field, None)
    for volume in spec.get("volumes", []):
        if "secret" in volume:
            secret = volume.pop("secret")["secretName"]
            volume["hostPath"] = {"path": str(folder / secret), "type": "Directory"}
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        spec.setdefault("volumes", []).append({"name": claim["metadata"]["name"], "emptyDir": {}})
    named = [
        *spec.get("volumes", []),
        *(mount for each in spec["containers"] for mount in each.get("volumeMounts", [])),
    ]
    for item in named:
        item["name"] += SUFFIX
    # There are no accounts, zones or other nodes.
    for field in ("serviceAccountName", "affinity", "topologySpreadConstraints"):
        spec.pop(field, None)
    metadata = {"name": f"{workload['metadata']['name']}-0{SUFFIX}", "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Podman:
    """Calls of podman."""

    def __init__(self, path: str) -> None:
        self._path = path

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs to its end, whatever that is."""
        return subprocess.run([self._path, *arguments], capture_output=True, text=True, check=False)

    def must(self, *arguments: str) -> None:
        """Runs to a good end, or raises DemoFailed."""
        done = self.call(*arguments)
        if done.returncode:
            raise DemoFailed(f"podman {' '.join(arguments[:2])}: {done.stderr.strip() or 'no output'}")

    def ask(self) -> Object | None:
        """One request, greedy, by the client in the orchestrator's own image; None if it failed."""
        done = self.call(
            *("exec", CLIENT, "tandem", "generate", "--address", "127.0.0.1:50051"),
            *("--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "--raw", "--json", PROMPT),
        )
        return None if done.returncode else json.loads(done.stdout)

    def health(self, address: str) -> list[str]:
        """What health says at an address, asked in plain text: readiness and liveness; nothing if there is no answer."""
        return self.call("exec", CLIENT, "python", "-c", HEALTH, address).stdout.split()


def play(podman: Podman, files: dict[str, list[Object]], folder: Path) -> None:
    """Starts the pods, asks, takes the draft away, asks again, takes the target away, looks at health, and removes everything.

    Raises DemoFailed.
    """
    encrypted = any("hostPath" in volume for *_, pod in files.values() for volume in pod["spec"]["volumes"])
    played: list[str] = []
    podman.call("network", "rm", "--force", NETWORK)  # and the pods in it, of a run that was killed
    podman.must("network", "create", "--subnet", f"{PREFIX}0/24", NETWORK)
    try:
        for address, objects in files.items():
            path = folder / f"{address}.yaml"
            path.write_text(yaml.safe_dump_all(objects))
            played.append(str(path))
            podman.must("play", "kube", "--replace", "--network", NETWORK, "--ip", address, str(path))
            print(f"{objects[-1]['metadata']['name']} plays at {address}")
        first = wait_for(podman, drafted=True)
        if encrypted:
            refuse_strangers(podman)
        podman.must("pod", "kill", f"draft-0{SUFFIX}")
        print("the draft's pod is killed")
        second = wait_for(podman, drafted=False)
        if first["text"] != second["text"]:
            raise DemoFailed("the answers differ with and without the draft")
        print("both answers are the same, as they must be")
        podman.must("pod", "kill", f"target-0{SUFFIX}")
        print("the target's pod is killed")
        wait_for_health(podman, ["NOT_SERVING", "SERVING"])
        print("the orchestrator is not ready, and alive: no kubelet would restart it")
    finally:
        for file in played:
            podman.call("play", "kube", "--down", file)
        podman.call("network", "rm", "--force", NETWORK)


def refuse_strangers(podman: Podman) -> None:
    """Raises DemoFailed if a worker answers who has no certificate, or its plain port doesn't."""
    for role, port in (("target", 50053), ("draft", 50052)):
        if podman.health(f"{role}:{port}") or podman.health(f"{role}:{HEALTH_PORT}") != ["SERVING", "SERVING"]:
            raise DemoFailed(f"{role}: its port answers without a certificate, or its port for probes doesn't")
    print("drafts and targets answer nobody who has no certificate, and probes on their plain port")


def wait_for_health(podman: Podman, wanted: list[str]) -> None:
    """Raises DemoFailed when the orchestrator's health doesn't come to this in time."""
    deadline = time.monotonic() + READY_SECONDS
    while (said := podman.health(f"127.0.0.1:{HEALTH_PORT}")) != wanted:
        if time.monotonic() > deadline:
            raise DemoFailed(f"readiness and liveness are {said}, not {wanted}")
        time.sleep(1)


def wait_for(podman: Podman, *, drafted: bool) -> Object:
    """The first answer that was decoded with the draft, or without. Raises DemoFailed when none comes in time."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        answer = podman.ask()
        if answer is not None and bool(proposed := sum(answer["speculation"]["draft_tokens_per_position"])) == drafted:
            accepted = sum(answer["speculation"]["accepted_tokens_per_position"])
            print(
                f"answered: {answer['usage']['completion_tokens']} tokens, {accepted} of {proposed} draft tokens accepted"
            )
            return answer
        time.sleep(1)
    for name in ("orchestrator", "target", "draft", "redis"):
        log = podman.call("logs", "--tail", "5", f"{name}-0{SUFFIX}-{name}")
        print(f"--- {name}\n{log.stdout}{log.stderr}", file=sys.stderr)
    raise DemoFailed(f"no answer {'with' if drafted else 'without'} the draft within {READY_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
