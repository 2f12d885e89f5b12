"""Mistakes in the RayService of coordinators. Pure: rendered objects in, sentences out.

What Ray, Serve and HAProxy do where nothing is said is from their sources (Ray 2.60).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml

from coordinator.settings import METRICS_PORTS
from tests.k8s.pods import Object, Pod, matches, pods

DEFAULTS: Final = {
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": 30,
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": 120,
    "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": 100,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": 3600,
}
END_S: Final = 10
"""Seconds of a pod's termination grace period that are left for ending processes."""


def services(objects: Sequence[Object]) -> Iterator[Object]:
    return (each for each in objects if each["kind"] == "RayService")


def serve_configuration(service: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return found


def setting(pod: Pod, name: str) -> int:
    """The value of a variable of Ray in the pod's first container, or else Ray's default."""
    variables = {each["name"]: each.get("value") for each in pod.spec["containers"][0].get("env", ())}
    return int(variables.get(name, DEFAULTS[name]))


def ray_pods(objects: Sequence[Object]) -> Iterator[Pod]:
    return (pod for pod in pods(objects) if pod.owner.startswith("RayService/"))


def nodes_that_end_too_soon(pod: Pod, needed_s: float, grace_s: float) -> Iterator[str]:
    """A node that is told to end waits for its replicas, and then ends them. All of it has to fit into the grace."""
    drain_s = setting(pod, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop", {})
    before_s = hook.get("sleep", {}).get("seconds", 0)
    if drain_s < needed_s:
        yield f"{pod.owner}: Ray ends its replicas after {drain_s} s, and they may need {needed_s:g}"
    if before_s + drain_s + END_S > grace_s:
        yield f"{pod.owner} is ended after {grace_s} s, and waits for {before_s} and {drain_s} before it ends itself"


def heads_that_wait_for_nobody(objects: Sequence[Object]) -> Iterator[str]:
    """A head that is told to end drains as any node, and Serve's controller on it never ends."""
    for pod in ray_pods(objects):
        if pod.owner.endswith(" head") and setting(pod, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") > 0:
            yield f"{pod.owner} waits for Serve's controller when it has to end, until it is killed"


def ports_that_haproxy_has(objects: Sequence[Object]) -> Iterator[str]:
    """Replicas take the first free port for their metrics: one that HAProxy has moves them to where nobody looks."""
    for service in services(objects):
        serve = serve_configuration(service)
        first = serve["applications"][0]["args"]["metrics_port"]
        for pod in ray_pods(objects):
            taken = {
                "metrics": setting(pod, "RAY_SERVE_HAPROXY_METRICS_PORT"),
                "statistics": setting(pod, "RAY_SERVE_HAPROXY_STATS_PORT"),
                "HTTP": serve["http_options"]["port"],
                "gRPC": serve["grpc_options"]["port"],
            }
            for what, port in taken.items():
                if port in range(first, first + METRICS_PORTS):
                    yield f"{pod.owner}: HAProxy has port {port} for {what}, which is a replica's"


def limits_that_cut_texts_off(objects: Sequence[Object], longest_s: float) -> Iterator[str]:
    """longest_s: the longest generation; an answer in one piece says nothing before its end."""
    for service in services(objects):
        (deployment,) = serve_configuration(service)["applications"][0]["deployments"]
        num_requests = most_replicas(deployment) * deployment["max_ongoing_requests"]
        for pod in ray_pods(objects):
            for name in ("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"):
                if setting(pod, name) <= longest_s:
                    yield f"{pod.owner}: {name} is {setting(pod, name)}, and a text may take {longest_s:g} s"
            num_streams = setting(pod, "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS")
            if num_streams < num_requests:
                yield f"{pod.owner}: {num_streams} requests on a connection, where replicas take {num_requests}"


def replicas_without_room(objects: Sequence[Object]) -> Iterator[str]:
    """Nobody makes pods for replicas: those that find none wait for ever, and KubeRay for them."""
    for service in services(objects):
        (deployment,) = serve_configuration(service)["applications"][0]["deployments"]
        room = 0
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
            (container,) = group["template"]["spec"]["containers"]
            num_cpus = cpus(container["resources"]["requests"]["cpu"])  # KubeRay rounds up, too
            fitting = num_cpus // deployment["ray_actor_options"]["num_cpus"]
            room += group["replicas"] * min(fitting, deployment.get("max_replicas_per_node", fitting))
        wanted = most_replicas(deployment)
        if wanted != room:
            yield f"RayService/{service['metadata']['name']}: {wanted} replicas in pods that hold {room}"


def most_replicas(deployment: Mapping[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config", {})
    return int(scaling.get("max_replicas", deployment.get("num_replicas", 1)))


def cpus(quantity: str) -> int:
    """Whole ones, rounded up."""
    return math.ceil(int(quantity.removesuffix("m")) / 1000 if quantity.endswith("m") else float(quantity))


def budgets_that_refuse_every_eviction(objects: Sequence[Object]) -> Iterator[str]:
    """A RayCluster has no scale, from which `maxUnavailable` and percentages are computed."""
    for each in objects:
        if each["kind"] != "PodDisruptionBudget":
            continue
        name, spec = f"PodDisruptionBudget/{each['metadata']['name']}", each["spec"]
        for pod in ray_pods(objects):
            if not matches(spec["selector"], pod.labels):
                continue
            (number,) = [
                group["replicas"]
                for service in services(objects)
                for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
                if pod.owner.endswith(f" {group['groupName']}")
            ]
            least = spec.get("minAvailable")
            if not isinstance(least, int) or least >= number:
                yield f"{name}: no pod of {pod.owner} may be evicted"


def certificates_that_name_no_address(objects: Sequence[Object]) -> Iterator[str]:
    """Ray's processes dial each other by the pods' addresses and check the names, which certificates cannot have."""
    for pod in ray_pods(objects):
        for variable in pod.spec["containers"][0].get("env", ()):
            if variable["name"] == "RAY_USE_TLS":
                yield f"{pod.owner}: Ray would not find its own processes with RAY_USE_TLS"


def memories_that_are_not_there(objects: Sequence[Object], secrets: Sequence[str]) -> Iterator[str]:
    """Sentences about what is missing of the Redis of Ray's head, without which the head does not start.

    secrets: names of those that the installer creates.
    """
    ports = {
        (each["metadata"]["name"], port["port"])
        for each in objects
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
    }
    for service in services(objects):
        options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        if options is None:
            continue
        host, _, port = options["redisAddress"].partition(":")
        name = f"RayService/{service['metadata']['name']}"
        if (host, int(port)) not in ports:
            yield f"{name}: there is no service {options['redisAddress']}"
        source = options.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef", {})
        if source.get("name") not in secrets:
            yield f"{name}: no secret has the password of {host}"
