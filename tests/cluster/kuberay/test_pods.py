"""Pods and services of the chart's own RayService, as KubeRay makes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k8s.helm.chart import merged, render
from tests.cluster.images import image_of
from tests.cluster.kuberay.pods import head_address, head_pod, worker_pods
from tests.cluster.kuberay.services import application, check, head_service, serve_service
from tests.cluster.pod_plan import ContainerPlan, Contents, Identity, plan_pod
from tests.k8s.pods import Object, matches

CLUSTER = "outrider-coordinator-abcde"
RAY = {"coordinator": {"hosting": "ray", "replicas": {"min": 2}}, "tls": {"enabled": False}}
HEAD = "ulimit -n 65536; ray start --head  --block  --dashboard-agent-listen-port=52365  --dashboard-host=0.0.0.0 "
# Any file and key is there.
TOKEN = {CLUSTER: {"auth_token": b"token"}, "outrider-ray-redis": {"password": b"secret"}}


def service_of(**values: Any) -> dict[str, Any]:
    return next(each for each in render(merged(RAY, values)) if each["kind"] == "RayService")


def spec_of(**values: Any) -> dict[str, Any]:
    found: dict[str, Any] = service_of(**values)["spec"]["rayClusterConfig"]
    return found


def planned(template: Object, *, number: int = 0) -> ContainerPlan:
    """The plan of the Ray container, or of an init container before it."""
    objects = render(RAY)
    secrets = {
        each["metadata"]["name"]: {key: value.encode() for key, value in each["stringData"].items()}
        for each in objects
        if each["kind"] == "Secret"
    }
    config_maps = {
        each["metadata"]["name"]: {key: value.encode() for key, value in each["data"].items()}
        for each in objects
        if each["kind"] == "ConfigMap"
    }
    identity = Identity("pod-0", "10.244.0.9", template["metadata"]["labels"])
    plan = plan_pod(template["spec"], identity, Contents({**secrets, **TOKEN}, config_maps), image_of)
    return [*plan.containers, *plan.init_containers][number]


def test_the_head_has_the_command_that_kuberay_generates() -> None:
    plan = planned(head_pod(spec_of(), CLUSTER))
    assert plan.words == (
        *("/bin/bash", "-c", "--"),
        f"{HEAD} --memory={4 << 30}  --metrics-export-port=8080  --num-cpus=0 ",
    )
    assert plan.environment["KUBERAY_GEN_RAY_START_CMD"] == plan.words[-1].removeprefix("ulimit -n 65536; ")
    assert plan.environment["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert (plan.environment["RAY_AUTH_MODE"], plan.environment["RAY_AUTH_TOKEN"]) == ("token", "token")
    assert plan.environment["RAY_CLUSTER_NAME"] == CLUSTER
    assert "FQ_RAY_IP" not in plan.environment


def test_workers_join_the_head_by_its_service_and_wait_for_it() -> None:
    ((number, template),) = worker_pods(spec_of(), CLUSTER).values()
    address = f"{CLUSTER}-head-svc.outrider.svc.cluster.local"
    assert (number, head_address(CLUSTER)) == (2, address)
    plan = planned(template)
    assert plan.words[-1] == (
        f"ulimit -n 65536; ray start  --address={address}:6379  --block  --dashboard-agent-listen-port=52365 "
        f" --memory={2 << 30}  --metrics-export-port=8080  --num-cpus=1 "
    )
    assert (plan.environment["FQ_RAY_IP"], plan.environment["RAY_IP"]) == (address, f"{CLUSTER}-head-svc")
    assert plan.environment["RAY_SERVE_HAPROXY_METRICS_PORT"] == "9190"  # of the chart
    waiter = planned(template, number=1)
    assert f"ray health-check --address {address}:6379 " in waiter.words[-1]
    assert (waiter.memory_bytes, waiter.environment["RAY_AUTH_TOKEN"]) == (256 << 20, "token")


def test_shared_memory_has_the_size_of_the_memory() -> None:
    template = head_pod(spec_of(), CLUSTER)
    assert {"name": "shared-mem", "mountPath": "/dev/shm"} in template["spec"]["containers"][0]["volumeMounts"]
    assert template["spec"]["volumes"][-1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


def test_services_choose_the_head_and_the_workers_and_keep_their_ports() -> None:
    service, spec = service_of(), spec_of()
    head, ((_, worker),) = head_pod(spec, CLUSTER), worker_pods(spec, CLUSTER).values()
    check(service)
    serve = serve_service(service, CLUSTER)
    assert serve["metadata"]["name"] == "outrider-coordinator-serve-svc"
    assert [(each["name"], each["port"]) for each in serve["spec"]["ports"]] == [("serve", 8000), ("serve-grpc", 9000)]
    own = head_service(CLUSTER, CLUSTER, spec)
    for found, is_chosen in ((serve, (False, True)), (own, (True, False))):
        selector = {"matchLabels": found["spec"]["selector"]}
        assert tuple(matches(selector, each["metadata"]["labels"]) for each in (head, worker)) == is_chosen
    assert own["spec"]["clusterIP"] == "None"
    assert {"name": "dashboard", "port": 8265, "appProtocol": "tcp"} in own["spec"]["ports"]


def test_the_chart_keeps_the_labels_that_its_policies_choose() -> None:
    ((_, worker),) = worker_pods(spec_of(), CLUSTER).values()
    assert worker["metadata"]["labels"]["app.kubernetes.io/component"] == "coordinator"
    assert worker["metadata"]["labels"]["app.kubernetes.io/name"] == "kuberay"


def test_the_application_is_json_of_the_configuration() -> None:
    found = json.loads(application(service_of()))
    assert found["applications"][0]["deployments"][0]["num_replicas"] == 2
    assert found["http_options"] == {"host": "0.0.0.0", "port": 8000}


def test_fault_tolerance_gives_the_head_a_redis_and_workers_more_patience() -> None:
    spec = spec_of(coordinator={"ray": {"faultTolerance": {"enabled": True}}})
    head = planned(head_pod(spec, CLUSTER))
    assert " --redis-password=$REDIS_PASSWORD " in head.words[-1]
    assert head.environment["RAY_REDIS_ADDRESS"] == "outrider-ray-redis:6379"
    assert head.environment["REDIS_PASSWORD"] == "secret"
    ((_, worker),) = worker_pods(spec, CLUSTER).values()
    assert planned(worker).environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"enableInTreeAutoscaling": True}, "enableInTreeAutoscaling"),
        ({"authOptions": {"mode": "disabled"}}, "authOptions"),
        ({"headGroupSpec": {"rayStartParams": {}, "template": {}, "headService": {}}}, "headService"),
    ],
)
def test_a_cluster_that_is_not_understood_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        head_pod(spec_of() | change, CLUSTER)


def test_a_service_that_is_not_understood_is_refused() -> None:
    service = service_of()
    service["spec"]["upgradeStrategy"] = {"type": "None"}
    with pytest.raises(ValueError, match="NewCluster"):
        check(service)
