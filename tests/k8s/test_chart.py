"""The Helm chart: what it refuses, what it makes of its values, and that two installations do not meet."""

from __future__ import annotations

import datetime
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError
from helm_python.chart import lint, package

from coordinator.access.api_keys import KeyRing
from k8s.helm.chart import FOLDER, PRESETS, REGISTRY, chart, merged, notes, preset, render
from tests.docs.pages import fences, section
from tests.k8s.pods import NAME, pods
from tests.k8s.test_manifests import SECURED, container_of, first, spec_of

ROOT = Path(__file__).parents[2]
CLUSTER_SCOPED = (
    "PriorityClass",
    "Namespace",
    "ClusterRole",
    "ClusterRoleBinding",
    "ClusterIssuer",
    "PersistentVolume",
)
EVERYTHING = merged(merged(preset("llama-70b"), SECURED), {"autoscaling": {"enabled": True}})
FETCHED_PAIR = {"name": "a", "servedModelName": "a", "target": {"model": "hf://org/a@1234567"}}
FETCHED = {"pairs": [FETCHED_PAIR]}
VOLUME = {"models": {"create": {"size": "1Gi"}}}


class TestValues:
    def test_the_chart_is_clean(self) -> None:
        report = lint(FOLDER, {"images": {"registry": REGISTRY}}, strict=True)
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["severity"] > 1] == []

    def test_it_can_be_packaged_and_the_package_renders_the_same(self, tmp_path: Path) -> None:
        with Chart.load(package(FOLDER, destination=tmp_path)) as packaged:
            given = {
                "images": {"registry": REGISTRY},
                "apiKeys": {"existingSecret": "a"},
                "redis": {"existingSecret": "b"},
            }
            assert packaged.render(given, name="outrider") == chart().render(given, name="outrider")

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ({"tragets": {}}, "tragets"),
            ({"pairs": []}, "pairs"),
            ({"pairs": [{"name": "a", "servedModelName": "a", "target": {"modle": "/a"}}]}, "modle"),
            ({"pairs": [{"name": "A b", "servedModelName": "a", "target": {}}]}, "name"),
            ({"target": {"device": "gpu"}}, "device"),
            ({"target": {"model": "hf://org/name"}}, "model"),  # no revision
            ({"target": {"device": "cuda"}}, "gpu.count"),
            ({"target": {"engine": "sglang"}}, "engine"),
            ({"target": {"engine": "vllm"}}, "needs an image"),
            ({"target": {"engine": "vllm", "image": "a", "nodes": 2}}, "one node"),
            (FETCHED, "models.create.size"),
            ({"models": {"claim": "a", "image": "b"}}, "one of claim"),
            ({"gateway": {"enabled": True}}, "className"),
            ({"target": {"draftHead": "head"}}, "draftHead"),
            ({"target": {"draftHead": "/head", "engine": "vllm", "image": "a"}}, "own engine"),
            ({"target": {"draftHead": "/head", "device": "cuda", "gpu": {"count": 2}}}, "one GPU"),
            ({"target": {"draftHead": "hf://org/a@1234567"}}, "models.create.size"),
            ({"draft": {"earlyExitLayer": 0}}, "earlyExitLayer"),
            ({"pairs": [FETCHED_PAIR | {"memory": {}}], **VOLUME}, "coordinator.memoryTenants"),
            ({"memory": {"maxMemoryTokens": 1}}, "maxMemoryTokens"),
            (
                {
                    "pairs": [{"name": "a", "draft": {"model": "/a"}, "memory": {}}],
                    "attach": {"enabled": True},
                    "coordinator": {"memoryTenants": ["*"]},
                },
                "follow requests of coordinators",
            ),
            ({"coordinator": {"hosting": "serve"}}, "hosting"),
            ({"tls": {"enabled": "yes"}}, "tls.enabled"),
            ({"tls": {"issuer": "helm"}}, "tls.issuer"),
            ({"networkPolicy": {"enabled": ""}}, "networkPolicy.enabled"),
        ],
    )
    def test_a_mistake_is_refused_by_its_name(self, values: dict[str, Any], reason: str) -> None:
        with pytest.raises(HelmError, match=reason):
            render(values)

    def test_a_target_on_vllm_has_its_flags_behind_ours(self) -> None:
        target = {"engine": "vllm", "image": "vllm:1", "maxModelLen": 4096, "memoryUtilization": 0.8}
        gpu = {"device": "cuda", "gpu": {"count": 2}, "vllmArgs": ["--kv-cache-dtype", "fp8"]}
        container = container_of(render({"target": target | gpu}), "target")
        assert (container["command"], container["image"]) == (["python3", "-m"], "vllm:1")
        where = container["args"].index("--")
        assert container["args"][0] == "target_worker"
        assert "--engine=vllm" in container["args"][:where]
        assert not [each for each in container["args"][:where] if each.startswith(("--device", "--max-"))]
        assert container["args"][where + 1 :] == [
            *("--tensor-parallel-size=2", "--max-num-seqs=32", "--max-model-len=4096", "--gpu-memory-utilization=0.8"),
            *("--kv-cache-dtype", "fp8"),
        ]

    def test_a_registry_has_to_be_named(self) -> None:
        with pytest.raises(HelmError, match=r"images\.registry is empty"):
            chart().render({}, name="outrider", namespace="outrider")

    def test_every_value_is_in_the_schema_and_every_value_of_the_schema_has_a_default(self) -> None:
        schema = chart().schema
        assert schema is not None
        assert set(schema["properties"]) - {"global"} == set(chart().values)

    def test_manifests_are_written_without_helm_and_without_secrets(self, tmp_path: Path) -> None:
        own = tmp_path / "values.yaml"
        own.write_text("target: {maxNumSeqs: 7}\n")
        words = [sys.executable, "-m", "k8s.helm", "demo", str(own)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
        objects = list(yaml.safe_load_all(done.stdout))
        assert "--max-num-seqs=7" in container_of(objects, "target")["args"]
        assert "Pod" not in {each["kind"] for each in objects}
        secrets = [each for each in objects if each["kind"] == "Secret"]
        assert [each for each in secrets if each.keys() & {"data", "stringData"}] == []

    def test_a_preset_that_there_is_not_is_refused(self) -> None:
        words = [sys.executable, "-m", "k8s.helm", "llama"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
        assert done.returncode == 2
        assert "llama-405b" in done.stderr


class TestDemo:
    def test_it_needs_nothing_but_the_images(self) -> None:
        objects = render()
        assert {each["apiVersion"] for each in objects} == {
            *("v1", "apps/v1", "policy/v1", "batch/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"),
        }
        for pod in pods(objects):
            volumes = {kind for volume in pod.spec.get("volumes", ()) for kind in volume} - {"name"}
            assert volumes <= {"secret", "configMap", "emptyDir"}
        images = {container["image"] for pod in pods(objects) for container in pod.containers}
        assert {image.partition("@")[0].rpartition("-")[2] for image in images} == {"demo", "alpine"}

    def test_the_key_that_the_notes_show_is_one_that_coordinators_take(self) -> None:
        objects = render()
        key = first(objects, "Secret", "first-api-key")["stringData"]["key"]
        ring = KeyRing.parse(first(objects, "Secret", "api-keys")["stringData"]["keys.toml"])
        assert ring.find(key, datetime.datetime.now(datetime.UTC)) is not None
        assert "outrider-first-api-key" in notes()

    def test_notes_name_the_service_and_the_model(self) -> None:
        text = notes(EVERYTHING)
        assert "https://outrider.example.com" in text
        assert '"model": "llama-3.3-70b"' in text
        assert "service/outrider-coordinator 8000" in notes()


class TestTwoInstallations:
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return render(EVERYTHING, namespace="one"), render(EVERYTHING, namespace="two")

    def test_share_nothing_that_belongs_to_the_cluster(
        self, both: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    ) -> None:
        shared = [
            {(each["kind"], each["metadata"]["name"]) for each in objects if each["kind"] in CLUSTER_SCOPED}
            for objects in both
        ]
        assert shared[0]
        assert shared[0].isdisjoint(shared[1])
        for objects in both:
            assert {each["metadata"].get("namespace") for each in objects} == {None}  # where they are installed

    def test_ask_prometheus_for_their_own_namespace_alone(
        self, both: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    ) -> None:
        for objects, namespace in zip(both, ("one", "two"), strict=True):
            queries = list(_queries(objects))
            assert len(queries) > 30
            for query in queries:
                selectors = re.findall(r"\{([^{}]*)\}", query)
                assert selectors, query
                assert all(f'namespace="{namespace}"' in selector for selector in selectors), query

    def test_of_one_namespace_select_their_own_pods(self) -> None:
        one, two = render(EVERYTHING, release="outrider-one"), render(EVERYTHING, release="outrider-two")
        names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, two)]
        assert names[0].isdisjoint(names[1])
        assert {pod.labels["app.kubernetes.io/instance"] for pod in pods(one)} == {"outrider-one"}
        for each in one:
            if each["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
                assert each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "outrider-one"


def _queries(objects: list[dict[str, Any]]) -> Iterator[str]:
    for each in objects:
        if each["kind"] == "ScaledObject":
            yield from (trigger["metadata"]["query"] for trigger in each["spec"]["triggers"])
        elif each["kind"] == "PrometheusRule":
            yield from (rule["expr"] for group in each["spec"]["groups"] for rule in group["rules"])


class TestColdStart:
    def test_prometheus_that_sees_no_worker_yet_answers_0_and_one_that_sees_nothing_nothing(self) -> None:
        for each in render(EVERYTHING):
            if each["kind"] == "ScaledObject":
                for trigger in each["spec"]["triggers"]:
                    for part in re.split(r"\)\s*\+ ", trigger["metadata"]["query"]):
                        assert 'or 0 * count(up{namespace="outrider",job="outrider-coordinator"} == 1)' in part
                    assert trigger["metadata"]["ignoreNullValues"] == "false"

    def test_without_an_answer_the_number_of_workers_stays(self) -> None:
        scaled = [each["spec"] for each in render(EVERYTHING) if each["kind"] == "ScaledObject"]
        assert {each["fallback"]["behavior"] for each in scaled} == {"currentReplicas"}
        assert {each["fallback"]["replicas"] for each in scaled} == {1}

    def test_a_model_that_loads_for_two_hours_may(self) -> None:
        """Only the worker itself judges how long loading takes: its liveness serves from the first seconds on."""
        objects = render(EVERYTHING)
        container = container_of(objects, "target")
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["grpc"]["service"] == "liveness"
        assert first(objects, "Deployment", "target")["spec"]["progressDeadlineSeconds"] > 7200


def fetches(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs that fetch models."""
    jobs = [each for each in objects if each["kind"] == "Job"]
    return [each for each in jobs if each["spec"]["template"]["metadata"]["labels"][NAME] == "fetch"]


class TestModels:
    @pytest.fixture
    def values(self) -> dict[str, Any]:
        return merged(FETCHED, {"models": {"create": {"size": "1Gi"}}})

    def test_a_source_is_fetched_once_and_waited_for(self, values: dict[str, Any]) -> None:
        objects = render(values)
        (job,) = fetches(objects)
        (fetch,) = job["spec"]["template"]["spec"]["containers"]
        assert fetch["args"][:3] == ["command_line", "fetch", "hf://org/a@1234567"]
        folder = fetch["args"][3]
        assert f"--model={folder}" in container_of(objects, "target")["args"]
        for part in ("target", "coordinator"):
            (wait,) = spec_of(objects, part)["initContainers"]
            assert wait["args"][:4] == fetch["args"][:4]
            assert "--wait-only" in wait["args"]
        assert folder in first(objects, "ConfigMap", "models")["data"]["models.toml"]

    def test_another_pod_is_another_job(self, values: dict[str, Any]) -> None:
        """Kubernetes refuses a change of a Job's pod, and with it the whole upgrade."""
        (job,) = fetches(render(values))
        change = {"images": {"tag": "0.2.0"}}
        (other,) = fetches(render(merged(values, change)))
        assert job["spec"]["template"] != other["spec"]["template"]
        assert job["metadata"]["name"] != other["metadata"]["name"]
        folder = job["spec"]["template"]["spec"]["containers"][0]["args"][3]
        assert folder == other["spec"]["template"]["spec"]["containers"][0]["args"][3]

    def test_another_commit_has_another_folder(self, values: dict[str, Any]) -> None:
        other = merged(values, {})
        other["pairs"] = [merged(values["pairs"][0], {"target": {"model": "hf://org/a@7654321"}})]
        folders = {container_of(render(each), "target")["args"][1] for each in (values, other)}
        assert len(folders) == 2

    def test_a_volume_that_is_there_is_used_as_it_is(self) -> None:
        objects = render({"models": {"claim": "weights"}})
        assert "PersistentVolumeClaim" not in {each["kind"] for each in objects}
        assert fetches(objects) == []
        (volume,) = [each for each in spec_of(objects, "draft")["volumes"] if each["name"] == "models"]
        assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}

    def test_an_image_of_models_is_a_volume(self) -> None:
        objects = render({"models": {"image": "registry.example.com/models:1"}})
        (volume,) = [each for each in spec_of(objects, "target")["volumes"] if each["name"] == "models"]
        assert volume["image"]["reference"] == "registry.example.com/models:1"


class TestHeads:
    """Draft heads and early exit: what workers are told, and what is fetched."""

    def rendered(self, target: dict[str, Any], draft: dict[str, Any] | None) -> list[dict[str, Any]]:
        pair = {"name": "a", "servedModelName": "a", "target": target} | ({"draft": draft} if draft else {})
        return render({"pairs": [pair], **VOLUME})

    def fetched(self, objects: list[dict[str, Any]]) -> dict[str, str]:
        """Folders by their sources."""
        words = [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in fetches(objects)]
        assert len({source for _, _, source, _ in words}) == len(words), "each source is fetched once"
        return {source: folder for _, _, source, folder in words}

    def waits(self, objects: list[dict[str, Any]], name: str) -> set[str]:
        return {each["args"][3] for each in spec_of(objects, name).get("initContainers", ())}

    def test_draft_workers_run_the_head_that_the_target_names(self) -> None:
        target, head = "hf://org/large@1234567", "hf://org/head@1234567"
        objects = self.rendered({"model": target, "draftHead": head}, {"model": head})
        folders = self.fetched(objects)
        assert folders.keys() == {target, head}
        words = container_of(objects, "target")["args"]
        assert {f"--model={folders[target]}", f"--draft-head={folders[head]}"} <= {*words}
        words = container_of(objects, "draft")["args"]
        assert {f"--model={folders[head]}", f"--target-tokenizer={folders[target]}"} <= {*words}
        for name in ("target", "draft"):
            assert self.waits(objects, name) == set(folders.values())

    def test_a_head_without_draft_workers_is_the_target_s_alone(self) -> None:
        target, head = "hf://org/large@1234567", "hf://org/medusa@1234567"
        objects = self.rendered({"model": target, "draftHead": head}, None)
        folders = self.fetched(objects)
        assert f"--draft-head={folders[head]}" in container_of(objects, "target")["args"]
        assert self.waits(objects, "target") == set(folders.values())
        assert "draft" not in {pod.labels[NAME] for pod in pods(objects)}

    def test_mtp_layers_are_in_the_target_s_own_folder(self) -> None:
        target = "hf://org/large@1234567"
        objects = self.rendered({"model": target, "draftHead": target}, None)
        (folder,) = self.fetched(objects).values()
        assert f"--draft-head={folder}" in container_of(objects, "target")["args"]

    def test_the_target_s_first_layers_draft(self) -> None:
        target = "hf://org/large@1234567"
        objects = self.rendered({"model": target}, {"earlyExitLayer": 4})
        (folder,) = self.fetched(objects).values()
        words = container_of(objects, "draft")["args"]
        assert {f"--model={folder}", f"--target-tokenizer={folder}", "--early-exit-layer=4"} <= {*words}
        assert self.waits(objects, "draft") == {folder}
        assert not [word for word in container_of(objects, "target")["args"] if "exit" in word]


class TestMemory:
    def rendered(self, own: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
        pair = {"name": "a", "servedModelName": "a", "target": {"model": "/models/target"}, "memory": own}
        return render({"pairs": [pair], "coordinator": {"memoryTenants": ["search"]}, **values})

    def test_a_pair_has_memory_workers_for_the_tenants_that_coordinators_name(self) -> None:
        objects = self.rendered({}, memory={"replicas": 3})
        deployment = first(objects, "Deployment", "a-memory")
        assert deployment["spec"]["replicas"] == 3
        container = container_of(objects, "memory")
        assert container["args"][:3] == [
            *("draft_worker.memory", "--tokenizer=/models/target", "--served-model-name=a-memory"),
        ]
        assert container["resources"]["requests"]["cpu"] == "100m"
        settings = yaml.safe_load(first(objects, "ConfigMap", "coordinator")["data"]["settings.json"])
        assert settings["memory_tenants"] == ["search"]
        assert 'drafts = ["a-memory"]' in first(objects, "ConfigMap", "models")["data"]["models.toml"]

    def test_each_zone_has_its_own(self) -> None:
        objects = self.rendered({"zones": ["eu-1a", "eu-1b"], "nodeSelector": {"pool": "small"}})
        for zone in ("eu-1a", "eu-1b"):
            spec = first(objects, "Deployment", f"a-memory-{zone}")["spec"]
            pod = spec["template"]
            assert pod["spec"]["nodeSelector"] == {"pool": "small", "topology.kubernetes.io/zone": zone}
            variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
            assert variables["OUTRIDER_ZONE"] == zone
            assert spec["selector"]["matchLabels"]["outrider.dev/zone"] == zone

    def test_without_it_there_is_none(self) -> None:
        assert "memory" not in {pod.labels[NAME] for pod in pods(render())}
        kinds = ("NetworkPolicy", "PodMonitor", "PodDisruptionBudget")
        assert "memory" not in yaml.safe_dump([each for each in render(SECURED) if each["kind"] in kinds])


@pytest.mark.parametrize(
    ("title", "parts"), [("Draft heads and early exit", {"draft"}), ("Memory workers", {"memory"})]
)
def test_values_of_the_documentation_are_the_chart_s(title: str, parts: set[str]) -> None:
    (fence,) = [each for each in fences(section("docs/operations/kubernetes.md", title)) if each.language == "yaml"]
    values = yaml.safe_load(fence.content)
    objects = render(merged(values, {"models": {"claim": "weights"}}))
    names = {pod.labels[NAME] for pod in pods(objects)}
    assert parts | {"target", "coordinator"} <= names
    heads = {
        word for pod in pods(objects) for each in pod.containers for word in each.get("args", ()) if "head" in word
    }
    assert heads == {
        f"--draft-head={pair['target']['draftHead']}" for pair in values["pairs"] if "draftHead" in pair["target"]
    }


class TestPlacement:
    def test_a_worker_learns_its_zone_from_its_own_label(self) -> None:
        variables = {each["name"]: each for each in container_of(render(), "draft")["env"]}
        path = variables["OUTRIDER_ZONE"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == "metadata.labels['topology.kubernetes.io/zone']"
        fixed = {each["name"]: each for each in container_of(render({"zone": "a"}), "draft")["env"]}
        assert fixed["OUTRIDER_ZONE"]["value"] == "a"

    def test_draft_workers_run_near_their_targets(self) -> None:
        objects = render()
        (term,) = spec_of(objects, "draft")["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        wanted = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        labels = next(pod.labels for pod in pods(objects) if pod.labels[NAME] == "target")
        assert wanted.items() <= labels.items()

    def test_ipv6_is_listened_to_everywhere(self) -> None:
        assert "--host=::" in container_of(render(), "coordinator")["args"]
        objects = render(merged(EVERYTHING, {"network": {"family": "ipv6"}}))
        for name in ("target", "draft"):
            assert "--host=::" in container_of(objects, name)["args"]
            assert "--announce=$(POD_IP)" in container_of(objects, name)["args"]
        serve = yaml.safe_load(first(objects, "RayService", "coordinator")["spec"]["serveConfigV2"])
        assert serve["http_options"]["host"] == "::"

    def test_ranks_on_several_nodes_name_their_interface(self) -> None:
        objects = render(merged(preset("llama-405b"), {"target": {"exclusiveTopology": "rack"}}))
        names = {each["name"]: each.get("value") for each in container_of(objects, "target-follower")["env"]}
        assert names["GLOO_SOCKET_IFNAME"] == names["NCCL_SOCKET_IFNAME"] == "eth0"
        (group,) = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
        assert group["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/exclusive-topology"] == "rack"

    def test_rdma_is_a_resource(self) -> None:
        objects = render({"target": {"rdma": {"resource": "rdma/ib", "count": 2}}})
        assert container_of(objects, "target")["resources"]["limits"]["rdma/ib"] == "2"


class TestGateway:
    def test_addresses_of_a_load_balancer_can_be_let_in(self) -> None:
        peer = {"ipBlock": {"cidr": "35.191.0.0/16"}}
        objects = render(merged(SECURED, {"networkPolicy": {"clients": [peer]}}))
        assert peer in first(objects, "NetworkPolicy", "coordinator")["spec"]["ingress"][0]["from"]

    def test_without_a_name_for_grpc_there_is_no_route_for_it(self) -> None:
        objects = render(merged(SECURED, {"gateway": {"grpcHostname": ""}}))
        assert "GRPCRoute" not in {each["kind"] for each in objects}
        assert len(next(each for each in objects if each["kind"] == "Gateway")["spec"]["listeners"]) == 1

    def test_routes_lead_to_the_service_of_either_hosting(self) -> None:
        for hosting, service in (("plain", "outrider-coordinator"), ("ray", "outrider-coordinator-serve-svc")):
            objects = render(merged(SECURED, {"coordinator": {"hosting": hosting}}))
            (route,) = [each for each in objects if each["kind"] == "HTTPRoute"]
            assert {ref["name"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]} == {service}


def test_a_plain_coordinator_has_time_to_finish_its_longest_stream() -> None:
    """Its own default would end streams after ten seconds."""
    objects = render({"coordinator": {"deadlineMaxSeconds": 600}})
    container, spec = container_of(objects, "coordinator"), spec_of(objects, "coordinator")
    assert "--drain-grace-s=600" in container["args"]
    (notice_s,) = (int(word.partition("=")[2]) for word in container["args"] if word.startswith("--drain-notice-s="))
    assert notice_s + 600 + 10 < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("is_encrypted", "kind"), [(True, "exec"), (False, "tcpSocket")])
def test_probes_of_redis_leave_no_lines_in_its_log(is_encrypted: bool, kind: str) -> None:
    """With certificates it logs every connection that ends before its handshake."""
    container = container_of(render({"tls": {"enabled": is_encrypted}}), "redis")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert kind in container[probe]


def test_users_of_redis_have_the_passwords_of_their_addresses() -> None:
    secret: Mapping[str, str] = first(render({"tls": {"enabled": False}}), "Secret", "redis")["stringData"]
    for user in ("coordinator", "target", "draft"):
        password = re.fullmatch(rf"redis://{user}:(\w+)@outrider-redis:6379/0", secret[f"url-{user}"])
        assert password is not None
        assert f"user {user} on #{hashlib.sha256(password[1].encode()).hexdigest()} " in secret["users.conf"]
    encrypted = first(render(), "Secret", "redis")["stringData"]["url-target"]
    assert encrypted.startswith("rediss://")
    assert "ssl_ca_certs=/etc/outrider/tls/ca.crt" in encrypted


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_needs(name: str) -> None:
    assert (FOLDER / "presets" / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")
