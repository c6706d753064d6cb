"""What `make kube-demo` plays is what the overlay says. The demo itself needs podman and the images."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kubernetes_validate
import pytest

from tandem.transport_security import ClientFiles
from tests.k8s.kubectl import REPOSITORY, kubectl
from tests.k8s.test_manifests import VERSIONS

SCRIPT = REPOSITORY / "k8s" / "kube_demo.py"


def load_script() -> ModuleType:
    """The demo, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("kube_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["", "-a"])
def script(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The demo under its usual names, and under those of a second run on the same machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CHECK_SUFFIX", request.param)
        yield load_script()


def test_pods_are_the_overlay_s(script: ModuleType, tmp_path: Path) -> None:
    objects = script.build(kubectl(), ["mtls"], tmp_path)
    files = script.pods(objects, tmp_path)
    assert len(files) == 4
    workloads = {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Deployment", "StatefulSet")}
    names, suffix = {}, script.SUFFIX
    for address, (*config_maps, pod) in files.items():
        assert {item["kind"] for item in config_maps} == {"ConfigMap"}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
        names[pod["metadata"]["name"]] = address
        original = workloads[pod["metadata"]["name"].removesuffix(f"-0{suffix}")]["spec"]["template"]["spec"]
        assert pod["spec"]["securityContext"] == original["securityContext"]
        for container, before in zip(pod["spec"]["containers"], original["containers"], strict=True):
            kept = {key: value for key, value in before.items() if key != "ports" and not key.endswith("Probe")}
            kept["volumeMounts"] = [{**mount, "name": mount["name"] + suffix} for mount in before["volumeMounts"]]
            assert container == kept
            ours = container["image"].startswith("tandem-")
            assert container["image"].partition(":")[0].endswith(suffix) or not ours
        mounted = {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["spec"]["volumes"]}
    aliases = {name: entry["ip"] for entry in pod["spec"]["hostAliases"] for name in entry["hostnames"]}
    assert aliases["target-0.target"] == names[f"target-0{suffix}"]
    assert aliases["draft-0.draft"] == names[f"draft-0{suffix}"]
    assert aliases["redis"] == names[f"redis-0{suffix}"]


def test_two_runs_share_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for suffix in ("", "-a", "-b"):
        monkeypatch.setenv("TANDEM_CHECK_SUFFIX", suffix)
        script = load_script()
        names += [script.NETWORK, script.PREFIX, script.CLIENT]
    assert len(set(names)) == len(names)


def test_each_secret_is_a_folder_of_files_that_fit_the_services(script: ModuleType, tmp_path: Path) -> None:
    objects = script.build(kubectl(), ["mtls"], tmp_path)
    script.issue([item for item in objects if item["kind"] == "Certificate"], tmp_path)
    for *_, pod in script.pods(objects, tmp_path).values():
        folders = [item["hostPath"]["path"] for item in pod["spec"].get("volumes", []) if "hostPath" in item]
        assert len(folders) == (not pod["metadata"]["name"].startswith("redis-0"))
        for folder in folders:
            ClientFiles(*(f"{folder}/{name}" for name in ("ca.crt", "tls.crt", "tls.key"))).check("TANDEM_TLS")


def test_a_missing_tool_is_said(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["no-kubectl-of-this-name"]) == 1
    assert capsys.readouterr().err.startswith("kube-demo did not run: ")
