"""The pods that KubeRay makes of a RayService, as objects. Pure.

As ray-operator/controllers/ray/common/pod.go of KubeRay 1.6.2 does it: `DefaultHeadPodTemplate`,
`DefaultWorkerPodTemplate`, `BuildPod` and what they call, with the operator's settings as its Helm chart leaves them.
Names are those of utils/util.go and utils/constant.go. Only the fields that the chart uses are understood; another one
raises ValueError.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.cluster.pod_plan import NAMESPACE, num_bytes
from tests.k8s.pods import Object

VERSION: Final = "v1.6.2"
GCS_PORT: Final = 6379
CLUSTER: Final = "ray.io/cluster"
SERVE: Final = "ray.io/serve"
TOKEN_KEY: Final = "auth_token"
HEAD_GROUP: Final = "headgroup"
_WAITER: Final = "wait-gcs-ready"
CLUSTER_FIELDS: Final = frozenset(
    {"rayVersion", "authOptions", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs"}
)
_FLAGS_WITH_VALUES: Final = ("log-color", "include-dashboard")
_WAIT: Final = """
					SECONDS=0
					while true; do
						if (( SECONDS <= 120 )); then
							if ray health-check --address {address} > /dev/null 2>&1; then
								echo "GCS is ready."
								break
							fi
							echo "$SECONDS seconds elapsed: Waiting for GCS to be ready."
						else
							if ray health-check --address {address}; then
								echo "GCS is ready. Any error messages above can be safely ignored."
								break
							fi
							echo "$SECONDS seconds elapsed: Still waiting for GCS to be ready. For troubleshooting, refer to the FAQ at https://docs.ray.io/en/master/cluster/kubernetes/troubleshooting.html."
						fi
						sleep 5
					done
				"""  # noqa: E501 - word for word


def head_address(cluster: str) -> str:
    """The name of a cluster's head service, as its pods know it."""
    return f"{cluster}-head-svc.{NAMESPACE}.svc.cluster.local"


def head_pod(spec: Object, cluster: str) -> dict[str, Any]:
    """The template of a cluster's head. spec: `rayClusterConfig`."""
    group = _checked(spec)["headGroupSpec"]
    _check(group, {"rayStartParams", "template"}, "headGroupSpec")
    template = _labelled(group["template"], cluster, "head", HEAD_GROUP)
    params, (container, *_) = dict(group["rayStartParams"]), template["spec"]["containers"]
    params.setdefault("dashboard-host", "0.0.0.0")
    _set_missing(params)
    if options := spec.get("gcsFaultToleranceOptions"):
        _check(options, {"redisAddress", "redisPassword"}, "gcsFaultToleranceOptions")
        # KubeRay takes the object's unique id.
        _set(container, "RAY_external_storage_namespace", cluster)
        container["env"].append({"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]})
        params["redis-password"] = "$REDIS_PASSWORD"
        container["env"].append({"name": "REDIS_PASSWORD", **options["redisPassword"]})
    _finish(template, spec, cluster, params, is_head=True)
    return template


def worker_pods(spec: Object, cluster: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """For each worker group by name: how many pods it has, and their template. spec: `rayClusterConfig`."""
    return {group["groupName"]: _workers(spec, cluster, group) for group in _checked(spec)["workerGroupSpecs"]}


def _workers(spec: Object, cluster: str, group: Object) -> tuple[int, dict[str, Any]]:
    counts = ("replicas", "minReplicas", "maxReplicas")
    _check(group, {"groupName", *counts, "rayStartParams", "template"}, "worker group")
    template = _labelled(group["template"], cluster, "worker", group["groupName"])
    (container, *_) = template["spec"]["containers"]
    address = f"{head_address(cluster)}:{GCS_PORT}"
    waiter = {
        "name": _WAITER,
        "image": container["image"],
        "imagePullPolicy": container["imagePullPolicy"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [_WAIT.format(address=address)],
        "securityContext": copy.deepcopy(container["securityContext"]),
        "env": copy.deepcopy(container["env"]),
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": {kind: {"cpu": "200m", "memory": "256Mi"} for kind in ("limits", "requests")},
    }
    template["spec"].setdefault("initContainers", []).append(waiter)
    params = dict(group["rayStartParams"])
    params.setdefault("address", address)
    _set_missing(params)
    if spec.get("gcsFaultToleranceOptions"):
        _set(container, "RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    _finish(template, spec, cluster, params, is_head=False)
    return min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"]), template


def _checked(spec: Object) -> Object:
    _check(spec, CLUSTER_FIELDS, "rayClusterConfig")
    return spec


def _check(given: Object, known: set[str] | frozenset[str], what: str) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"fields of a {what} that are not understood here: {', '.join(unknown)}")


def _labelled(template: Object, cluster: str, kind: str, group: str) -> dict[str, Any]:
    """A copy with KubeRay's labels; others than these three the template may override (`labelPod`)."""
    made: dict[str, Any] = copy.deepcopy(dict(template))
    fixed = {CLUSTER: cluster, "ray.io/node-type": kind, "ray.io/group": group}
    free = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    # Readiness decides over workers; a head that takes requests would get the label from its proxy's health.
    serves = {SERVE: "true" if kind == "worker" else "false"}
    made["metadata"]["labels"] = free | made["metadata"]["labels"] | fixed | serves
    return made


def _set_missing(params: dict[str, str]) -> None:
    params.setdefault("metrics-export-port", "8080")
    params["block"] = "true"
    params.setdefault("dashboard-agent-listen-port", "52365")


def _finish(template: dict[str, Any], spec: Object, cluster: str, params: dict[str, str], *, is_head: bool) -> None:
    """Adds the token, the shared memory, the command and the variables."""
    pod = template["spec"]
    container, waiters = pod["containers"][0], pod.get("initContainers", [])
    if spec.get("authOptions", {"mode": "disabled"}) != {"mode": "token"}:
        raise ValueError(f"only authOptions with mode token are understood here: {spec.get('authOptions')}")
    token = {"secretKeyRef": {"name": cluster, "key": TOKEN_KEY}}
    for each in (container, *(each for each in waiters if each["name"] == _WAITER)):
        _set(each, "RAY_AUTH_MODE", "token")
        each["env"].append({"name": "RAY_AUTH_TOKEN", "valueFrom": token})
    resources = container["resources"]
    memory = resources["limits"]["memory"]
    pod["volumes"].append({"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": memory}})
    container["volumeMounts"].append({"name": "shared-mem", "mountPath": "/dev/shm"})
    cpus = resources["limits"].get("cpu") or resources["requests"].get("cpu")
    if cpus is not None:
        params.setdefault("num-cpus", str(_num_cpus(cpus)))
    params.setdefault("memory", str(num_bytes(memory)))
    start = f"ray start {'--head ' if is_head else ''}{_flags(params)}"
    if "command" in container or "args" in container:
        raise ValueError("a Ray container with a command of its own is not understood here")
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"ulimit -n 65536; {start}"]
    names = {"FQ_RAY_IP": head_address(cluster), "RAY_IP": f"{cluster}-head-svc"}
    for each in waiters:
        each.setdefault("env", []).extend({"name": name, "value": value} for name, value in names.items())
    _set_variables(container, start, {} if is_head else names)
    if is_head:
        tags = f"kuberay_version={VERSION};kuberay_crd=RayService"
        container["env"].append({"name": "RAY_USAGE_STATS_EXTRA_TAGS", "value": tags})
    _set(container, "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "1")
    if missing := {"livenessProbe", "readinessProbe"} - container.keys():
        raise ValueError(f"KubeRay's own probes are not understood here: {', '.join(sorted(missing))}")


def _set_variables(container: dict[str, Any], start: str, names: Mapping[str, str]) -> None:
    """As `setContainerEnvVars` does; `names` is what only workers get."""
    container["env"] += [{"name": name, "value": value} for name, value in names.items()]
    fields = {
        "RAY_CLUSTER_NAME": f"metadata.labels['{CLUSTER}']",
        "RAY_CLUSTER_NAMESPACE": "metadata.namespace",
        "RAY_CLOUD_INSTANCE_ID": "metadata.name",
        "RAY_NODE_TYPE_NAME": "metadata.labels['ray.io/group']",
    }
    for name, path in fields.items():
        container["env"].append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    container["env"].append({"name": "KUBERAY_GEN_RAY_START_CMD", "value": start})
    _set(container, "RAY_PORT", str(GCS_PORT))
    _set(container, "RAY_timeout_ms_task_wait_for_death_info", "0")
    _set(container, "RAY_gcs_server_request_timeout_seconds", "5")
    _set(container, "RAY_SERVE_KV_TIMEOUT_S", "5")
    _set(container, "RAY_ADDRESS", f"{names.get('FQ_RAY_IP', '127.0.0.1')}:{GCS_PORT}")
    _set(container, "RAY_USAGE_STATS_KUBERAY_IN_USE", "1")


def _set(container: dict[str, Any], name: str, value: str) -> None:
    """Adds a variable that the container does not have yet."""
    if all(each["name"] != name for each in container["env"]):
        container["env"].append({"name": name, "value": value})


def _flags(params: Mapping[str, str]) -> str:
    """Flags in KubeRay's form (`convertParamMap`): sorted, with a space before and after each."""
    flags = ""
    for name, value in sorted(params.items()):
        if value.lower() not in ("true", "false") or name in _FLAGS_WITH_VALUES:
            flags += f" --{name}={value} "
        elif value.lower() == "true":
            flags += f" --{name} "
    return flags


def _num_cpus(quantity: str) -> int:
    """Whole processors, rounded up as Kubernetes' `Quantity.Value` does. Raises ValueError."""
    found = re.fullmatch(r"(\d+)(m?)", str(quantity))
    if found is None:
        raise ValueError(f"the quantity {quantity} is not understood here")
    return -(-int(found[1]) // 1000) if found[2] else int(found[1])
