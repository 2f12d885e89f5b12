"""A node's plan for the chart's own pods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from k8s.helm.chart import render
from tests.cluster.images import image_of
from tests.cluster.pod_plan import (
    ContainerPlan,
    Contents,
    Identity,
    NotThere,
    PodPlan,
    expanded,
    num_bytes,
    plan_pod,
    service_links,
)
from tests.k8s.pods import NAME, pods

OBJECTS = render({"tls": {"enabled": True}})
FILES = {"tls.crt": b"certificate", "tls.key": b"key", "ca.crt": b"authority"}
CONTENTS = Contents(
    {
        **{
            each["metadata"]["name"]: {key: value.encode() for key, value in each["stringData"].items()}
            for each in OBJECTS
            if each["kind"] == "Secret" and "stringData" in each
        },
        **{f"outrider-{part}-tls": FILES for part in ("coordinator", "target", "draft", "redis")},
    },
    {
        each["metadata"]["name"]: {key: value.encode() for key, value in each["data"].items()}
        for each in OBJECTS
        if each["kind"] == "ConfigMap"
    },
)


def spec_of(component: str) -> dict[str, Any]:
    return copy.deepcopy(dict(next(pod.spec for pod in pods(OBJECTS) if pod.labels[NAME] == component)))


def plan_of(component: str, contents: Contents = CONTENTS, links: Mapping[str, str] | None = None) -> PodPlan:
    identity = Identity(f"{component}-0", "10.244.0.9", {"topology.kubernetes.io/zone": "north"}, links or {})
    return plan_pod(spec_of(component), identity, contents, image_of)


def only(plan: PodPlan) -> ContainerPlan:
    (container,) = plan.containers
    return container


def test_a_worker_runs_the_images_entrypoint_with_the_pods_own_address_and_name() -> None:
    container = only(plan_of("target"))
    assert container.words[:3] == ("python", "-m", "target_worker")
    assert "--announce=10.244.0.9" in container.words
    assert "--worker-id=target-0" in container.words
    assert container.environment["OUTRIDER_ZONE"] == "north"
    assert container.environment["HF_HUB_OFFLINE"] == "1"  # of the image
    assert (container.user, container.group, container.memory_bytes) == (10001, 10001, 2 << 30)


def test_a_command_takes_the_place_of_the_images_entrypoint() -> None:
    container = only(plan_of("test"))
    assert container.words[:2] == ("sh", "-c")
    assert container.environment["OUTRIDER_API_KEY"] == CONTENTS.secrets["outrider-first-api-key"]["key"].decode()


def test_volumes_have_the_files_that_are_named_with_their_modes() -> None:
    volumes = {volume.name: volume for volume in plan_of("draft").volumes}
    url = CONTENTS.secrets["outrider-redis"]["url-draft"]
    assert volumes["redis"].files == {"url": (url, 0o440)}
    assert volumes["tls"].files == {name: (content, 0o440) for name, content in FILES.items()}
    assert (volumes["scratch"].files, volumes["scratch"].size_bytes) == (None, 2 << 30)
    mounts = {mount.path: mount for mount in only(plan_of("draft")).mounts}
    assert mounts["/etc/outrider/tls"].is_read_only
    assert not mounts["/tmp"].is_read_only


def test_a_config_map_has_the_usual_mode() -> None:
    volumes = {volume.name: volume for volume in plan_of("coordinator").volumes}
    assert {mode for _, mode in (volumes["models-file"].files or {}).values()} == {0o644}


def test_claims_are_folders_that_are_read_only_where_one_of_the_two_says_so(tmp_path: Path) -> None:
    spec = spec_of("target")
    spec["volumes"].append({"name": "models", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}})
    spec["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": "/models"})
    identity = Identity("target-0", "10.244.0.9", {})
    with pytest.raises(NotThere, match="weights"):
        plan_pod(spec, identity, CONTENTS, image_of)
    contents = Contents(CONTENTS.secrets, CONTENTS.config_maps, {"weights": tmp_path})
    plan = plan_pod(spec, identity, contents, image_of)
    assert plan.volumes[-1].claim == tmp_path
    assert only(plan).mounts[-1].is_read_only


def test_containers_that_run_before_the_others_are_planned_alike() -> None:
    spec = spec_of("target")
    spec["initContainers"] = [{**spec["containers"][0], "name": "before", "args": ["command_line", "fetch"]}]
    plan = plan_pod(spec, Identity("a", "10.244.0.2", {}), CONTENTS, image_of)
    (before,) = plan.init_containers
    assert (before.name, before.words[:3]) == ("before", ("python", "-m", "command_line"))
    assert before.environment == only(plan).environment


def test_probes_ask_the_ports_that_containers_name() -> None:
    probes = only(plan_of("coordinator")).probes
    assert (probes["readiness"].kind, probes["readiness"].port, probes["readiness"].target) == (
        "http",
        8000,
        "/-/healthz",
    )
    probes = only(plan_of("target")).probes
    assert (probes["liveness"].kind, probes["liveness"].port, probes["liveness"].target) == ("grpc", 50052, "liveness")
    probe = only(plan_of("redis")).probes["startup"]
    assert (probe.kind, probe.words[0], probe.num_failures_max) == ("exec", "redis-cli", 60)


def test_a_secret_that_is_not_there_yet_is_named() -> None:
    with pytest.raises(NotThere, match="outrider-target-tls"):
        plan_of("target", Contents({"outrider-redis": CONTENTS.secrets["outrider-redis"]}))
    with pytest.raises(NotThere, match="url-target"):
        plan_of("target", Contents({**CONTENTS.secrets, "outrider-redis": {}}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"securityContext": {"runAsUser": 1, "sysctls": []}}, "sysctls"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"initContainers": [{"name": "a", "restartPolicy": "Always"}]}, "restartPolicy"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        plan_pod(spec_of("target") | change, Identity("a", "10.244.0.2", {}), CONTENTS, image_of)


def test_a_container_with_more_rights_is_refused() -> None:
    spec = spec_of("target")
    spec["containers"][0]["securityContext"]["capabilities"] = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    with pytest.raises(ValueError, match="restricted"):
        plan_pod(spec, Identity("a", "10.244.0.2", {}), CONTENTS, image_of)


def test_services_are_named_by_variables_that_a_pods_own_variables_override() -> None:
    links = service_links({"outrider-redis": ("10.96.0.2", {"redis": 6379})})
    assert links["OUTRIDER_REDIS_PORT"] == "tcp://10.96.0.2:6379"
    assert links["OUTRIDER_REDIS_SERVICE_PORT_REDIS"] == "6379"
    assert only(plan_of("target", links=links)).environment["OUTRIDER_REDIS_SERVICE_HOST"] == "10.96.0.2"
    assert only(plan_of("target", links={"OUTRIDER_ZONE": "south"})).environment["OUTRIDER_ZONE"] == "north"


def test_names_are_expanded_as_kubernetes_does() -> None:
    assert expanded("a=$(A) b=$(B) $$(A)", {"A": "1"}) == "a=1 b=$(B) $(A)"


def test_quantities() -> None:
    assert (num_bytes("64Mi"), num_bytes("2Gi"), num_bytes("7")) == (64 << 20, 2 << 30, 7)
    with pytest.raises(ValueError, match="1T"):
        num_bytes("1T")


def test_images_have_their_own_packages_and_their_models() -> None:
    worker = image_of("registry.example.com/outrider/outrider-worker:0.1.0-demo")
    coordinator = image_of("registry.example.com/outrider/outrider-coordinator:0.1.0")
    assert {"/app/target_worker", "/app/draft_worker", "/models/target", "/models/draft"} <= worker.folders.keys()
    assert "/app/coordinator" in coordinator.folders
    assert not {"/app/coordinator"} & worker.folders.keys()
    assert not {"/app/target_worker", "/models/target"} & coordinator.folders.keys()
    assert all(folder.is_dir() for folder in (*worker.folders.values(), *coordinator.folders.values()))
    with pytest.raises(ValueError, match="nginx"):
        image_of("nginx:1")
