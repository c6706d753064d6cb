"""What a schema can't see: that names, labels, ports, settings and numbers of different objects fit each other.

A rule looks at all objects of a build and yields one line for each fault. `faults` runs them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from draft_service.config import DraftConfig
from orchestrator.__main__ import CLOSE_SECONDS as REQUESTS_CLOSE_SECONDS
from orchestrator.__main__ import STORE_CLOSE_SECONDS
from orchestrator.config import OrchestratorConfig
from orchestrator.http.body import MAX_BODY_BYTES
from orchestrator.http.face import CLOSE_SECONDS as HTTP_CLOSE_SECONDS
from tandem import config
from tandem.grpc_server import LIVENESS
from tandem.tracing import SHUTDOWN_SECONDS as SPANS_CLOSE_SECONDS
from tandem.v1 import draft_pb2, orchestrator_pb2, target_pb2
from target_service.config import TargetConfig

Object = dict[str, Any]

CONFIGS: Mapping[str, type[Any]] = {
    "orchestrator": OrchestratorConfig,
    "draft_service": DraftConfig,
    "target_service": TargetConfig,
}
GRPC_SERVICES = {
    "orchestrator": orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
    "draft_service": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    "target_service": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
}
MADE_BY_HAND = {"tandem-redis", "tandem-public-tls"}
"""Secrets that docs/operations.md tells an operator to make."""
PUBLIC_PORTS = [{"port": "grpc"}, {"port": "http"}]
"""Of the orchestrator."""
CLOSING_SECONDS = round(REQUESTS_CLOSE_SECONDS + HTTP_CLOSE_SECONDS + STORE_CLOSE_SECONDS + SPANS_CLOSE_SECONDS)
"""What an orchestrator needs after its drain, at most."""
WORKER_CLOSING_SECONDS = 10
"""Calls 1 s, a step that hangs 5 s, other ranks 2 s, spans 2 s."""
FETCH_SECONDS = 600
"""What an init step that fetches a model may take before a rollout is given up."""
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}
"""Of the models that manifests name, by their cards."""
PART_OF = "app.kubernetes.io/part-of"
_NAME = "app.kubernetes.io/name"
POD_LABELS = (PART_OF, _NAME, "app.kubernetes.io/component")
WORKLOADS = ("Deployment", "StatefulSet", "Job")

_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")
_DEMO_IMAGE = re.compile(r":[^/]*-demo$")
_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGT", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGT", 1)},
}


def quantity(text: object) -> Decimal:
    """The number that a quantity stands for; raises ValueError."""
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    return Decimal(match[1]) * _UNITS.get(match[2], Decimal(1))


@dataclass(frozen=True)
class Container:
    """A container, with the workload it is in."""

    workload: Object
    spec: Object
    init: bool

    @property
    def where(self) -> str:
        return f"{name_of(self.workload)}/{self.spec['name']}"

    @property
    def pod(self) -> Object:
        spec: Object = template(self.workload)["spec"]
        return spec

    @property
    def module(self) -> str | None:
        """The service of ours that it runs, if it does."""
        command = self.spec.get("command", [])
        return command[2] if command[:2] == ["python", "-m"] and command[2] in CONFIGS else None

    def ports(self) -> dict[str | int, int]:
        """Names and numbers to numbers."""
        numbers = {port["containerPort"]: port["containerPort"] for port in self.spec.get("ports", [])}
        return {**numbers, **{port["name"]: port["containerPort"] for port in self.spec.get("ports", [])}}


class Cluster:
    """The objects of one build, by kind and name."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.by_name = {(item["kind"], item["metadata"]["name"]): item for item in objects}

    def of(self, *kinds: str) -> Iterator[Object]:
        return (item for item in self.objects if item["kind"] in kinds)

    def workloads(self) -> Iterator[Object]:
        return self.of(*WORKLOADS)

    def containers(self) -> Iterator[Container]:
        for workload in self.workloads():
            pod = template(workload)["spec"]
            for spec in pod.get("initContainers", []):
                yield Container(workload, spec, init=True)
            for spec in pod["containers"]:
                yield Container(workload, spec, init=False)

    def selected(self, labels: Mapping[str, str]) -> list[Object]:
        """Workloads whose pods have these labels."""
        return [item for item in self.workloads() if labels.items() <= template(item)["metadata"]["labels"].items()]

    def secrets(self) -> dict[str, Object]:
        """The certificates that cert-manager makes, by the name of the Secret that it puts each into."""
        return {item["spec"]["secretName"]: item for item in self.of("Certificate")}

    def service(self, module: str) -> Container:
        """The container that runs it."""
        return next(container for container in self.containers() if container.module == module)

    def environment(self, container: Container) -> dict[str, str]:
        """What the container sees; the value of a Secret is a stand-in."""
        values: dict[str, str] = {}
        for source in container.spec.get("envFrom", []):
            values.update(self.by_name[("ConfigMap", source["configMapRef"]["name"])].get("data", {}))
        for entry in container.spec.get("env", []):
            values[entry["name"]] = "redis://from-a-secret" if "valueFrom" in entry else entry["value"]
        return values


def template(workload: Object) -> Object:
    """The pod template."""
    found: Object = workload["spec"]["template"]
    return found


def name_of(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


Rule = Callable[[Cluster], Iterator[str]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def faults(objects: list[Object]) -> list[str]:
    """All that is wrong; empty for a good build."""
    cluster = Cluster(objects)
    # The other rules follow these references.
    found = [
        f"{check.__name__}: {fault}" for check in (config_references, volume_references) for fault in check(cluster)
    ]
    return found or [f"{check.__name__}: {fault}" for check in RULES for fault in check(cluster)]


def config_references(cluster: Cluster) -> Iterator[str]:
    for container in cluster.containers():
        wanted: list[tuple[str, Object]] = []
        for source in container.spec.get("envFrom", []):
            wanted += [(kind, source[field]) for field, kind in _FROM.items() if field in source]
        for entry in container.spec.get("env", []):
            source = entry.get("valueFrom", {})
            wanted += [(kind, source[field]) for field, kind in _KEYS.items() if field in source]
        for kind, reference in wanted:
            yield from _missing(cluster, container.where, kind, reference)
        pod = container.pod
        account = pod.get("serviceAccountName")
        if ("ServiceAccount", account) not in cluster.by_name:
            yield f"{container.where}: no ServiceAccount {account}"


_FROM = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
_KEYS = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}


def _missing(cluster: Cluster, where: str, kind: str, reference: Object) -> Iterator[str]:
    found = cluster.by_name.get((kind, reference["name"]))
    if reference.get("optional") or (kind == "Secret" and reference["name"] in MADE_BY_HAND):
        return
    if found is None:
        yield f"{where}: no {kind} {reference['name']}"
    elif "key" in reference and reference["key"] not in found.get("data", {}):
        yield f"{where}: {kind} {reference['name']} has no key {reference['key']}"


def volume_references(cluster: Cluster) -> Iterator[str]:
    for workload in cluster.workloads():
        claims = {item["metadata"]["name"] for item in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {item["name"]: item for item in template(workload)["spec"].get("volumes", [])}
        for volume in volumes.values():
            if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in cluster.by_name:
                yield f"{name_of(workload)}: no ConfigMap {volume['configMap']['name']}"
            secret = volume.get("secret", {}).get("secretName")
            if secret and secret not in cluster.secrets() | dict.fromkeys(MADE_BY_HAND):
                yield f"{name_of(workload)}: nobody makes Secret {secret}"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and ("PersistentVolumeClaim", claim) not in cluster.by_name:
                yield f"{name_of(workload)}: no PersistentVolumeClaim {claim}"
        mounted = set()
        for container in (item for item in cluster.containers() if item.workload is workload):
            for mount in container.spec.get("volumeMounts", []):
                mounted.add(mount["name"])
                if mount["name"] not in claims | volumes.keys():
                    yield f"{container.where}: no volume {mount['name']}"
        for unused in (claims | volumes.keys()) - mounted:
            yield f"{name_of(workload)}: nothing mounts volume {unused}"


@rule
def quantities(cluster: Cluster) -> Iterator[str]:
    for container in cluster.containers():
        resources = container.spec.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name in ("cpu", "memory"):
            if name not in requests or name not in limits:
                yield f"{container.where}: {name} is not both requested and limited"
        for name in requests.keys() & limits.keys():
            try:
                low, high = quantity(requests[name]), quantity(limits[name])
            except ValueError as error:
                yield f"{container.where}: {name}: {error}"
                continue
            if low > high or (name != "cpu" and low != high):
                yield f"{container.where}: requests {requests[name]} of {name}, limit {limits[name]}"
    for workload in cluster.workloads():
        for claim in workload["spec"].get("volumeClaimTemplates", []):
            yield from _bad_quantity(name_of(workload), claim["spec"]["resources"]["requests"]["storage"])
        for volume in template(workload)["spec"].get("volumes", []):
            if "emptyDir" in volume:
                yield from _bad_quantity(name_of(workload), volume["emptyDir"].get("sizeLimit", "none"))


def _bad_quantity(where: str, text: object) -> Iterator[str]:
    try:
        quantity(text)
    except ValueError as error:
        yield f"{where}: {error}"


@rule
def selectors(cluster: Cluster) -> Iterator[str]:
    for workload in cluster.of("Deployment", "StatefulSet"):
        wanted = workload["spec"]["selector"]["matchLabels"]
        if workload not in cluster.selected(wanted) or len(cluster.selected(wanted)) != 1:
            yield f"{name_of(workload)}: its selector doesn't match its own pods alone"
        if "app.kubernetes.io/version" in wanted:
            yield f"{name_of(workload)}: a selector with a version can never be updated"
    for service in cluster.of("Service"):
        if len(cluster.selected(service["spec"]["selector"])) != 1:
            yield f"{name_of(service)}: selects the pods of no workload, or of several"
    for item in cluster.of("PodDisruptionBudget"):
        if len(cluster.selected(item["spec"]["selector"]["matchLabels"])) != 1:
            yield f"{name_of(item)}: selects the pods of no workload, or of several"
    for item in cluster.of("NetworkPolicy"):
        for labels in _pod_labels(item):
            if labels and not cluster.selected(labels):
                yield f"{name_of(item)}: selects no pod by {labels}"
    for workload in cluster.workloads():
        for labels in _scheduling_labels(template(workload)["spec"]):
            if not cluster.selected(labels):
                yield f"{name_of(workload)}: placed by pods that don't exist: {labels}"


def _pod_labels(policy: Object) -> Iterator[Mapping[str, str]]:
    yield from _labels_of(policy["spec"]["podSelector"])
    for direction in ("ingress", "egress"):
        for entry in policy["spec"].get(direction, []):
            for peer in entry.get("from", []) + entry.get("to", []):
                # Pods of another namespace are not in this build.
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    yield from _labels_of(peer["podSelector"])


def _labels_of(selector: Object) -> Iterator[Mapping[str, str]]:
    yield selector.get("matchLabels", {})
    for expression in selector.get("matchExpressions", []):
        for value in expression["values"]:
            yield {expression["key"]: value}


def _scheduling_labels(pod: Object) -> Iterator[Mapping[str, str]]:
    for constraint in pod.get("topologySpreadConstraints", []):
        yield constraint["labelSelector"]["matchLabels"]
    for kind in ("podAffinity", "podAntiAffinity"):
        for term in pod.get("affinity", {}).get(kind, {}).get("preferredDuringSchedulingIgnoredDuringExecution", []):
            yield term["podAffinityTerm"]["labelSelector"]["matchLabels"]


@rule
def service_ports(cluster: Cluster) -> Iterator[str]:
    for service in cluster.of("Service"):
        ports = _ports_of(cluster, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in ports:
                yield f"{name_of(service)}: no container port {port['targetPort']}"
            elif service["spec"].get("clusterIP") == "None" and ports[port["targetPort"]] != port["port"]:
                # DNS hands out the pods' own addresses, so nothing translates.
                yield f"{name_of(service)}: headless, but port {port['port']} is not the containers'"
    for workload in cluster.of("StatefulSet"):
        if ("Service", workload["spec"]["serviceName"]) not in cluster.by_name:
            yield f"{name_of(workload)}: no Service {workload['spec']['serviceName']} gives its pods names"


def _ports_of(cluster: Cluster, labels: Mapping[str, str]) -> dict[str | int, int]:
    chosen = cluster.selected(labels)
    found: dict[str | int, int] = {}
    for container in cluster.containers():
        if container.workload in chosen and not container.init:
            found.update(container.ports())
    return found


@rule
def policy_ports(cluster: Cluster) -> Iterator[str]:
    for policy in cluster.of("NetworkPolicy"):
        own = policy["spec"]["podSelector"].get("matchLabels", {})
        for entry in policy["spec"].get("ingress", []):
            yield from _unknown_ports(policy, entry, _ports_of(cluster, own))
        for entry in policy["spec"].get("egress", []):
            for peer in entry.get("to", []):
                yield from _unknown_ports(policy, entry, _ports_of(cluster, peer["podSelector"]["matchLabels"]))


def _unknown_ports(policy: Object, entry: Object, ports: Mapping[str | int, int]) -> Iterator[str]:
    for port in entry.get("ports", []):
        if port["port"] not in ports:
            yield f"{name_of(policy)}: no container port {port['port']}"


@rule
def policies_close_everything(cluster: Cluster) -> Iterator[str]:
    default = cluster.by_name.get(("NetworkPolicy", "default"))
    if (
        default is None
        or default["spec"]["podSelector"]
        or set(default["spec"]["policyTypes"]) != {"Ingress", "Egress"}
    ):
        yield "no NetworkPolicy closes all pods"
    for policy in cluster.of("NetworkPolicy"):
        for entry in policy["spec"].get("ingress", []):
            public = name_of(policy) == "NetworkPolicy/orchestrator" and entry["ports"] == PUBLIC_PORTS
            if not entry.get("from") and not public:
                yield f"{name_of(policy)}: lets everybody in"
            yield from _strangers(policy, entry)


_LET_IN = {"draft": {"orchestrator"}, "target": {"orchestrator"}, "redis": {"orchestrator"}}
"""Who alone may reach a pod, by the name in its labels, metrics apart."""


def _strangers(policy: Object, entry: Object) -> Iterator[str]:
    """Peers that have no business at this pod. Metrics are Prometheus's alone, which is in another namespace."""
    pod = policy["spec"]["podSelector"].get("matchLabels", {}).get(_NAME)
    for port in entry.get("ports", [{"port": "any"}]):
        allowed = {"prometheus"} if port["port"] == "metrics" else _LET_IN.get(pod)
        for peer in entry.get("from", []):
            name = peer.get("podSelector", {}).get("matchLabels", {}).get(_NAME)
            if allowed is not None and (name not in allowed or ("namespaceSelector" in peer) != (name == "prometheus")):
                yield f"{name_of(policy)}: lets {name} in at {port['port']}"


@rule
def probes(cluster: Cluster) -> Iterator[str]:
    for container in cluster.containers():
        if container.init:
            continue
        for kind in ("readinessProbe", "livenessProbe"):
            if kind not in container.spec:
                yield f"{container.where}: no {kind}"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            yield from _probe_faults(container, kind, container.spec.get(kind, {}))
        if container.module and "startupProbe" not in container.spec:
            yield f"{container.where}: no startupProbe, and a model takes time to load"


def _probe_faults(container: Container, kind: str, probe: Object) -> Iterator[str]:
    for action in ("grpc", "tcpSocket", "httpGet"):
        if action in probe and probe[action]["port"] not in container.ports():
            yield f"{container.where}: {kind} asks port {probe[action]['port']}, which is not there"
    if probe and probe.get("timeoutSeconds", 1) > probe.get("periodSeconds", 10):
        yield f"{container.where}: {kind} may take longer than its period"
    if container.module is not None and probe:
        wanted = _PROBED.get((container.module, kind), GRPC_SERVICES[container.module])
        asked = probe.get("grpc", {}).get("service")
        if asked != wanted:
            yield f"{container.where}: {kind} asks for {asked}, not {wanted}"
        if probe.get("grpc", {}).get("port") != container.ports().get("health"):
            yield f"{container.where}: {kind} asks a port that may speak TLS"


_PROBED = {
    # Restarting an orchestrator brings back neither a target nor Redis.
    ("orchestrator", "startupProbe"): LIVENESS,
    **{(module, "livenessProbe"): LIVENESS for module in CONFIGS},
}


@rule
def grace(cluster: Cluster) -> Iterator[str]:
    for container in cluster.containers():
        if container.module is None:
            continue
        sleep = container.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = float(cluster.environment(container).get("TANDEM_DRAIN_SECONDS", "nan"))
        given = container.pod["terminationGracePeriodSeconds"]
        closing = CLOSING_SECONDS if container.module == "orchestrator" else WORKER_CLOSING_SECONDS
        if not sleep + drain + closing < given:
            yield f"{container.where}: {sleep} s preStop + {drain:g} s drain + {closing} s, but {given} s of grace"


@rule
def progress(cluster: Cluster) -> Iterator[str]:
    """Orchestrators are ready once a target is: a rollout of theirs isn't given up before one can be, or they can start."""
    target = cluster.service("target_service")
    fetches = "initContainers" in target.pod
    needed = _start_seconds(target) + _start_seconds(cluster.service("orchestrator")) + fetches * FETCH_SECONDS
    for workload in cluster.of("Deployment"):
        given = workload["spec"].get("progressDeadlineSeconds", 600)
        if workload is cluster.service("orchestrator").workload and given < needed:
            yield f"{name_of(workload)}: given up after {given} s, but a target and it may take {needed} s to start"


def _start_seconds(container: Container) -> int:
    probe = container.spec.get("startupProbe", {})
    seconds: int = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    return seconds


@rule
def images(cluster: Cluster) -> Iterator[str]:
    used: dict[tuple[str, str], set[str]] = {}
    for container in cluster.containers():
        image = container.spec["image"]
        name, _, tag = image.rpartition("/")[2].partition(":")
        if not re.match(r"^\d+\.\d+", tag) and "@sha256:" not in image:
            yield f"{container.where}: image {image} is not pinned"
        used.setdefault((name_of(container.workload), name.partition("@")[0]), set()).add(image)
    for (workload, name), variants in used.items():
        if len(variants) > 1:
            yield f"{workload}: a node must fetch {name} in several variants: {sorted(variants)}"


@rule
def pod_security(cluster: Cluster) -> Iterator[str]:
    """What the level "restricted" asks for, and a root file system that can't be written."""
    for container in cluster.containers():
        pod, own = container.pod.get("securityContext", {}), container.spec.get("securityContext", {})
        wanted = {
            "runs as a numeric user that is not root": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0,
            "seccomp RuntimeDefault": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "no privilege escalation": own.get("allowPrivilegeEscalation") is False,
            "read-only root file system": own.get("readOnlyRootFilesystem") is True,
            "no capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "no token": container.pod.get("automountServiceAccountToken") is False,
            "no service variables": container.pod.get("enableServiceLinks") is False,
            "no host": not {"hostNetwork", "hostPID", "hostIPC"} & container.pod.keys(),
        }
        for what, holds in wanted.items():
            if not holds:
                yield f"{container.where}: not so: {what}"
    for account in cluster.of("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{name_of(account)}: mounts a token"
    for secret in cluster.of("Secret"):
        yield f"{name_of(secret)}: no Secret belongs into git"


@rule
def settings(cluster: Cluster) -> Iterator[str]:
    """Each service reads its settings with its own code: unknown, missing and unreadable ones are found."""
    for container in cluster.containers():
        if container.module is None:
            continue
        environment = cluster.environment(container)
        declared = config.settings_of(CONFIGS[container.module]).values()
        known = {item.variable for item in declared}
        for variable in sorted(environment):
            if variable.startswith("TANDEM_") and variable not in known:
                yield f"{container.where}: {variable} is not a setting of {container.module}"
        try:
            config.load(CONFIGS[container.module], container.spec["command"][3:], environment)
        except config.ConfigError as error:
            yield f"{container.where}: {error}"
        for variable, value in environment.items():
            yield from _listen_faults(container, variable, value)


def _listen_faults(container: Container, variable: str, value: str) -> Iterator[str]:
    if not (variable.startswith("TANDEM_") and variable.endswith("_LISTEN")):
        return
    host, _, port = value.rpartition(":")
    if host != "0.0.0.0":
        yield f"{container.where}: {variable}={value} can't be reached from another pod"
    if int(port) not in container.ports():
        yield f"{container.where}: {variable}={value}, but no such container port"


@rule
def encryption(cluster: Cluster) -> Iterator[str]:
    """Both ends of an edge speak TLS or neither does, with files that are there and names that are compared."""
    for container in cluster.containers():
        if container.module is not None:
            yield from _file_faults(cluster, container)
    for service in cluster.of("Service"):
        module = _module_behind(cluster, service)
        spoken = {port.get("appProtocol") for port in service["spec"]["ports"]}
        if module is not None and _serves_tls(cluster, module) and spoken & {*_PROTOCOLS.values()}:
            yield f"{name_of(service)}: speaks TLS, but says {sorted(map(str, spoken))}"
    orchestrator = cluster.environment(cluster.service("orchestrator"))
    encrypts = "TANDEM_TLS_WORKER_CA" in orchestrator
    for role in ("draft", "target"):
        environment = cluster.environment(cluster.service(f"{role}_service"))
        if ("TANDEM_TLS_CERTIFICATE" in environment) != encrypts:
            yield f"{role}: one end of its edge to the orchestrator speaks TLS and the other doesn't"
        if ("TANDEM_TLS_CLIENT_CA" in environment) != ("TANDEM_TLS_WORKER_CERTIFICATE" in orchestrator):
            yield f"{role}: wants a certificate that isn't shown, or isn't wanted"
        certificate = cluster.secrets().get(f"{role}-tls")
        host = orchestrator[f"TANDEM_{role.upper()}_ADDRESSES"].rpartition(":")[0]
        if certificate is not None and host not in certificate["spec"]["dnsNames"]:
            yield f"{role}: its certificate has not the name {host}"


def _module_behind(cluster: Cluster, service: Object) -> str | None:
    """The service of ours that a Service leads to, if it does."""
    chosen = cluster.selected(service["spec"]["selector"])
    return next((each.module for each in cluster.containers() if each.workload in chosen and each.module), None)


def _serves_tls(cluster: Cluster, module: str) -> bool:
    return "TANDEM_TLS_CERTIFICATE" in cluster.environment(cluster.service(module))


def _file_faults(cluster: Cluster, container: Container) -> Iterator[str]:
    """Each file that a setting names is a key of a Secret that is mounted there."""
    secrets = {item["name"]: item["secret"]["secretName"] for item in container.pod["volumes"] if "secret" in item}
    mounts = {mount["mountPath"]: secrets.get(mount["name"]) for mount in container.spec["volumeMounts"]}
    for variable, path in cluster.environment(container).items():
        if variable.startswith("TANDEM_TLS_"):
            folder, _, key = path.rpartition("/")
            if mounts.get(folder) is None or key not in ("ca.crt", "tls.crt", "tls.key"):
                yield f"{container.where}: {variable}: nothing mounts {path}"


@rule
def certificates(cluster: Cluster) -> Iterator[str]:
    """Certificates are custom resources, whose schema the validator doesn't have."""
    for certificate in cluster.of("Certificate"):
        issuer = certificate["spec"]["issuerRef"]
        if (issuer["kind"], issuer["name"]) not in cluster.by_name:
            yield f"{name_of(certificate)}: no {issuer['kind']} {issuer['name']}"
        client = certificate["metadata"]["name"] == "orchestrator"
        usages = set(certificate["spec"].get("usages", []))
        if not certificate["spec"].get("isCA") and (("client auth" in usages) != client or "server auth" not in usages):
            yield f"{name_of(certificate)}: used for {sorted(usages)}"
    for issuer in cluster.of("Issuer"):
        secret = issuer["spec"].get("ca", {}).get("secretName")
        if secret and not cluster.secrets().get(secret, {"spec": {}})["spec"].get("isCA"):
            yield f"{name_of(issuer)}: no CA in Secret {secret}"


@rule
def routes(cluster: Cluster) -> Iterator[str]:
    """Routes are custom resources, too. A route of either kind leads to a port that speaks its protocol, in TLS if a policy says so."""
    hosts: dict[str, str] = {}
    for route in cluster.of("GRPCRoute", "HTTPRoute"):
        for host in route["spec"]["hostnames"]:
            if hosts.setdefault(host, route["kind"]) != route["kind"]:
                yield f"{name_of(route)}: {host} has routes of both kinds"
        for parent in route["spec"]["parentRefs"]:
            gateway = cluster.by_name.get(("Gateway", parent["name"]), {"spec": {"listeners": []}})
            listeners = {item["name"]: item["hostname"] for item in gateway["spec"]["listeners"]}
            if listeners.get(parent["sectionName"]) not in route["spec"]["hostnames"]:
                yield f"{name_of(route)}: no listener {parent['sectionName']} for its host name"
        for entry in route["spec"]["rules"]:
            yield from _backend_faults(cluster, route, entry)
    for gateway in cluster.of("Gateway"):
        for listener in gateway["spec"]["listeners"]:
            for reference in listener["tls"]["certificateRefs"]:
                if reference["name"] not in cluster.secrets() | dict.fromkeys(MADE_BY_HAND):
                    yield f"{name_of(gateway)}: nobody makes Secret {reference['name']}"


_PROTOCOLS = {"GRPCRoute": "kubernetes.io/h2c", "HTTPRoute": "http"}
"""In plain text."""
_PORTS = {"GRPCRoute": "grpc", "HTTPRoute": "http"}


def _backend_faults(cluster: Cluster, route: Object, entry: Object) -> Iterator[str]:
    for match in entry["matches"]:
        service = match.get("method", {}).get("service")
        if service is not None and service != GRPC_SERVICES["orchestrator"]:
            yield f"{name_of(route)}: no gRPC service {service}"
        if match.get("path") == {"type": "PathPrefix", "value": "/"}:
            yield f"{name_of(route)}: lets /metrics out"
    for backend in entry["backendRefs"]:
        service = cluster.by_name.get(("Service", backend["name"]), {"spec": {"ports": []}})
        names = {port["port"]: port["name"] for port in service["spec"]["ports"]}
        if names.get(backend["port"]) != _PORTS[route["kind"]]:
            yield f"{name_of(route)}: {backend['name']}:{backend['port']} is not there, or is {names.get(backend['port'])}"
        spoken = {port["port"]: port.get("appProtocol") for port in service["spec"]["ports"]}
        encrypts = backend["name"] in _names_that_gateways_encrypt_to(cluster)
        if encrypts != _serves_tls(cluster, "orchestrator"):
            yield f"{name_of(route)}: one of gateway and orchestrator speaks TLS to the other, and the other doesn't"
        if not encrypts and spoken.get(backend["port"]) != _PROTOCOLS[route["kind"]]:
            yield f"{name_of(route)}: {backend['name']}:{backend['port']} speaks {spoken.get(backend['port'])}"


def _names_that_gateways_encrypt_to(cluster: Cluster) -> set[str]:
    return {each["name"] for policy in cluster.of("BackendTLSPolicy") for each in policy["spec"]["targetRefs"]}


@rule
def ingresses(cluster: Cluster) -> Iterator[str]:
    """An Ingress leads to a port of the orchestrator, is told what that speaks, and lets pass what the orchestrator takes."""
    for ingress in cluster.of("Ingress"):
        said = {name.partition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
        with_certificate = {host for each in ingress["spec"].get("tls", []) for host in each["hosts"]}
        for entry in ingress["spec"]["rules"]:
            if entry["host"] not in with_certificate:
                yield f"{name_of(ingress)}: {entry['host']} has no certificate, and callers would show their tokens"
            for path in entry["http"]["paths"]:
                yield from _path_faults(cluster, ingress, path, said.get("backend-protocol", "HTTP"))
        for each in ingress["spec"].get("tls", []):
            if each["secretName"] not in cluster.secrets() | dict.fromkeys(MADE_BY_HAND):
                yield f"{name_of(ingress)}: nobody makes Secret {each['secretName']}"
        if said.get("proxy-body-size") != f"{MAX_BODY_BYTES >> 20}m":
            yield f"{name_of(ingress)}: lets bodies of {said.get('proxy-body-size')} pass; the orchestrator takes {MAX_BODY_BYTES}"
        # For a place at an orchestrator, then for one at a target.
        longest = sum(
            options.max_waiting_seconds for name, options in _loaded(cluster).items() if name != "draft_service"
        )
        for limit in ("proxy-read-timeout", "proxy-send-timeout"):
            if not float(said.get(limit, 60)) > longest:
                yield f"{name_of(ingress)}: {limit} may end a request that waits for its first token"


def _path_faults(cluster: Cluster, ingress: Object, path: Object, protocol: str) -> Iterator[str]:
    backend = path["backend"]["service"]
    service = cluster.by_name.get(("Service", backend["name"]), {"spec": {"ports": []}})
    port = backend["port"].get("name")
    if service["spec"]["ports"] == [] or port not in {each["name"] for each in service["spec"]["ports"]}:
        yield f"{name_of(ingress)}: no port {port} at a Service {backend['name']}"
        return
    plain, allowed = _INGRESS_BACKENDS.get(port, ("nothing", set()))
    wanted = plain + "S" * _serves_tls(cluster, "orchestrator")
    if protocol != wanted:
        yield f"{name_of(ingress)}: is told that {port} speaks {protocol}, and it speaks {wanted}"
    if (path["pathType"], path["path"]) not in allowed:
        yield f"{name_of(ingress)}: {path['path']} is not for everybody, or not there"


_INGRESS_BACKENDS = {
    "grpc": ("GRPC", {("Prefix", f"/{GRPC_SERVICES['orchestrator']}")}),
    "http": ("HTTP", {("Prefix", "/v1"), ("Exact", "/")}),
}
"""By port of the orchestrator: what it speaks in plain text, and what of it may be outside. /metrics is not."""


@rule
def variables(cluster: Cluster) -> Iterator[str]:
    """$(NAME) in a command is replaced only where NAME is in the environment; else it stays, as it is written."""
    for container in cluster.containers():
        known = cluster.environment(container)
        for word in container.spec.get("command", []) + container.spec.get("args", []):
            for name in re.findall(r"\$\((\w+)\)", str(word)):
                if name not in known:
                    yield f"{container.where}: $({name}) is not set"


@rule
def worker_addresses(cluster: Cluster) -> Iterator[str]:
    """The orchestrator is given the name of each headless Service, which resolves to all of its pods, at its port."""
    for container in cluster.containers():
        if container.module != "orchestrator":
            continue
        environment = cluster.environment(container)
        for role in ("target", "draft"):
            service = cluster.by_name[("Service", role)]
            if service["spec"].get("clusterIP") != "None":
                yield f"Service/{role}: its name resolves to one address, not to each pod"
            needed, given = (
                f"{role}:{service['spec']['ports'][0]['port']}",
                environment[f"TANDEM_{role.upper()}_ADDRESSES"],
            )
            if given != needed:
                yield f"{container.where}: TANDEM_{role.upper()}_ADDRESSES is {given}, not {needed}"


@rule
def autoscalers(cluster: Cluster) -> Iterator[str]:
    scaled = set()
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        reference = scaler["spec"]["scaleTargetRef"]
        scaled.add((reference["kind"], reference["name"]))
        if (reference["kind"], reference["name"]) not in cluster.by_name:
            yield f"{name_of(scaler)}: no {reference['kind']} {reference['name']}"
        if not scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]:
            yield f"{name_of(scaler)}: more replicas at least than at most"
        for metric in scaler["spec"]["metrics"]:
            described = metric.get("object", {}).get("describedObject")
            if described and (described["kind"], described["name"]) not in cluster.by_name:
                yield f"{name_of(scaler)}: no {described['kind']} {described['name']}"
    for workload in cluster.of("Deployment", "StatefulSet"):
        if ((workload["kind"], workload["metadata"]["name"]) in scaled) == ("replicas" in workload["spec"]):
            yield f"{name_of(workload)}: replicas are set by an autoscaler or by the manifest, by one of both"


@rule
def slots(cluster: Cluster) -> Iterator[str]:
    """All that the orchestrators run at once has a slot at the targets, and at the drafts, however far autoscalers go."""
    loaded = _loaded(cluster)
    if not loaded:
        return
    for at, which in ((0, "fewest"), (1, "most")):
        running = _replicas(cluster, "orchestrator")[at] * loaded["orchestrator"].max_running_requests
        for module in ("draft_service", "target_service"):
            places = _replicas(cluster, module)[at] * loaded[module].slots
            if running > places:
                yield f"{module}: {places} slots with the {which} replicas, but orchestrators run {running} requests"


def _loaded(cluster: Cluster) -> dict[str, Any]:
    """What the services make of their settings; nothing where they refuse them, which `settings` says."""
    try:
        return {
            name: config.load(each, [], cluster.environment(cluster.service(name))) for name, each in CONFIGS.items()
        }
    except config.ConfigError:
        return {}


def _replicas(cluster: Cluster, module: str) -> tuple[int, int]:
    """The fewest and the most of a service."""
    workload = cluster.service(module).workload
    for scaler in cluster.of("HorizontalPodAutoscaler"):
        reference = scaler["spec"]["scaleTargetRef"]
        if (reference["kind"], reference["name"]) == (workload["kind"], workload["metadata"]["name"]):
            return scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]
    count = workload["spec"].get("replicas", 1)
    return count, count


@rule
def monitors(cluster: Cluster) -> Iterator[str]:
    """ServiceMonitor is a custom resource, whose schema the validator doesn't have."""
    for monitor in cluster.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [item for item in cluster.of("Service") if wanted <= item["metadata"]["labels"].items()]
        if len(services) != 1:
            yield f"{name_of(monitor)}: selects no Service, or several"
            continue
        ports = {port["name"] for port in services[0]["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"{name_of(monitor)}: {name_of(services[0])} has no port {endpoint['port']}"


@rule
def sizes(cluster: Cluster) -> Iterator[str]:
    """Threads against processors, the KV cache against memory, devices against what is allotted."""
    for container in cluster.containers():
        if container.module not in ("draft_service", "target_service"):
            continue
        limits = container.spec["resources"]["limits"]
        try:
            options = config.load(CONFIGS[container.module], [], cluster.environment(container))
        except config.ConfigError:
            continue  # `settings` says so
        gpus = int(limits.get("nvidia.com/gpu", 0))
        if (options.device == "cuda") != (gpus == 1):
            yield f"{container.where}: device {options.device} and {gpus} GPUs"
        if options.device != "cpu":
            continue
        if not 0 < options.threads <= quantity(limits["cpu"]):
            yield f"{container.where}: {options.threads} threads on {limits['cpu']} CPUs are throttled, and 0 is the node's"
        if not 0 < options.kv_memory_mib << 20 <= quantity(limits["memory"]) / 2:
            yield f"{container.where}: a KV cache of {options.kv_memory_mib} MiB in {limits['memory']}"


@rule
def models(cluster: Cluster) -> Iterator[str]:
    """What is fetched fits the worker's memory, and twice the claim, since one model replaces another when it is complete."""
    for container in cluster.containers():
        if container.spec["name"] != "fetch-model":
            continue
        role = container.workload["metadata"]["name"]
        source = cluster.environment(container).get(f"{role.upper()}_SOURCE", "")
        if source not in PARAMETERS:
            yield f"{container.where}: say in PARAMETERS how large {source} is"
            continue
        size = 2 * PARAMETERS[source]  # in bfloat16
        for claim in container.workload["spec"]["volumeClaimTemplates"]:
            if 2 * size > quantity(claim["spec"]["resources"]["requests"]["storage"]):
                yield f"{container.where}: {source} doesn't fit twice into the claim {claim['metadata']['name']}"
        yield from _memory_faults(cluster, cluster.service(f"{role}_service"), source, size)


def _memory_faults(cluster: Cluster, worker: Container, source: str, size: int) -> Iterator[str]:
    """`size`: of its file, in bytes."""
    if _DEMO_IMAGE.search(worker.spec["image"]):
        return  # it has the memory of the tiny pair in its image: the README of model-volume says so
    limit = worker.spec["resources"]["limits"]["memory"]
    try:
        options = config.load(CONFIGS[str(worker.module)], [], cluster.environment(worker))
        allowed = quantity(limit)
    except (config.ConfigError, ValueError):
        return  # `settings` or `quantities` says so
    # In float32 on a CPU; on their way to a GPU as they are.
    held = 2 * size + (options.kv_memory_mib << 20) if options.device == "cpu" else size
    if held + (1 << 30) > allowed:
        yield f"{worker.where}: {source} takes {held >> 20} MiB and 1 GiB of {limit}"


@rule
def labels_and_namespace(cluster: Cluster) -> Iterator[str]:
    namespaces = {item["metadata"].get("namespace") for item in cluster.objects if item["kind"] != "Namespace"}
    if namespaces != {"tandem"}:
        yield f"objects are in {sorted(map(str, namespaces))}"
    for item in cluster.objects:
        if item["metadata"].get("labels", {}).get(PART_OF) != "tandem":
            yield f"{name_of(item)}: no label {PART_OF}"
    for workload in cluster.workloads():
        for label in POD_LABELS:
            if label not in template(workload)["metadata"]["labels"]:
                yield f"{name_of(workload)}: its pods have no label {label}"
