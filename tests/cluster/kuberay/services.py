"""The services that KubeRay makes for a RayService, and its application's configuration as JSON. Pure.

As ray-operator/controllers/ray/common/service.go and rayservice_controller.go (`updateServeDeployment`) of KubeRay
1.6.2.
"""

from __future__ import annotations

import json
from typing import Any, Final

import yaml

from tests.cluster.kuberay.pods import CLUSTER, SERVE
from tests.k8s.pods import Object

SERVICE_FIELDS: Final = frozenset(
    {
        *("excludeHeadPodFromServeSvc", "upgradeStrategy", "rayClusterDeletionDelaySeconds"),
        *("serveService", "serveConfigV2", "rayClusterConfig"),
    }
)


def check(service: Object) -> None:
    """Raises ValueError for a RayService that is not understood here."""
    spec = service["spec"]
    if unknown := sorted(spec.keys() - SERVICE_FIELDS):
        raise ValueError(f"fields of a RayService that are not understood here: {', '.join(unknown)}")
    if spec["upgradeStrategy"] != {"type": "NewCluster"} or not spec["excludeHeadPodFromServeSvc"]:
        raise ValueError("only RayServices with the strategy NewCluster whose head takes no requests run here")


def head_service(name: str, cluster: str, spec: Object) -> dict[str, Any]:
    """The head's service, for pods and for the operator. It has no address of its own: its name is the head's address.

    name: of the cluster, or of the RayService that has the cluster. spec: `rayClusterConfig`.
    """
    (container, *_) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    ports.setdefault("metrics", 8080)
    selector = {
        CLUSTER: cluster,
        "ray.io/node-type": "head",
        "ray.io/identifier": f"{cluster}-head",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-head-svc", "labels": selector},
        "spec": {
            "selector": selector,
            "ports": [{"name": each, "port": ports[each], "appProtocol": "tcp"} for each in sorted(ports)],
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
        },
    }


def serve_service(service: Object, cluster: str) -> dict[str, Any]:
    """The service that takes requests. Its ports are those of `serveService`, for the head's container names none."""
    (head, *_) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    if any(each["name"] == "serve" or each["name"].startswith("serve-") for each in head["ports"]):
        raise ValueError("ports named serve of a head that takes no requests are not understood here")
    name, given = service["metadata"]["name"], service["spec"]["serveService"]["spec"]
    labels = {
        "ray.io/originated-from-cr-name": name,
        "ray.io/originated-from-crd": "RayService",
        SERVE: f"{name}-serve",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-serve-svc", "labels": labels},
        "spec": {**given, "selector": {CLUSTER: cluster, SERVE: "true"}},
    }


def application(service: Object) -> str:
    """The body of the request that submits the application."""
    return json.dumps(yaml.safe_load(service["spec"]["serveConfigV2"]))
