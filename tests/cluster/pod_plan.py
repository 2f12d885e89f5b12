"""Plans of pods, from their rendered specifications: commands, environments, volumes, probes. Pure.

Only the fields that the chart uses are understood. Another one raises ValueError, so that nothing is silently left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.cluster.images import Image
from tests.k8s.pods import Object

NAMESPACE: Final = "outrider"
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_ACCOUNT_VOLUME: Final = "kube-api-access"
# Where a pod runs, and who may do so: one node, which has no API, runs all of them.
NOT_OF_A_NODE: Final = frozenset(
    {
        *("affinity", "automountServiceAccountToken", "imagePullSecrets", "nodeSelector", "tolerations"),
        *("priorityClassName", "serviceAccountName", "topologySpreadConstraints", "activeDeadlineSeconds"),
    }
)
POD_FIELDS: Final = NOT_OF_A_NODE | {
    *("containers", "initContainers", "volumes", "securityContext", "restartPolicy"),
    "terminationGracePeriodSeconds",
}
CONTAINER_FIELDS: Final = frozenset(
    {
        *("name", "image", "imagePullPolicy", "command", "args", "env", "envFrom", "ports", "resources"),
        *("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "securityContext", "volumeMounts"),
    }
)
# The node's system calls are not filtered, and it sets every file's group anew.
SECURITY_FIELDS: Final = frozenset(
    {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"}
)
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


class NotThere(LookupError):
    """An object that the pod needs is not there (yet)."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Secrets and config maps of the namespace: their files by the object's name."""

    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Folders of persistent volumes by the claim's name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about a pod that are known before it starts."""

    name: str
    address: str
    labels: Mapping[str, str]
    service_links: Mapping[str, str] = field(default_factory=dict)
    """Variables that name the services that there are (`service_links`)."""
    account: Mapping[str, bytes] = field(default_factory=dict)
    """Files by which a pod calls the API, where its specification says that it has them."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A folder that lives as long as the pod, unless it is a claim's."""

    name: str
    files: Mapping[str, tuple[bytes, int]] | None = None  # content and mode; None: an empty folder to write to
    size_bytes: int | None = None
    claim: Path | None = None
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    volume: str
    path: str
    is_read_only: bool


@dataclass(frozen=True, slots=True)
class Probe:
    kind: str  # http, tcp, grpc or exec
    port: int
    target: str  # a path of HTTP, a service of gRPC
    words: tuple[str, ...]  # of a command in the container
    delay_s: float
    period_s: float
    timeout_s: float
    num_failures_max: int
    num_successes_min: int


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    name: str
    image: Image
    words: tuple[str, ...]
    environment: Mapping[str, str]
    user: int
    group: int
    mounts: tuple[Mount, ...]
    probes: Mapping[str, Probe]  # by startup, liveness, readiness
    pre_stop_s: float
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class PodPlan:
    init_containers: tuple[ContainerPlan, ...]  # run one after the other, before the others
    containers: tuple[ContainerPlan, ...]
    volumes: tuple[Volume, ...]
    shared_group: int  # owns the volumes
    grace_s: float
    restarts: str  # Always, OnFailure or Never


def plan_pod(spec: Object, identity: Identity, contents: Contents, image_of: Callable[[str], Image]) -> PodPlan:
    """Raises NotThere for a secret or config map that is not there, ValueError for what is not understood here."""
    _check(spec, POD_FIELDS, "pod")
    security = spec["securityContext"]
    _check(security, SECURITY_FIELDS, "security context")
    volumes = plan_volumes(spec, contents)
    read_only = {volume.name for volume in volumes if volume.is_read_only}
    account = []
    if spec.get("automountServiceAccountToken", True):
        account = [{"name": _ACCOUNT_VOLUME, "mountPath": ACCOUNT, "readOnly": True}]
        files = {name: (content, 0o640) for name, content in identity.account.items()}
        volumes = (*volumes, Volume(_ACCOUNT_VOLUME, files))
    init_containers, containers = (
        tuple(
            _plan_container(container, security, identity, contents, image_of, read_only, account)
            for container in spec.get(key, ())
        )
        for key in ("initContainers", "containers")
    )
    return PodPlan(
        init_containers,
        containers,
        volumes,
        security["fsGroup"],
        float(spec.get("terminationGracePeriodSeconds", 30)),
        spec.get("restartPolicy", "Always"),
    )


def plan_volumes(spec: Object, contents: Contents) -> tuple[Volume, ...]:
    """Raises NotThere for what is not there, ValueError for what is not understood here."""
    return tuple(_plan_volume(volume, contents) for volume in spec.get("volumes", ()))


def service_links(services: Mapping[str, tuple[str, Mapping[str, int]]]) -> dict[str, str]:
    """Variables that a kubelet sets for each service: its address, and its ports by their names."""
    variables = {}
    for name, (address, ports) in services.items():
        prefix = name.upper().replace("-", "_")
        variables[f"{prefix}_SERVICE_HOST"] = address
        for number, (port_name, port) in enumerate(ports.items()):
            if number == 0:
                variables[f"{prefix}_SERVICE_PORT"] = str(port)
                variables[f"{prefix}_PORT"] = f"tcp://{address}:{port}"
            variables[f"{prefix}_SERVICE_PORT_{port_name.upper().replace('-', '_')}"] = str(port)
            link = f"{prefix}_PORT_{port}_TCP"
            parts = {"": f"tcp://{address}:{port}", "_PROTO": "tcp", "_PORT": str(port), "_ADDR": address}
            variables |= {f"{link}{suffix}": value for suffix, value in parts.items()}
    return variables


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with each $(NAME) replaced, if there is such a variable; $$ is a dollar."""
    return re.sub(
        r"\$\$|\$\(([\w.-]+)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


def num_bytes(quantity: str) -> int:
    """The bytes of a quantity such as 64Mi or 2Gi. Raises ValueError."""
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", quantity)
    if found is None:
        raise ValueError(f"the quantity {quantity} is not understood here")
    return int(found[1]) * _UNITS[found[2]]


def _check(given: Object, known: frozenset[str], what: str) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"fields of a {what} that are not understood here: {', '.join(unknown)}")


def _plan_container(
    container: Object,
    security: Object,
    identity: Identity,
    contents: Contents,
    image_of: Callable[[str], Image],
    read_only: Set[str],
    account: Sequence[Object],
) -> ContainerPlan:
    _check(container, CONTAINER_FIELDS, "container")
    if container["securityContext"] != RESTRICTED:
        raise ValueError(f"only restricted containers run here: {RESTRICTED}")
    image = image_of(container["image"])
    variables = {**image.environment, **identity.service_links, **dict(_environment(container, identity, contents))}
    words = [*container.get("command", image.entrypoint), *container.get("args", ())]
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    pre_stop = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
    return ContainerPlan(
        container["name"],
        image,
        tuple(expanded(word, variables) for word in words),
        variables,
        security["runAsUser"],
        security["runAsGroup"],
        tuple(
            Mount(each["name"], each["mountPath"], each.get("readOnly", False) or each["name"] in read_only)
            for each in (*container.get("volumeMounts", ()), *account)
        ),
        {
            kind: _plan_probe(container[f"{kind}Probe"], ports)
            for kind in ("startup", "liveness", "readiness")
            if f"{kind}Probe" in container
        },
        float(pre_stop["sleep"]["seconds"]),
        None if limit is None else num_bytes(limit),
    )


def _environment(container: Object, identity: Identity, contents: Contents) -> Iterator[tuple[str, str]]:
    for source in container.get("envFrom", ()):
        for name, value in _files(contents, source).items():
            yield name, value.decode()
    known: dict[str, str] = {}
    for each in container.get("env", ()):
        if "valueFrom" in each:
            known[each["name"]] = _referenced(each["valueFrom"], identity, contents)
        else:
            known[each["name"]] = expanded(str(each.get("value", "")), {**identity.service_links, **known})
    yield from known.items()


def _referenced(source: Object, identity: Identity, contents: Contents) -> str:
    if "fieldRef" not in source:
        key = next(iter(source.values()))["key"]
        files = _files(contents, source)
        if key not in files:
            raise NotThere(f"{source} names a key that is not there")
        return files[key].decode()
    path = source["fieldRef"]["fieldPath"]
    if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return identity.labels.get(label[1], "")
    fields = {"status.podIP": identity.address, "metadata.name": identity.name, "metadata.namespace": NAMESPACE}
    if path not in fields:
        raise ValueError(f"the field {path} is not understood here")
    return fields[path]


def _files(contents: Contents, source: Object) -> Mapping[str, bytes]:
    """The files of the secret or config map that a source names, for a variable or for a volume."""
    for kind, objects in (("secret", contents.secrets), ("configMap", contents.config_maps)):
        for key in (kind, f"{kind}Ref", f"{kind}KeyRef"):
            if key in source:
                name = source[key].get("name") or source[key]["secretName"]
                if name not in objects:
                    raise NotThere(f"{kind} {name} is not there")
                return objects[name]
    raise ValueError(f"the source {sorted(source)} is not understood here")


def _plan_volume(volume: Object, contents: Contents) -> Volume:
    if "emptyDir" in volume:
        size = volume["emptyDir"].get("sizeLimit")
        return Volume(volume["name"], size_bytes=None if size is None else num_bytes(size))
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]
        if claim["claimName"] not in contents.claims:
            raise NotThere(f"claim {claim['claimName']} is not there")
        folder = contents.claims[claim["claimName"]]
        return Volume(volume["name"], claim=folder, is_read_only=claim.get("readOnly", False))
    files = _files(contents, volume)
    source: Mapping[str, Any] = volume.get("secret") or volume["configMap"]
    mode = source.get("defaultMode", 0o644)
    items = source.get("items") or [{"key": key, "path": key} for key in files]
    if missing := [item["key"] for item in items if item["key"] not in files]:
        raise NotThere(f"volume {volume['name']}: there is no key {', '.join(missing)}")
    return Volume(volume["name"], {item["path"]: (files[item["key"]], item.get("mode", mode)) for item in items})


def _plan_probe(probe: Object, ports: Mapping[str, int]) -> Probe:
    kinds = {
        "httpGet": ("http", "path", "/"),
        "tcpSocket": ("tcp", "", ""),
        "grpc": ("grpc", "service", ""),
        "exec": ("exec", "", ""),
    }
    (key,) = probe.keys() & kinds.keys()
    kind, name, default = kinds[key]
    port = probe[key].get("port", 0)
    return Probe(
        kind,
        ports[port] if isinstance(port, str) else port,
        probe[key].get(name, default),
        tuple(probe[key].get("command", ())),
        probe.get("initialDelaySeconds", 0),
        probe.get("periodSeconds", 10),
        probe.get("timeoutSeconds", 1),
        probe.get("failureThreshold", 3),
        probe.get("successThreshold", 1),
    )
