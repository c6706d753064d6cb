"""A rule that never fails says nothing: each is shown a build with one fault that it must find."""

from __future__ import annotations

import copy
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from tests.k8s.kubectl import Object
from tests.k8s.rules import RULES, faults, quantity
from tests.k8s.test_manifests import build_combination


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    objects = build_combination(("overlays/production", "gateway", "ingress"), tmp_path_factory.mktemp("good"))
    assert faults(objects) == []
    return objects


class Build:
    """A build to break."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = copy.deepcopy(objects)

    def __call__(self, kind: str, name: str) -> Any:
        return next(item for item in self.objects if (item["kind"], item["metadata"]["name"]) == (kind, name))

    def settings(self, service: str) -> Any:
        return next(item["data"] for item in self.objects if item["metadata"]["name"].startswith(f"{service}-settings"))

    def fetched(self) -> Any:
        return next(item["data"] for item in self.objects if item["metadata"]["name"].startswith("models-"))

    def pod(self, kind: str, name: str) -> Any:
        return self(kind, name)["spec"]["template"]["spec"]

    def container(self, kind: str, name: str) -> Any:
        return self.pod(kind, name)["containers"][0]


def broken(rule: str, what: Callable[[Build], object]) -> Any:
    return pytest.param(rule, what, id=rule)


def _on_cpu(build: Build) -> None:
    """With too many threads, and in the memory that the overlay has for a GPU's host, but with a cache beside the weights."""
    build.settings("target").update(
        TANDEM_TARGET_DEVICE="cpu", TANDEM_TARGET_THREADS="16", TANDEM_TARGET_KV_MEMORY_MIB=str(26 << 10)
    )
    for kind in ("requests", "limits"):
        del build.container("StatefulSet", "target")["resources"][kind]["nvidia.com/gpu"]


def _rule(build: Build, kind: str) -> Any:
    return build(kind, "orchestrator")["spec"]["rules"][0]


NGINX = "nginx.ingress.kubernetes.io"


def _annotations(build: Build, port: str) -> Any:
    return build("Ingress", f"orchestrator-{port}")["metadata"]["annotations"]


def _path(build: Build, port: str) -> Any:
    return build("Ingress", f"orchestrator-{port}")["spec"]["rules"][0]["http"]["paths"][0]


def _peer(build: Build, policy: str) -> Any:
    return build("NetworkPolicy", policy)["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]


ORCHESTRATOR, TARGET, DRAFT = ("Deployment", "orchestrator"), ("StatefulSet", "target"), ("StatefulSet", "draft")
FAULTS = [
    broken("config_references", lambda b: b.objects.remove(b("ServiceAccount", "draft"))),
    broken("config_references", lambda b: b.container(*TARGET)["envFrom"].append({"configMapRef": {"name": "x"}})),
    broken("config_references", lambda b: b.container(*TARGET)["envFrom"].append({"secretRef": {"name": "x"}})),
    broken("volume_references", lambda b: b.container(*TARGET)["volumeMounts"].append({"name": "x"})),
    broken("volume_references", lambda b: b.pod(*TARGET)["volumes"].append({"name": "x", "emptyDir": {}})),
    broken(
        "volume_references",
        lambda b: b.pod(*TARGET)["volumes"].append({"name": "tmp", "persistentVolumeClaim": {"claimName": "x"}}),
    ),
    broken("quantities", lambda b: b.container(*TARGET)["resources"]["limits"].update(memory="32 GB")),
    broken("quantities", lambda b: b.container(*TARGET)["resources"]["requests"].update(cpu="900")),
    broken("quantities", lambda b: b.container(*TARGET)["resources"]["limits"].pop("cpu")),
    broken("selectors", lambda b: b("Service", "target")["spec"]["selector"].update({"app.kubernetes.io/name": "x"})),
    broken("selectors", lambda b: b("Service", "target")["spec"]["selector"].pop("app.kubernetes.io/name")),
    broken(
        "selectors",
        lambda b: b("NetworkPolicy", "target")["spec"]["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "targets"}
        ),
    ),
    broken(
        "selectors",
        lambda b: b("PodDisruptionBudget", "draft")["spec"]["selector"]["matchLabels"].update({"a": "b"}),
    ),
    broken("service_ports", lambda b: b("Service", "target")["spec"]["ports"][0].update(targetPort="http")),
    broken("service_ports", lambda b: b("Service", "target")["spec"]["ports"][0].update(port=80)),
    broken("service_ports", lambda b: b(*TARGET)["spec"].update(serviceName="targets")),
    broken(
        "policy_ports",
        lambda b: b("NetworkPolicy", "orchestrator")["spec"]["egress"][0]["ports"][0].update(port=50051),
    ),
    broken(
        "policies_close_everything", lambda b: b("NetworkPolicy", "default")["spec"].update(policyTypes=["Ingress"])
    ),
    broken("policies_close_everything", lambda b: b("NetworkPolicy", "target")["spec"]["ingress"][0].pop("from")),
    broken("policies_close_everything", lambda b: _peer(b, "target").update({"app.kubernetes.io/name": "draft"})),
    broken("policies_close_everything", lambda b: _peer(b, "draft").clear()),
    broken(
        "policies_close_everything",
        lambda b: b("NetworkPolicy", "prometheus-to-draft")["spec"]["ingress"][0]["from"][0].pop("namespaceSelector"),
    ),
    broken(
        "policies_close_everything",
        lambda b: b("NetworkPolicy", "target")["spec"]["ingress"][0]["ports"].append({"port": "metrics"}),
    ),
    broken("probes", lambda b: b.container(*TARGET)["readinessProbe"]["grpc"].update(port=50051)),
    broken("probes", lambda b: b.container(*TARGET)["readinessProbe"]["grpc"].update(service="tandem.v1.Target")),
    broken("probes", lambda b: b.container(*TARGET).pop("startupProbe")),
    broken("probes", lambda b: b.container(*ORCHESTRATOR)["livenessProbe"].update(grpc={"port": 50050})),
    broken(
        "probes",
        lambda b: b.container(*ORCHESTRATOR)["livenessProbe"]["grpc"].update(service="tandem.v1.OrchestratorService"),
    ),
    broken("probes", lambda b: b.container(*DRAFT)["readinessProbe"]["grpc"].update(service="liveness")),
    broken("volume_references", lambda b: b.pod(*DRAFT)["volumes"][-1].update(secret={"secretName": "x"})),
    broken("encryption", lambda b: b.settings("target").pop("TANDEM_TLS_CERTIFICATE")),
    broken("encryption", lambda b: b.settings("draft").pop("TANDEM_TLS_CLIENT_CA")),
    broken("encryption", lambda b: b.settings("draft").update(TANDEM_TLS_CLIENT_CA="/tls/authority.crt")),
    broken("encryption", lambda b: b.settings("orchestrator").update(TANDEM_TLS_WORKER_KEY="/secrets/tls.key")),
    broken("encryption", lambda b: b("Certificate", "target")["spec"].update(dnsNames=["targets"])),
    broken("certificates", lambda b: b("Certificate", "target")["spec"]["issuerRef"].update(name="bootstrapping")),
    broken("certificates", lambda b: b("Certificate", "draft")["spec"]["usages"].append("client auth")),
    broken("certificates", lambda b: b("Certificate", "orchestrator")["spec"]["usages"].remove("client auth")),
    broken("certificates", lambda b: b("Issuer", "tandem")["spec"]["ca"].update(secretName="target-tls")),
    broken("routes", lambda b: b("HTTPRoute", "orchestrator")["spec"].update(hostnames=["grpc.tandem.example.com"])),
    broken("routes", lambda b: b("GRPCRoute", "orchestrator")["spec"]["parentRefs"][0].update(sectionName="http")),
    broken("routes", lambda b: _rule(b, "GRPCRoute")["matches"][0]["method"].update(service="tandem.v1.Generate")),
    broken("routes", lambda b: _rule(b, "GRPCRoute")["backendRefs"][0].update(port=8000)),
    broken("routes", lambda b: _rule(b, "HTTPRoute")["backendRefs"][0].update(name="target")),
    broken("routes", lambda b: b.objects.remove(b("Gateway", "tandem"))),
    broken(
        "routes",
        lambda b: b("Gateway", "tandem")["spec"]["listeners"][0]["tls"].update(certificateRefs=[{"name": "x"}]),
    ),
    broken("routes", lambda b: b.settings("orchestrator").update(TANDEM_TLS_CERTIFICATE="/tls/tls.crt")),
    broken("routes", lambda b: _rule(b, "HTTPRoute")["matches"][0]["path"].update(value="/")),
    broken(
        "routes",
        lambda b: b.objects.append(
            {
                "kind": "BackendTLSPolicy",
                "metadata": {"name": "a", "namespace": "tandem", "labels": {"app.kubernetes.io/part-of": "tandem"}},
                "spec": {"targetRefs": [{"group": "", "kind": "Service", "name": "orchestrator"}]},
            }
        ),
    ),
    broken("encryption", lambda b: b.settings("orchestrator").update(TANDEM_TLS_CERTIFICATE="/tls/tls.crt")),
    broken("ingresses", lambda b: b.settings("orchestrator").update(TANDEM_TLS_CERTIFICATE="/tls/tls.crt")),
    broken("ingresses", lambda b: _annotations(b, "grpc").update({f"{NGINX}/backend-protocol": "HTTP"})),
    broken("ingresses", lambda b: _annotations(b, "http").pop(f"{NGINX}/proxy-body-size")),
    broken("ingresses", lambda b: _annotations(b, "http").pop(f"{NGINX}/proxy-read-timeout")),
    broken("ingresses", lambda b: _path(b, "http").update(path="/")),
    broken("ingresses", lambda b: _path(b, "grpc").update(path="/tandem.v1.DraftService")),
    broken("ingresses", lambda b: _path(b, "http")["backend"]["service"]["port"].update(name="metrics")),
    broken("ingresses", lambda b: _path(b, "http")["backend"]["service"].update(name="target")),
    broken("ingresses", lambda b: b("Ingress", "orchestrator-http")["spec"].pop("tls")),
    broken("ingresses", lambda b: b("Ingress", "orchestrator-grpc")["spec"]["tls"][0].update(secretName="x")),
    broken("grace", lambda b: b.pod(*TARGET).update(terminationGracePeriodSeconds=60)),
    broken("grace", lambda b: b.settings("orchestrator").update(TANDEM_DRAIN_SECONDS="66")),
    broken("progress", lambda b: b(*ORCHESTRATOR)["spec"].pop("progressDeadlineSeconds")),
    broken("progress", lambda b: b.container(*TARGET)["startupProbe"].update(failureThreshold=400)),
    broken("images", lambda b: b.container(*TARGET).update(image="tandem-worker:latest")),
    broken("images", lambda b: b.container(*TARGET).update(image="registry.example.com:5000/tandem-worker")),
    broken("images", lambda b: b.pod(*TARGET)["initContainers"][0].update(image="tandem/tandem-worker:0.1.0-cpu")),
    broken("pod_security", lambda b: b.container(*TARGET)["securityContext"].update(readOnlyRootFilesystem=False)),
    broken("pod_security", lambda b: b.pod(*TARGET)["securityContext"].update(runAsUser=0)),
    broken("pod_security", lambda b: b("ServiceAccount", "draft").pop("automountServiceAccountToken")),
    broken(
        "pod_security",
        lambda b: b.objects.append(
            {
                "kind": "Secret",
                "metadata": {"name": "a", "namespace": "tandem", "labels": {"app.kubernetes.io/part-of": "tandem"}},
            }
        ),
    ),
    broken("settings", lambda b: b.settings("orchestrator").update(TANDEM_GAMMA="4")),
    broken("settings", lambda b: b.settings("orchestrator").update(TANDEM_NUM_SPECULATIVE_TOKENS="four")),
    broken("settings", lambda b: b.settings("target").pop("TANDEM_TARGET_MODEL")),
    broken("settings", lambda b: b.settings("target").update(TANDEM_TARGET_LISTEN="127.0.0.1:50053")),
    broken("settings", lambda b: b.settings("target").update(TANDEM_TARGET_LISTEN="0.0.0.0:50054")),
    broken("variables", lambda b: b.pod(*TARGET)["initContainers"][0].update(envFrom=[])),
    broken(
        "worker_addresses",
        lambda b: b.settings("orchestrator").update(TANDEM_TARGET_ADDRESSES="target-0.target:50053"),
    ),
    broken("worker_addresses", lambda b: b("Service", "draft")["spec"].pop("clusterIP")),
    broken("autoscalers", lambda b: b(*TARGET)["spec"].update(replicas=2)),
    broken("autoscalers", lambda b: b("HorizontalPodAutoscaler", "draft")["spec"].update(minReplicas=9)),
    broken("slots", lambda b: b.settings("orchestrator").update(TANDEM_MAX_RUNNING_REQUESTS="32")),
    broken("slots", lambda b: b.settings("draft").update(TANDEM_DRAFT_SLOTS="24")),
    broken("slots", lambda b: b("HorizontalPodAutoscaler", "orchestrator")["spec"].update(maxReplicas=9)),
    broken("slots", lambda b: b("HorizontalPodAutoscaler", "target")["spec"].update(minReplicas=1)),
    broken("monitors", lambda b: b("ServiceMonitor", "orchestrator")["spec"]["endpoints"][0].update(port="web")),
    broken("sizes", lambda b: b.settings("target").update(TANDEM_TARGET_DEVICE="cpu")),
    broken("sizes", _on_cpu),
    broken("models", lambda b: b.container(*TARGET)["resources"]["limits"].update(memory="4Gi")),
    broken("models", _on_cpu),
    broken("models", lambda b: b.fetched().update(DRAFT_SOURCE="ORG/MODEL")),
    broken(
        "models",
        lambda b: b(*TARGET)["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"].update(storage="6Gi"),
    ),
    broken("labels_and_namespace", lambda b: b("Service", "target")["metadata"].update(namespace="default")),
    broken("labels_and_namespace", lambda b: b("Service", "target")["metadata"].update(labels={})),
]


@pytest.mark.parametrize(("rule", "breaks"), FAULTS)
def test_a_planted_fault_is_found(rule: str, breaks: Callable[[Build], object], good: list[Object]) -> None:
    build = Build(good)
    breaks(build)
    assert any(fault.startswith(f"{rule}: ") for fault in faults(build.objects)), faults(build.objects)


def test_every_rule_has_a_planted_fault() -> None:
    assert {check.__name__ for check in RULES} <= {fault.values[0] for fault in FAULTS}


@pytest.mark.parametrize(
    ("text", "number"), [("250m", "0.25"), ("1.5", "1.5"), ("2Gi", str(2 * 2**30)), ("3M", "3000000")]
)
def test_quantities(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "2 Gi", "2GB", "-1", "1e3m", None])
def test_bad_quantities(text: str | None) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity(text)
