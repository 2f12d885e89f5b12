"""Every overlay renders, is valid to the letter, and has none of the mistakes that a schema does not know."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray._private import ray_constants
from ray.serve._private import constants as serve_constants
from ray.serve.schema import ServeDeploySchema
from torch.distributed.run import get_args_parser

from coordinator.__main__ import parse as parse_coordinator
from coordinator.hosting.app import application
from draft_worker.__main__ import parse_arguments as parse_draft
from draft_worker.memory.__main__ import parse_arguments as parse_memory
from k8s.helm.chart import PRESETS, merged, preset, render
from target_worker.__main__ import parse_arguments as parse_target
from tests.k8s import coordinator_rules, rules
from tests.k8s.custom_resources import check_custom_resource
from tests.k8s.pods import NAME, pods

K8S = Path(__file__).parents[2] / "k8s"
KUBERNETES_VERSION = "1.34"
SECRETS = ("hugging-face", "outrider-gateway-tls")
CLAIMS = ("models",)
GENERATION_S = 3600.0  # the longest one, `CoordinatorSettings.deadline_max_s`
LONGEST_S = {
    "target": GENERATION_S,
    "target-follower": GENERATION_S,
    "coordinator": GENERATION_S,
    "draft": 30.0,
    "memory": 10.0,
}
CUSTOM = (
    "ray.io/",
    "keda.sh/",
    "leaderworkerset.x-k8s.io/",
    "gateway.networking.k8s.io/",
    "monitoring.coreos.com/",
    "cert-manager.io/",
)

SECURED = {
    "tls": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "gateway": {"enabled": True, "className": "envoy"},
    "monitoring": {"enabled": True},
}
INSTALLATIONS = {
    "demo": preset("demo"),
    "demo, open": {"tls": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "demo, secured": SECURED,
    "llama-70b": merged(preset("llama-70b"), SECURED),
    "llama-70b, plain": merged(
        merged(preset("llama-70b"), SECURED),
        {"coordinator": {"hosting": "plain", "autoscaling": {"enabled": True}, "replicas": {"min": 2, "max": 6}}},
    ),
    "llama-405b": merged(preset("llama-405b"), SECURED),
    "draft-pool": merged(merged(preset("draft-pool"), SECURED), {"autoscaling": {"enabled": True}}),
    "heads and memory": merged(
        SECURED,
        {
            "pairs": [
                {
                    "name": "eagle",
                    "servedModelName": "eagle",
                    "target": {"model": "hf://org/large@1234567", "draftHead": "hf://org/eagle3@1234567"},
                    "draft": {"model": "hf://org/eagle3@1234567"},
                    "memory": {"zones": ["a", "b"], "replicas": 2},
                },
                {
                    "name": "medusa",
                    "servedModelName": "medusa",
                    "target": {"model": "/models/large", "draftHead": "/models/medusa"},
                    "memory": {},
                },
                {
                    "name": "early",
                    "servedModelName": "early",
                    "target": {"model": "/models/large"},
                    "draft": {"earlyExitLayer": 4},
                },
            ],
            "coordinator": {"memoryTenants": ["search"]},
            "models": {"claim": "models"},
        },
    ),
    "parts of GPUs": {
        "pairs": [
            {
                "name": "small",
                "servedModelName": "small",
                "target": {
                    "model": "/models/a",
                    "device": "cuda",
                    "gpu": {"count": 2, "deviceClass": "gpu.nvidia.com"},
                },
                "draft": {
                    "model": "/models/b",
                    "device": "cuda",
                    "gpu": {"count": 1, "resource": "nvidia.com/mig-1g.10gb"},
                },
            },
            {"name": "plain", "servedModelName": "plain", "target": {"model": "/models/c"}},
        ],
        "models": {"claim": "models"},
    },
}


def rendered(name: str) -> list[dict[str, Any]]:
    return render(INSTALLATIONS[name])


def check(each: dict[str, Any]) -> None:
    """Raises AssertionError or ValidationError."""
    if each["apiVersion"].startswith(CUSTOM):
        check_custom_resource(each)
    else:
        kubernetes_validate.validate(each, KUBERNETES_VERSION, strict=True)


def broken(objects: Sequence[dict[str, Any]]) -> list[str]:
    return rules.broken(objects, secrets=SECRETS, claims=CLAIMS, longest_s=LONGEST_S)


@pytest.fixture(scope="module", params=INSTALLATIONS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(request.param)


@pytest.fixture(scope="module", params=["llama-70b", "llama-405b"])
def on_ray(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """An installation whose coordinators run on Ray Serve."""
    return rendered(request.param)


@pytest.fixture(scope="module", params=["demo, secured", "llama-70b"])
def secured(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """An installation with certificates, policies and a gateway, of either hosting."""
    return rendered(request.param)


@pytest.fixture(scope="module")
def production() -> list[dict[str, Any]]:
    """An installation on Ray that has a gateway, policies, certificates and autoscalers."""
    return rendered("llama-70b")


def test_every_object_is_valid_to_the_letter(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        check(each)


def test_nothing_is_asked_for_that_is_not_there(objects: list[dict[str, Any]]) -> None:
    assert broken(objects) == []


def test_serve_reads_its_configuration(on_ray: list[dict[str, Any]]) -> None:
    (service,) = [each for each in on_ray if each["kind"] == "RayService"]
    found = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = found.applications
    assert application.import_path == "coordinator.hosting.app:application"
    (deployment,) = application.deployments
    assert isinstance(deployment.graceful_shutdown_timeout_s, float | int)
    assert deployment.graceful_shutdown_timeout_s >= GENERATION_S
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["http"], ports["grpc"]) == (found.http_options.port, found.grpc_options.port)


def test_a_coordinator_would_start_with_its_arguments_and_environment(
    on_ray: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = first(on_ray, "RayService", "coordinator")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    for variable in container_of(on_ray, "coordinator")["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    url = tmp_path / "url"
    url.write_text("redis://:secret@redis:6379/0")
    monkeypatch.setenv("OUTRIDER_REDIS_URL_FILE", str(url))
    application(config.applications[0].args)


def test_a_plain_coordinator_would_start_with_its_arguments_and_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects = rendered("llama-70b, plain")
    container = container_of(objects, "coordinator")
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    (tmp_path / "url").write_text("redis://:secret@redis:6379/0")
    monkeypatch.setenv("OUTRIDER_REDIS_URL_FILE", str(tmp_path / "url"))
    settings_file = tmp_path / "settings.json"
    settings_file.write_text(first(objects, "ConfigMap", "coordinator")["data"]["settings.json"])
    role, *words = container["args"]
    assert role == "coordinator"
    settings, listen = parse_coordinator(
        [re.sub("^--settings=.*", f"--settings={settings_file}", word) for word in words]
    )
    assert (settings.models_file, settings.deadline_max_s) == ("/etc/outrider/models/models.toml", GENERATION_S)
    assert (settings.metrics_port, settings.metrics_host) == (9100, "::")
    assert (listen.hosting, listen.drain_grace_s) == ("plain", GENERATION_S)


def test_both_hostings_have_the_same_settings(on_ray: list[dict[str, Any]]) -> None:
    serve = yaml.safe_load(first(on_ray, "RayService", "coordinator")["spec"]["serveConfigV2"])
    plain = json.loads(first(rendered("llama-70b, plain"), "ConfigMap", "coordinator")["data"]["settings.json"])
    assert serve["applications"][0]["args"] == plain | {"log_path": "/proc/1/fd/2"}


def test_ray_reads_the_variables_that_it_is_given(on_ray: list[dict[str, Any]]) -> None:
    given = {each["name"] for each in container_of(on_ray, "coordinator")["env"]}
    of_serve = {name for name in given if name.startswith("RAY_SERVE_")}
    assert len(of_serve) > 5
    assert [name for name in of_serve if not hasattr(serve_constants, name)] == []


def test_what_ray_does_by_itself_is_what_rules_take_it_for() -> None:
    for name, value in coordinator_rules.DEFAULTS.items():
        module = serve_constants if name.startswith("RAY_SERVE_") else ray_constants
        assert getattr(module, name) == value, name


def test_workers_know_the_flags_that_they_are_given(objects: list[dict[str, Any]]) -> None:
    parsers = {"target": parse_target, "draft": parse_draft, "memory": parse_memory}
    modules = {"target": "target_worker", "draft": "draft_worker", "memory": "draft_worker.memory"}
    names = {pod.labels[NAME] for pod in pods(objects)}
    checked = set()
    for pod in pods(objects):
        name = pod.labels[NAME]
        if name in parsers:
            (container,) = pod.spec["containers"]
            role, *words = container["args"]
            assert role == modules[name]
            given = parsers[name]([word.replace("$(POD_IP)", "10.0.0.1") for word in words])
            assert given.drain_grace_s < pod.spec["terminationGracePeriodSeconds"]
            named = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert (given.port, given.metrics_port) == (named["grpc"], named["metrics"])
            checked.add(name)
    assert checked >= ({"target", "draft"} if "coordinator" in names else {"draft"})
    assert checked == names & set(parsers)


def test_ranks_of_a_group_have_one_command_line_that_torchrun_reads() -> None:
    objects = rendered("llama-405b")
    group = first(objects, "LeaderWorkerSet", "target")["spec"]["leaderWorkerTemplate"]
    (leader,), (follower,) = (group[kind]["spec"]["containers"] for kind in ("leaderTemplate", "workerTemplate"))
    for what in ("image", "command", "args", "env", "resources"):
        assert leader[what] == follower[what]
    names = {each["name"] for each in leader["env"]} | {
        "LWS_GROUP_SIZE",  # what the controller sets
        "LWS_LEADER_ADDRESS",
        "LWS_WORKER_INDEX",
    }
    words = [*leader["command"][1:], *leader["args"]]
    assert set(re.findall(r"\$\((\w+)\)", " ".join(words))) <= names
    values = {
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_LEADER_ADDRESS": "target-0.target.outrider",
        "LWS_WORKER_INDEX": "1",
    }
    values |= {each["name"]: each["value"] for each in leader["env"] if "value" in each}
    expanded = [re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], "x"), word) for word in words]
    given = get_args_parser().parse_args(expanded)
    assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", 1, "8")
    assert (given.master_addr, given.module) == ("target-0.target.outrider", True)
    assert given.training_script == "target_worker"
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == given.nproc_per_node


def first(objects: Sequence[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The object of this kind whose name, without that of the release and of the pair, is this one."""
    own = re.compile(rf"outrider-(?:(?:demo|llama-70b|llama-405b|small)-)?{name}|{name}")
    return next(each for each in objects if each["kind"] == kind and own.fullmatch(each["metadata"]["name"]))


def spec_of(objects: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """The spec of the pods with this name, whatever creates them; tests modify it in place."""
    found = next(pod for pod in pods(objects) if pod.labels[NAME] == name)
    assert isinstance(found.spec, dict)
    return found.spec


def container_of(objects: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = spec_of(objects, name)["containers"][0]
    return found


def rename_port(objects: list[dict[str, Any]]) -> None:
    for port in container_of(objects, "target")["ports"]:
        port["containerPort"] += 1000


def forget_secret(objects: list[dict[str, Any]]) -> None:
    volumes = spec_of(objects, "draft")["volumes"]
    next(each for each in volumes if each["name"] == "redis")["secret"]["secretName"] = "outrider-rediss"


def forget_keys(objects: list[dict[str, Any]]) -> None:
    variables = container_of(objects, "coordinator")["env"]
    variables.remove(next(each for each in variables if each["name"] == "OUTRIDER_API_KEYS"))


def open_rays_ports(objects: list[dict[str, Any]]) -> None:
    del first(objects, "RayService", "coordinator")["spec"]["rayClusterConfig"]["authOptions"]


def say_nothing_of_certificates(objects: list[dict[str, Any]]) -> None:
    words = container_of(objects, "target")["args"]
    words[:] = [word for word in words if not word.startswith(("--insecure", "--tls-dir"))]


def forget_config(objects: list[dict[str, Any]]) -> None:
    objects[:] = [each for each in objects if each["kind"] != "ConfigMap"]


def select_others(objects: list[dict[str, Any]]) -> None:
    first(objects, "Service", "draft-workers")["spec"]["selector"][NAME] = "drafts"


def budget_for_nobody(objects: list[dict[str, Any]]) -> None:
    first(objects, "PodDisruptionBudget", "draft")["spec"]["selector"]["matchLabels"] = {"app": "draft"}


def hurry(objects: list[dict[str, Any]]) -> None:
    del spec_of(objects, "target")["terminationGracePeriodSeconds"]


def be_root(objects: list[dict[str, Any]]) -> None:
    del spec_of(objects, "draft")["securityContext"]["runAsNonRoot"]


def write_everywhere(objects: list[dict[str, Any]]) -> None:
    del container_of(objects, "target")["securityContext"]["readOnlyRootFilesystem"]


def take_all_memory(objects: list[dict[str, Any]]) -> None:
    del container_of(objects, "target")["resources"]["limits"]


def mount_what_is_not_there(objects: list[dict[str, Any]]) -> None:
    container_of(objects, "target")["volumeMounts"].append({"name": "cache", "mountPath": "/cache"})


def leave_probes_to_kuberay(objects: list[dict[str, Any]]) -> None:
    del container_of(objects, "ray-head")["livenessProbe"]


def forget_models(objects: list[dict[str, Any]]) -> None:
    volumes = spec_of(objects, "target")["volumes"]
    next(each for each in volumes if each["name"] == "models")["persistentVolumeClaim"]["claimName"] = "model"


def set_variable(objects: list[dict[str, Any]], name: str, value: str | None) -> None:
    """Sets an environment variable of coordinators; None removes it."""
    variables = container_of(objects, "coordinator")["env"]
    variables[:] = [each for each in variables if each["name"] != name]
    if value is not None:
        variables.append({"name": name, "value": value})


def do_without_keys(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "OUTRIDER_INSECURE", "1")


def let_ray_have_certificates(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_USE_TLS", "1")


def let_haproxy_have_a_replicas_port(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_SERVE_HAPROXY_METRICS_PORT", None)


def cut_answers_off_at_their_end(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", None)


def cut_streams_off_at_a_reload(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", None)


def take_few_requests_on_a_connection(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS", None)


def hurry_ray(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", None)


def wait_for_longer_than_the_grace(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "3720")


def let_the_head_wait(objects: list[dict[str, Any]]) -> None:
    variables = container_of(objects, "ray-head")["env"]
    variables[:] = [each for each in variables if each["name"] != "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]


def change_serve(objects: list[dict[str, Any]], written: str, instead: str) -> None:
    spec = first(objects, "RayService", "coordinator")["spec"]
    assert written in spec["serveConfigV2"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace(written, instead)


def want_more_replicas_than_fit(objects: list[dict[str, Any]]) -> None:
    change_serve(objects, "num_replicas: 2", "num_replicas: 4")


def want_larger_replicas_than_fit(objects: list[dict[str, Any]]) -> None:
    change_serve(objects, "num_cpus: 1", "num_cpus: 4")


def budget_by_scale(objects: list[dict[str, Any]]) -> None:
    budget = first(objects, "PodDisruptionBudget", "coordinator")["spec"]
    del budget["minAvailable"]
    budget["maxUnavailable"] = 1


def budget_for_all(objects: list[dict[str, Any]]) -> None:
    first(objects, "PodDisruptionBudget", "coordinator")["spec"]["minAvailable"] = 2


@pytest.mark.parametrize(
    "mistake",
    [
        do_without_keys,
        rename_port,
        forget_secret,
        forget_keys,
        say_nothing_of_certificates,
        forget_config,
        select_others,
        budget_for_nobody,
        hurry,
        be_root,
        write_everywhere,
        take_all_memory,
        mount_what_is_not_there,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_is_found(secured: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None]) -> None:
    spoilt = copy.deepcopy(secured)
    mistake(spoilt)
    assert broken(spoilt)


@pytest.mark.parametrize(
    "mistake",
    [
        leave_probes_to_kuberay,
        let_ray_have_certificates,
        let_haproxy_have_a_replicas_port,
        cut_answers_off_at_their_end,
        cut_streams_off_at_a_reload,
        take_few_requests_on_a_connection,
        hurry_ray,
        wait_for_longer_than_the_grace,
        let_the_head_wait,
        want_more_replicas_than_fit,
        want_larger_replicas_than_fit,
        budget_by_scale,
        budget_for_all,
        open_rays_ports,
        forget_models,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_on_ray_is_found(
    on_ray: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None]
) -> None:
    spoilt = copy.deepcopy(on_ray)
    mistake(spoilt)
    assert broken(spoilt)


def stay_insecure(objects: list[dict[str, Any]]) -> None:
    container_of(objects, "draft")["args"].append("--insecure")


def probe_the_closed_port(objects: list[dict[str, Any]]) -> None:
    container_of(objects, "target")["readinessProbe"]["grpc"]["port"] = 50051


def forget_the_certificate(objects: list[dict[str, Any]]) -> None:
    objects.remove(first(objects, "Certificate", "draft"))


def show_metrics_in_the_clear(objects: list[dict[str, Any]]) -> None:
    set_variable(objects, "OUTRIDER_METRICS_INSECURE", "1")


@pytest.mark.parametrize(
    "mistake",
    [stay_insecure, probe_the_closed_port, forget_the_certificate, show_metrics_in_the_clear],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_with_certificates_is_found(
    production: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None]
) -> None:
    spoilt = copy.deepcopy(production)
    mistake(spoilt)
    assert broken(spoilt)


def forget_rays_redis(objects: list[dict[str, Any]]) -> None:
    objects.remove(first(objects, "Service", "ray-redis"))


def forget_rays_password(objects: list[dict[str, Any]]) -> None:
    cluster = first(objects, "RayService", "coordinator")["spec"]["rayClusterConfig"]
    del cluster["gcsFaultToleranceOptions"]["redisPassword"]


def say_how_many_there_are(objects: list[dict[str, Any]]) -> None:
    first(objects, "Deployment", "target")["spec"]["replicas"] = 2


def scale_nobody(objects: list[dict[str, Any]]) -> None:
    first(objects, "ScaledObject", "draft")["spec"]["scaleTargetRef"]["name"] = "drafts"


def share_no_memory(objects: list[dict[str, Any]]) -> None:
    mounts = container_of(objects, "target")["volumeMounts"]
    mounts[:] = [mount for mount in mounts if mount["mountPath"] != "/dev/shm"]


def share_a_disk(objects: list[dict[str, Any]]) -> None:
    volumes = spec_of(objects, "target")["volumes"]
    del next(each for each in volumes if each["name"] == "shared-memory")["emptyDir"]["medium"]


def fall_to_the_cpu(objects: list[dict[str, Any]]) -> None:
    container_of(objects, "target")["args"].remove("--device=cuda")


@pytest.mark.parametrize(
    "mistake",
    [
        fall_to_the_cpu,
        forget_rays_redis,
        forget_rays_password,
        say_how_many_there_are,
        scale_nobody,
        share_no_memory,
        share_a_disk,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_production_is_found(
    production: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None]
) -> None:
    spoilt = copy.deepcopy(production)
    mistake(spoilt)
    assert broken(spoilt)


def policy_of(objects: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = first(objects, "NetworkPolicy", name)["spec"]
    return found


def shut_drafts_out(objects: list[dict[str, Any]]) -> None:
    policy_of(objects, "target")["ingress"][0]["from"] = [{"podSelector": {"matchLabels": {NAME: "coordinator"}}}]


def let_drafts_call_nobody(objects: list[dict[str, Any]]) -> None:
    del policy_of(objects, "draft")["egress"][0]


def forget_names(objects: list[dict[str, Any]]) -> None:
    objects.remove(first(objects, "NetworkPolicy", "names"))


def know_the_operator_by_its_namespace(objects: list[dict[str, Any]]) -> None:
    policy_of(objects, "ray-head")["ingress"][1]["from"] = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-operator"}}}
    ]


def shut_rays_redis(objects: list[dict[str, Any]]) -> None:
    del policy_of(objects, "ray-redis")["ingress"]


def rename_the_head(objects: list[dict[str, Any]]) -> None:
    cluster = first(objects, "RayService", "coordinator")["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["template"]["metadata"]["labels"] = {
        NAME: "coordinator-head",
        "app.kubernetes.io/instance": "outrider",
    }


def open_every_port(objects: list[dict[str, Any]]) -> None:
    del policy_of(objects, "coordinator")["ingress"][0]["ports"]


def let_everybody_in(objects: list[dict[str, Any]]) -> None:
    policy_of(objects, "redis")["ingress"] = [{}]


def deny_everybody_of_the_namespace(objects: list[dict[str, Any]]) -> None:
    """As the manifests were: a gateway's proxies beside the Gateway are shut out, too."""
    policy_of(objects, "nothing-by-default")["podSelector"] = {}


def know_gateways_by_their_namespace(objects: list[dict[str, Any]]) -> None:
    policy_of(objects, "coordinator")["ingress"][0]["from"] = [
        {"namespaceSelector": {"matchLabels": {"outrider.dev/may-ask": "true"}}}
    ]


def let_everything_out(objects: list[dict[str, Any]]) -> None:
    policy_of(objects, "names")["egress"] = [{}]


@pytest.mark.parametrize(
    ("mistake", "hop"),
    [
        (shut_drafts_out, "draft cannot reach port 50051 of target"),
        (let_drafts_call_nobody, "draft cannot reach port 50051 of target"),
        (forget_names, "target cannot reach port 53 of dns"),
        (know_the_operator_by_its_namespace, "operator cannot reach port 8265 of ray-head"),
        (shut_rays_redis, "ray-head cannot reach port 6379 of ray-redis"),
        (rename_the_head, "nobody says whom coordinator-head has to reach"),
        (open_every_port, "gateway reaches port 8404 of coordinator"),
        (let_everybody_in, "stranger reaches port 6379 of redis"),
        (deny_everybody_of_the_namespace, "stranger cannot reach port 443 of proxy"),
        (know_gateways_by_their_namespace, "proxy cannot reach port 8000 of coordinator"),
        (let_everything_out, "draft reaches port 443 of stranger"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_hop_that_is_shut_or_open_by_mistake_is_found(
    production: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None], hop: str
) -> None:
    spoilt = copy.deepcopy(production)
    mistake(spoilt)
    assert hop in broken(spoilt)


@pytest.mark.parametrize(
    ("kind", "name"), [("Certificate", "draft"), ("ScaledObject", "target"), ("Issuer", "outrider")]
)
def test_a_misspelt_field_of_a_component_is_found(kind: str, name: str) -> None:
    spoilt = first(rendered("llama-70b"), kind, name)
    check(spoilt)
    spoilt["spec"]["secretname"] = 1
    with pytest.raises(AssertionError, match="secretname"):
        check(spoilt)


def group_of(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = first(objects, "LeaderWorkerSet", "target")["spec"]
    return found


def wait_for_the_leader(objects: list[dict[str, Any]]) -> None:
    group_of(objects)["startupPolicy"] = "LeaderReady"


def restart_alone(objects: list[dict[str, Any]]) -> None:
    group_of(objects)["leaderWorkerTemplate"]["restartPolicy"] = "None"


def take_the_set_s_name(objects: list[dict[str, Any]]) -> None:
    first(objects, "Service", "target-workers")["metadata"]["name"] = "outrider-llama-405b-target"


def probe_followers(objects: list[dict[str, Any]]) -> None:
    follower = group_of(objects)["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    follower["ports"] = [{"name": "grpc", "containerPort": 50051}]
    follower["readinessProbe"] = {"grpc": {"port": 50051}}


def be_ready_at_once(objects: list[dict[str, Any]]) -> None:
    del group_of(objects)["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["readinessProbe"]


def hurry_ranks(objects: list[dict[str, Any]]) -> None:
    command = container_of(objects, "target-follower")["command"]
    command[:] = [word for word in command if not word.startswith("--shutdown-timeout")]


def hurry_followers(objects: list[dict[str, Any]]) -> None:
    del spec_of(objects, "target-follower")["terminationGracePeriodSeconds"]


def permit_by_default(objects: list[dict[str, Any]]) -> None:
    objects.remove(first(objects, "NetworkPolicy", "nothing-by-default"))


def rules_of(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(each for each in objects if each["kind"] == kind)["spec"]["rules"]
    return found


def ask_another_port(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "GRPCRoute")[0]["backendRefs"][0]["port"] = 50051


def serve_http_only(objects: list[dict[str, Any]]) -> None:
    del first(objects, "RayService", "coordinator")["spec"]["serveService"]["spec"]["ports"][1]


def ask_another_service(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "HTTPRoute")[1]["backendRefs"][0]["name"] = "coordinator"


def share_a_host(objects: list[dict[str, Any]]) -> None:
    """As the manifests were: HTTPRoute and GRPCRoute on one listener for one name."""
    (gateway,) = [each for each in objects if each["kind"] == "Gateway"]
    del gateway["spec"]["listeners"][1]
    (route,) = [each for each in objects if each["kind"] == "GRPCRoute"]
    route["spec"] |= {"hostnames": ["outrider.example.com"]}
    route["spec"]["parentRefs"][0]["sectionName"] = "https"


def listen_elsewhere(objects: list[dict[str, Any]]) -> None:
    first(objects, "Gateway", "outrider")["spec"]["listeners"][0]["name"] = "tls"


def rename_host(objects: list[dict[str, Any]]) -> None:
    first(objects, "Gateway", "outrider")["spec"]["listeners"][0]["hostname"] = "llm.example.com"


def forget_certificate(objects: list[dict[str, Any]]) -> None:
    listener = first(objects, "Gateway", "outrider")["spec"]["listeners"][0]
    listener["tls"]["certificateRefs"][0]["name"] = "gateway-tls"


def listen_in_clear(objects: list[dict[str, Any]]) -> None:
    listener = first(objects, "Gateway", "outrider")["spec"]["listeners"][0]
    del listener["tls"]
    listener["protocol"] = "HTTP"


def open_all_paths(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "HTTPRoute")[1]["matches"].append({"path": {"type": "PathPrefix", "value": "/"}})


def open_metrics(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "HTTPRoute")[1]["matches"].append(
        {"path": {"type": "RegularExpression", "value": "/(models|metrics)"}}
    )


def forget_a_path(objects: list[dict[str, Any]]) -> None:
    matches = rules_of(objects, "HTTPRoute")[0]["matches"]
    matches.remove({"path": {"type": "PathPrefix", "value": "/v1/batches"}})


def match_nothing(objects: list[dict[str, Any]]) -> None:
    del rules_of(objects, "HTTPRoute")[1]["matches"]


def open_all_services(objects: list[dict[str, Any]]) -> None:
    del rules_of(objects, "GRPCRoute")[0]["matches"]


def open_rays_service(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "GRPCRoute")[0]["matches"].append({"method": {"service": "ray.serve.RayServeAPIService"}})


def hang_up_early(objects: list[dict[str, Any]]) -> None:
    rules_of(objects, "HTTPRoute")[0]["timeouts"]["request"] = "30m"


def leave_the_default_timeout(objects: list[dict[str, Any]]) -> None:
    del rules_of(objects, "HTTPRoute")[0]["timeouts"]


@pytest.mark.parametrize(
    "mistake",
    [
        wait_for_the_leader,
        restart_alone,
        take_the_set_s_name,
        probe_followers,
        be_ready_at_once,
        hurry_ranks,
        hurry_followers,
        permit_by_default,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_groups_of_ranks_is_found(mistake: Callable[[list[dict[str, Any]]], None]) -> None:
    spoilt = rendered("llama-405b")
    mistake(spoilt)
    assert broken(spoilt)


@pytest.mark.parametrize(
    "mistake",
    [
        ask_another_port,
        serve_http_only,
        ask_another_service,
        share_a_host,
        listen_elsewhere,
        rename_host,
        forget_certificate,
        listen_in_clear,
        open_all_paths,
        open_metrics,
        forget_a_path,
        match_nothing,
        open_all_services,
        open_rays_service,
        hang_up_early,
        leave_the_default_timeout,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_a_route_is_found(
    production: list[dict[str, Any]], mistake: Callable[[list[dict[str, Any]]], None]
) -> None:
    spoilt = copy.deepcopy(production)
    mistake(spoilt)
    assert broken(spoilt)


@pytest.mark.parametrize("name", ["replica", "leaderWorkerTemplates"])
def test_a_misspelt_field_of_a_group_is_found(name: str) -> None:
    spoilt = first(rendered("llama-405b"), "LeaderWorkerSet", "target")
    check(spoilt)
    spoilt["spec"][name] = 1
    with pytest.raises(AssertionError, match=name):
        check(spoilt)


@pytest.mark.parametrize("kind", ["Gateway", "HTTPRoute", "GRPCRoute"])
def test_a_misspelt_field_of_a_route_is_found(production: list[dict[str, Any]], kind: str) -> None:
    for place in ("spec", "listeners" if kind == "Gateway" else "rules"):
        spoilt = copy.deepcopy(next(each for each in production if each["kind"] == kind))
        found = spoilt["spec"] if place == "spec" else spoilt["spec"][place][0]
        found["timeout"] = "1h"
        with pytest.raises(AssertionError, match="timeout"):
            check(spoilt)


@pytest.mark.parametrize(
    ("kind", "path", "name"),
    [
        ("Deployment", ("spec", "template", "spec"), "terminationGracePeriod"),
        ("RayService", ("spec", "rayClusterConfig"), "workerGroups"),
        ("Job", ("spec", "template", "spec"), "activeDeadline"),
    ],
)
def test_a_misspelt_field_is_found(
    production: list[dict[str, Any]], kind: str, path: tuple[str, ...], name: str
) -> None:
    spoilt = copy.deepcopy(next(each for each in production if each["kind"] == kind))
    place = spoilt
    for step in path:
        place = place[step]
    place[name] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(spoilt)


def test_every_preset_is_looked_at() -> None:
    assert set(PRESETS) <= set(INSTALLATIONS)
