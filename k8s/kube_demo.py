"""`make kube-demo`: plays overlays/cpu-demo with podman, without a cluster, and shows that the draft is optional.

podman has no Services, StatefulSets, claims or gRPC probes. So each workload becomes one pod, with an address of its own, and
the names that its Service would have are given to all pods as host aliases; claims become empty directories; probes go. All
else is played as it stands: images, settings, users, capabilities, read-only root file systems, limits.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

OVERLAY = Path(__file__).resolve().parent / "overlays" / "cpu-demo"
NETWORK = "tandem-kube-demo"
PREFIX = "10.89.77."
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
READY_SECONDS = 180.0
TOKENS = 32
PROMPT = "def main():"


class DemoFailed(Exception):
    """What went wrong, in one line."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status; the argument is the kubectl to use."""
    kubectl, podman = shutil.which(arguments[0]), shutil.which("podman")
    if podman is None or kubectl is None:
        print(f"kube-demo did not run: it needs podman ({podman}) and kubectl ({kubectl})", file=sys.stderr)
        return 1
    built = subprocess.run([kubectl, "kustomize", str(OVERLAY)], capture_output=True, text=True, check=True).stdout
    try:
        with tempfile.TemporaryDirectory() as folder:
            play(Podman(podman), pods([item for item in yaml.safe_load_all(built) if item]), Path(folder))
    except DemoFailed as failed:
        print(f"kube-demo failed: {failed}", file=sys.stderr)
        return 1
    return 0


def pods(objects: list[Object]) -> dict[str, list[Object]]:
    """For the address of each pod: the pod, after the ConfigMaps that it may need."""
    config_maps = [item for item in objects if item["kind"] == "ConfigMap"]
    workloads = [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    addresses = {item["metadata"]["name"]: f"{PREFIX}{number}" for number, item in enumerate(workloads, 11)}
    aliases = [
        {"ip": addresses[item["spec"]["selector"]["app.kubernetes.io/name"]], "hostnames": names_of(item)}
        for item in objects
        if item["kind"] == "Service"
    ]
    return {addresses[item["metadata"]["name"]]: [*config_maps, pod_of(item, aliases)] for item in workloads}


def names_of(service: Object) -> list[str]:
    """The Service's name, and its first pod's if it is headless."""
    name: str = service["metadata"]["name"]
    return [name, f"{name}-0.{name}"] if service["spec"].get("clusterIP") == "None" else [name]


def pod_of(workload: Object, aliases: list[Object]) -> Object:
    """One pod of a Deployment or a StatefulSet."""
    template = copy.deepcopy(workload["spec"]["template"])
    spec = template["spec"]
    spec["hostAliases"] = aliases
    for container in spec["containers"]:
        for probe in PROBES:
            container.pop(probe, None)
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        spec.setdefault("volumes", []).append({"name": claim["metadata"]["name"], "emptyDir": {}})
    # There are no accounts, zones or other nodes.
    for field in ("serviceAccountName", "affinity", "topologySpreadConstraints"):
        spec.pop(field, None)
    metadata = {"name": f"{workload['metadata']['name']}-0", "labels": template["metadata"]["labels"]}
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
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            raise DemoFailed(f"podman {' '.join(arguments[:2])}: {last}")

    def ask(self) -> Object | None:
        """One request, greedy, by the client in the orchestrator's own image; None if it failed."""
        done = self.call(
            *("exec", "orchestrator-0-orchestrator", "tandem", "generate", "--address", "127.0.0.1:50051"),
            *("--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "--raw", "--json", PROMPT),
        )
        return None if done.returncode else json.loads(done.stdout)


def play(podman: Podman, files: dict[str, list[Object]], folder: Path) -> None:
    """Starts the pods, asks, takes the draft away, asks again, and removes everything. Raises DemoFailed."""
    played: list[str] = []
    podman.must("network", "create", "--subnet", f"{PREFIX}0/24", NETWORK)
    try:
        for address, objects in files.items():
            path = folder / f"{address}.yaml"
            path.write_text(yaml.safe_dump_all(objects))
            played.append(str(path))
            podman.must("play", "kube", "--network", NETWORK, "--ip", address, str(path))
            print(f"{objects[-1]['metadata']['name']} plays at {address}")
        first = wait_for(podman, drafted=True)
        podman.must("pod", "kill", "draft-0")
        print("the draft's pod is killed")
        second = wait_for(podman, drafted=False)
        if first["text"] != second["text"]:
            raise DemoFailed("the answers differ with and without the draft")
        print("both answers are the same, as they must be")
    finally:
        for file in played:
            podman.call("play", "kube", "--down", file)
        podman.call("network", "rm", "--force", NETWORK)


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
        log = podman.call("logs", "--tail", "5", f"{name}-0-{name}")
        print(f"--- {name}\n{log.stdout}{log.stderr}", file=sys.stderr)
    raise DemoFailed(f"no answer {'with' if drafted else 'without'} the draft within {READY_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
