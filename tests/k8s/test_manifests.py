"""Every overlay and every combination of components builds, is valid for the newest Kubernetes, and fits together."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tandem import config
from tests.k8s.default_settings import LEFT_AS_THEY_ARE
from tests.k8s.kubectl import REPOSITORY, Object, build, kubectl
from tests.k8s.rules import CONFIGS, Cluster, faults, quantity

K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
ADDING = ("apiVersion", "kind", "resources")
"""What a kustomization that changes nothing consists of."""
VERSIONS = sorted(kubernetes_validate.utils.all_versions(), key=lambda text: tuple(map(int, text.split("."))))[-3:]
CUSTOM_RESOURCES = {
    *("ServiceMonitor", "PrometheusRule"),
    *("Certificate", "Issuer"),
    *("Gateway", "GRPCRoute", "HTTPRoute", "BackendTLSPolicy"),
}
"""Kinds whose schema comes from an operator; our rules look at them."""


def kustomization(*folder: str) -> Object:
    """What a folder's kustomization says."""
    content: Object = yaml.safe_load(K8S.joinpath(*folder, "kustomization.yaml").read_text())
    return content


def combinations() -> Iterator[tuple[str, ...]]:
    """What is built, then the components on top of it.

    On the base none, each one, all, and each pair of those that change something: what two components do to each other shows in their
    pair, and those that only add resources can't do more to another than take its names. On an overlay each one that it hasn't, and all of
    them.
    """
    changing = [name for name in COMPONENTS if kustomization("components", name).keys() - {*ADDING}]
    yield ("base",)
    yield from (("base", name) for name in COMPONENTS)
    yield from (("base", *pair) for pair in itertools.combinations(changing, 2))
    yield ("base", *COMPONENTS)
    for overlay in OVERLAYS:
        has = kustomization("overlays", overlay)["components"]
        missing = [name for name in COMPONENTS if f"../../components/{name}" not in has]
        for chosen in (*((name,) for name in missing), tuple(missing)):
            yield (f"overlays/{overlay}", *chosen)


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Object]]:
    return {name: build(K8S / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Object]]:
    chosen = list(combinations())
    folders = [tmp_path_factory.mktemp("k8s") for _ in chosen]
    with ThreadPoolExecutor(2) as builders:
        return dict(zip(chosen, builders.map(build_combination, chosen, folders), strict=True))


def build_combination(chosen: tuple[str, ...], folder: Path, more: Object | None = None) -> list[Object]:
    """The objects of `combinations`' item, in an overlay that says `more` itself."""
    relative = Path(os.path.relpath(K8S, folder))
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "tandem",
        "resources": [str(relative / chosen[0])],
        "components": [str(relative / "components" / name) for name in chosen[1:]],
        **(more or {}),
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return build(folder)


def advice(component: str) -> Object:
    """The piece of YAML that a component's README gives for overlays."""
    text = (K8S / "components" / component / "README.md").read_text()
    (piece,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    content: Object = yaml.safe_load(piece)
    return content


def test_tls_at_the_orchestrator_is_as_the_readmes_say(tmp_path: Path) -> None:
    """Alone, and behind a gateway and an Ingress: with what theirs say, and not without it."""
    tls, behind = advice("mtls"), ("overlays/production", "gateway", "ingress")
    folders = [tmp_path / name for name in ("alone", "behind", "advised")]
    for folder in folders:
        folder.mkdir()
    alone = build_combination(("base", "redis", "mtls"), folders[0], tls)
    assert faults(alone) == []
    environment = Cluster(alone).environment(Cluster(alone).service("orchestrator"))
    assert {"TANDEM_TLS_CERTIFICATE", "TANDEM_TLS_KEY", "TANDEM_TLS_WORKER_CA"} <= environment.keys()
    found = {fault.partition(":")[0] for fault in faults(build_combination(behind, folders[1], tls))}
    assert found == {"routes", "ingresses"}
    both = {**tls, "patches": tls["patches"] + advice("ingress")["patches"]}
    policy = advice("gateway")
    policy["metadata"]["namespace"] = "tandem"
    assert faults([*build_combination(behind, folders[2], both), policy]) == []
    assert policy["spec"]["validation"]["hostname"] in _dns_names(alone, "orchestrator")


def _dns_names(objects: list[Object], certificate: str) -> list[str]:
    names: list[str] = Cluster(objects).by_name[("Certificate", certificate)]["spec"]["dnsNames"]
    return names


def test_models_are_chosen_as_the_readme_says(tmp_path: Path) -> None:
    cluster = Cluster(build_combination(("base", "redis", "model-volume"), tmp_path, advice("model-volume")))
    fetching = [container for container in cluster.containers() if container.init]
    assert len(fetching) == 3
    for container in fetching:
        chosen = cluster.environment(container)
        assert {chosen["TARGET_SOURCE"], chosen["DRAFT_SOURCE"]} == {"ORG/MODEL"}


def test_kubectl_is_at_hand() -> None:
    assert Path(kubectl()).exists()


def test_every_setting_is_in_the_manifests_or_left_as_it_is(
    overlays: dict[str, list[Object]], combined: dict[tuple[str, ...], list[Object]]
) -> None:
    """A new setting is decided on here: manifests set it, or its default suits a cluster as well."""
    clusters = [Cluster(objects) for objects in (*overlays.values(), *combined.values())]
    for module, service in CONFIGS.items():
        known = {item.variable for item in config.settings_of(service).values()}
        given = {name for cluster in clusters for name in cluster.environment(cluster.service(module))}
        assert known - given == LEFT_AS_THEY_ARE[module]


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_fit_together(name: str, overlays: dict[str, list[Object]]) -> None:
    assert faults(overlays[name]) == []


@pytest.mark.parametrize("chosen", list(combinations()), ids="+".join)
def test_components_fit_together(chosen: tuple[str, ...], combined: dict[tuple[str, ...], list[Object]]) -> None:
    assert faults(combined[chosen]) == []


def test_everything_is_valid_in_the_newest_versions(
    overlays: dict[str, list[Object]],
    combined: dict[tuple[str, ...], list[Object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: dict[str, object] = {}
    original = utils.schema_contents

    def read_once(filename: str, version: str) -> object:
        if filename not in read:
            read[filename] = original(filename, version)
        return read[filename]

    # It would parse 2 MB of definitions for each object.
    monkeypatch.setattr(utils, "schema_contents", read_once)
    builds = [*overlays.values(), *combined.values()]
    distinct = {json.dumps(item, sort_keys=True): item for objects in builds for item in objects}
    checked = 0
    for item in distinct.values():
        if item["kind"] in CUSTOM_RESOURCES:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)
            checked += 1
    assert checked > 100


def test_the_validator_is_strict() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "date": {}}, VERSIONS[-1], strict=True
        )


def test_the_newest_three_versions_are_meant() -> None:
    assert len(VERSIONS) == 3
    assert VERSIONS[-1].startswith(kubernetes_validate.__version__.rpartition(".")[0])


def test_the_demo_fits_on_a_small_node(overlays: dict[str, list[Object]]) -> None:
    cluster = Cluster(overlays["cpu-demo"])
    totals = {
        name: sum(quantity(item.spec["resources"]["requests"][name]) for item in cluster.containers())
        for name in ("cpu", "memory")
    }
    assert totals["cpu"] <= 2
    assert totals["memory"] <= quantity("4Gi")


def test_the_demo_needs_no_secret_and_no_hub(overlays: dict[str, list[Object]]) -> None:
    text = json.dumps(overlays["cpu-demo"])
    assert "secretKeyRef" not in text
    assert "fetch" not in text


def test_the_manual_names_every_secret_and_no_setting_that_is_not_there() -> None:
    manual = (REPOSITORY / "docs" / "operations.md").read_text()
    assert "tandem-redis" in manual
    assert "tandem-hub" in manual
    known = {item.variable for service in CONFIGS.values() for item in config.settings_of(service).values()}
    scripts = {"TANDEM_CHECK_SUFFIX"}
    assert set(re.findall(r"TANDEM_[A-Z_]*[A-Z]\b", manual)) <= known | scripts


def test_the_manual_says_what_the_probes_and_drains_are() -> None:
    manual = (REPOSITORY / "docs" / "operations.md").read_text()
    cluster = Cluster(build(K8S / "base"))
    for container in cluster.containers():
        startup = container.spec["startupProbe"]
        minutes = startup["periodSeconds"] * startup["failureThreshold"] // 60
        assert f"{minutes} min" in manual
        assert f"| {cluster.environment(container)['TANDEM_DRAIN_SECONDS']} s |" in manual
        assert f"| {container.pod['terminationGracePeriodSeconds']} s |" in manual


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_component_is_explained(name: str) -> None:
    readme = (K8S / "components" / name / "README.md").read_text()
    assert readme.startswith(f"# {name}\n")
