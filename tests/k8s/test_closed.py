"""The chart is closed by default: who reaches which port, what is in the clear, and what upgrades keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
from helm_python import HelmError

from k8s.helm.chart import merged, notes, notes_of, objects_of, preset, render
from tests.cluster.api_server import Store, rendered
from tests.k8s.pods import pods
from tests.k8s.policy_rules import OTHERS, Party, can_reach, is_peer
from tests.k8s.test_manifests import container_of, first

OPEN: Final[dict[str, Any]] = {"tls": {"enabled": False}, "networkPolicy": {"enabled": False}}
MEMORY: Final[dict[str, Any]] = {
    "pairs": [
        {
            "name": "demo",
            "servedModelName": "demo",
            "target": {"model": "/models/target"},
            "draft": {"model": "/models/draft"},
            "memory": {},
        }
    ],
    "coordinator": {"memoryTenants": ["*"]},
}
DRAFTS: Final[dict[str, Any]] = {
    "attach": {"enabled": True},
    "pairs": [{"name": "demo", "draft": {"model": "/models/draft"}}],
}
RAY: Final[dict[str, Any]] = {"coordinator": {"hosting": "ray", "ray": {"faultTolerance": {"enabled": True}}}}
DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "gateway": {"gateway": {"enabled": True, "className": "any"}},
    "memory": MEMORY,
    "drafts alone": DRAFTS,
    "ray": RAY,
    "llama-405b": merged(preset("llama-405b"), {"tls": {"issuer": "job"}}),
}
_CLIENTS: Final = {"gateway", "proxy", "test"}
_WORKER: Final = {"grpc": {"coordinator"}, "metrics": {"prometheus"}, "health": set[str]()}  # kubelets need no policy
_RAY: Final = {"coordinator", "ray-head"}
DOORS: Final[dict[str, dict[str, set[str]]]] = {
    "coordinator": {"http": _CLIENTS, "grpc": _CLIENTS, "replica-0": {"prometheus"}, "agent": set(), "metrics": set()},
    "target": _WORKER | {"grpc": {"coordinator", "draft", "memory"}, "rendezvous": set()},
    "target-follower": {"grpc": set(), "metrics": set(), "health": set(), "rendezvous": set()},
    "draft": _WORKER,
    "memory": _WORKER,
    "redis": {"redis": {"coordinator", "target", "draft", "memory"}},
    "ray-head": dict.fromkeys(("gcs", "client", "agent", "metrics"), _RAY) | {"dashboard": _RAY | {"operator"}},
    "ray-redis": {"redis": {"ray-head"}},
}
"""By component and name of a port, who reaches it; nobody else does."""


@pytest.fixture(params=DEFAULTS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(DEFAULTS[request.param])


def test_every_pod_has_policies_for_both_directions(objects: list[dict[str, Any]]) -> None:
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    for pod in pods(objects):
        party = Party(pod.labels)
        directions = {
            direction
            for policy in policies
            if is_peer({"podSelector": policy["podSelector"]}, party)
            for direction in policy["policyTypes"]
        }
        assert directions == {"Ingress", "Egress"}, pod.owner


def test_each_port_is_open_to_those_who_need_it_and_to_nobody_else(objects: list[dict[str, Any]]) -> None:
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    parties = OTHERS | {pod.name: Party(pod.labels) for pod in pods(objects)}
    if not any(each["kind"] == "Gateway" for each in objects):
        del parties["proxy"]
    is_alone = "coordinator" not in parties
    wrong = []
    for pod in pods(objects):
        for port in (port for container in pod.containers for port in container.get("ports", ())):
            wanted = set(DOORS[pod.name][port["name"]])
            if is_alone and port["name"] == "grpc":
                wanted = {"engine"}
            if pod.name == "coordinator" and "ray-head" in parties:
                wanted |= _RAY
            if "follower" in pod.name or (pod.name == "target" and "target-follower" in parties):
                wanted |= {"target", "target-follower"}
            for name, party in parties.items():
                is_open = can_reach(policies, party, parties[pod.name], port["containerPort"])
                if is_open is not (name in wanted):
                    wrong.append(f"{name} {'reaches' if is_open else 'cannot reach'} {port['name']} of {pod.name}")
    assert wrong == []


def test_nothing_is_in_the_clear_between_the_parts(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        (container, *_) = pod.spec["containers"]
        words = container.get("args", [])
        assert "--insecure" not in words
        if pod.name in ("target", "target-follower", "draft", "memory"):
            assert "--tls-dir=/etc/outrider/tls" in words
        if pod.name in ("coordinator", "ray-head"):
            variables = {each["name"]: each.get("value") for each in container["env"]}
            assert variables["OUTRIDER_TLS_DIR"] == "/etc/outrider/tls"
            assert "OUTRIDER_METRICS_INSECURE" not in variables
        if pod.name == "redis":
            assert words[words.index("--port") :][:4] == ["--port", "0", "--tls-port", "6379"]
    urls = [
        url
        for each in objects
        if each["kind"] == "Secret"
        for key, url in each.get("stringData", {}).items()
        if key.startswith("url-")
    ]
    assert all(url.startswith("rediss://") for url in urls)


def test_no_rendering_has_a_key_of_a_certificate_or_makes_another_one() -> None:
    """GitOps cannot look up an earlier authority, so that one in a rendering would be another each time."""
    given = {"redis": {"existingSecret": "redis"}, "apiKeys": {"existingSecret": "keys"}}
    assert render(given) == render(given)
    secrets = [each for each in render(given) if each["kind"] == "Secret"]
    assert {each["metadata"]["name"] for each in secrets} == {
        f"outrider-{name}" for name in ("ca", *(f"{part}-tls" for part in _PARTS))
    }
    for each in secrets:
        assert each.keys() == {"apiVersion", "kind", "metadata"}


_PARTS: Final = ("coordinator", "target", "draft", "operator", "redis")


def test_the_job_is_no_hook_and_runs_again_every_day_with_the_same_pod() -> None:
    """With --wait Helm runs hooks when pods are ready, and these wait for certificates."""
    objects = render()
    (job,), (cron,) = ([each for each in objects if each["kind"] == kind] for kind in ("Job", "CronJob"))
    assert "annotations" not in job["metadata"]
    assert cron["spec"]["jobTemplate"]["spec"]["template"] == job["spec"]["template"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["command_line.certificates.cluster", "outrider", *_PARTS]


@pytest.mark.parametrize(
    "change",
    [{"enabled": False}, {"apiServerPorts": [7443]}, {"dns": [{"ipBlock": {"cidr": "192.0.2.53/32"}}]}],
    ids=["policies", "ports", "dns"],
)
def test_the_first_certificates_are_made_again_once_their_job_may_reach_the_api_server(change: dict[str, Any]) -> None:
    """A Job that has failed stays so. Helm makes another one only under another name."""

    def job(values: Mapping[str, Any]) -> dict[str, Any]:
        (found,) = [each for each in render(values) if each["kind"] == "Job"]
        return found

    before, after = job({}), job({"networkPolicy": change})
    assert after["metadata"]["name"] != before["metadata"]["name"]
    assert after["spec"] == before["spec"]
    unrelated = job({"networkPolicy": {"prometheus": []}})
    assert unrelated == before


def test_a_model_is_fetched_again_once_its_job_may_reach_the_source() -> None:
    target = {"model": f"hf://a/b@{'0' * 40}"}
    source = {
        "models": {"claim": "models"},
        "pairs": [{"name": "demo", "servedModelName": "demo", "target": target}],
    }

    def names(values: Mapping[str, Any]) -> list[str]:
        return [each["metadata"]["name"] for each in render(values) if each["kind"] == "Job" and "demo" in str(each)]

    bucket = {"networkPolicy": {"workerEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}]}}
    assert names(source) != names(merged(source, bucket))


def test_the_notes_say_how_to_make_certificates_at_once() -> None:
    line = "kubectl --namespace outrider create job --from=cronjob/outrider-certificates certificates-again"
    assert line in notes()
    assert "create job" not in notes({"tls": {"enabled": True, "issuer": "cert-manager"}})


def test_pods_wait_for_their_certificates(objects: list[dict[str, Any]]) -> None:
    """A volume that names its files is not mounted before they are there."""
    volumes = [volume for pod in pods(objects) for volume in pod.spec.get("volumes", ()) if volume["name"] == "tls"]
    assert volumes
    for volume in volumes:
        assert {item["key"] for item in volume["secret"]["items"]} == {"tls.crt", "tls.key", "ca.crt"}


def test_an_identity_provider_and_a_bucket_are_reached_unless_the_values_say_whom() -> None:
    def permits(values: Mapping[str, Any]) -> bool:
        found = render(values)
        policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
        (coordinator,) = [pod for pod in pods(found) if pod.name == "coordinator"]
        return can_reach(policies, Party(coordinator.labels), OTHERS["stranger"], 443)

    oidc = {"coordinator": {"oidc": {"issuer": "https://login.example.com", "audience": "outrider"}}}
    assert permits(oidc)
    assert permits({"coordinator": {"batches": {"files": "s3://bucket/batches"}}})
    assert not permits({})
    elsewhere = {"coordinatorEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}]}
    assert not permits(merged(oidc, {"networkPolicy": elsewhere}))


class TestUpgrades:
    async def upgraded(
        self, values: Mapping[str, Any], earlier: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], str]:
        """Objects and notes of an upgrade of a release that has these objects."""
        found: dict[str, dict[str, Mapping[str, bytes]]] = {"Secret": {}, "ConfigMap": {}}
        for each in earlier:
            if each["kind"] in found:
                texts = each.get("stringData", each.get("data", {}))
                found[each["kind"]][each["metadata"]["name"]] = {key: text.encode() for key, text in texts.items()}
        store = Store(found["Secret"], found["ConfigMap"], earlier)
        files = await rendered(values, lambda: store, is_upgrade=True)
        return objects_of(files), notes_of(files)

    def of_an_older_chart(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A release as charts made them that were open by default, and knew cert-manager alone."""
        before = merged(OPEN, values)
        return [each for each in render(before) if each["metadata"]["name"] != "outrider-security"]

    @pytest.mark.parametrize("values", [{}, MEMORY, DRAFTS, RAY], ids=["plain", "memory", "drafts", "ray"])
    async def test_a_release_of_an_older_chart_stays_as_it_was(self, values: dict[str, Any]) -> None:
        """Old pods speak plaintext while new ones come: with certificates these could not understand each other."""
        earlier = self.of_an_older_chart(values)
        objects, text = await self.upgraded(values, earlier)
        as_before, _ = await self.upgraded(merged(values, OPEN), earlier)
        assert objects == as_before
        assert [each for each in objects if each["metadata"]["name"] != "outrider-security"] == earlier
        assert "--set networkPolicy.enabled=true" in text
        assert "--set tls.enabled=true --set tls.issuer=job" in text
        again, _ = await self.upgraded(values, objects)
        assert again == objects

    async def test_what_an_older_release_had_is_kept_one_by_one(self) -> None:
        certificates = {"tls": {"enabled": True}}
        objects, text = await self.upgraded(certificates, self.of_an_older_chart(certificates))
        assert "Certificate" in {each["kind"] for each in objects}, "cert-manager's, as it was"
        assert {"NetworkPolicy", "CronJob"}.isdisjoint(each["kind"] for each in objects)
        assert "tls.enabled=true" not in text
        policies = {"networkPolicy": {"enabled": True}}
        objects, text = await self.upgraded(policies, self.of_an_older_chart(policies))
        assert "--insecure" in container_of(objects, "target")["args"]
        assert "NetworkPolicy" in {each["kind"] for each in objects}
        assert "networkPolicy.enabled=true" not in text

    async def test_values_that_helm_reuses_lack_what_is_new(self) -> None:
        """--reuse-values takes the older chart's defaults, too."""
        reused = {"tls": {"enabled": False, "issuer": None}, "networkPolicy": {"enabled": True, "apiServerPorts": None}}
        objects, _ = await self.upgraded(reused, self.of_an_older_chart(reused))
        assert "--insecure" in container_of(objects, "target")["args"]

    async def test_a_new_release_stays_closed_with_the_same_certificates(self) -> None:
        installed = render()
        objects, text = await self.upgraded({}, installed)
        assert objects == installed
        assert "WARNING" not in text

    async def test_saying_it_does_not_change_who_issues(self) -> None:
        objects, _ = await self.upgraded({"tls": {"enabled": True}}, render())
        assert "CronJob" in {each["kind"] for each in objects}
        objects, _ = await self.upgraded({}, render({"tls": {"issuer": "cert-manager"}}))
        assert "Certificate" in {each["kind"] for each in objects}

    async def test_an_open_release_is_closed_by_the_values_that_the_notes_name(self) -> None:
        earlier, _ = await self.upgraded({}, self.of_an_older_chart({}))
        objects, text = await self.upgraded({"networkPolicy": {"enabled": True}}, earlier)
        assert "NetworkPolicy" in {each["kind"] for each in objects}
        assert "--insecure" in container_of(objects, "draft")["args"]
        closed = {"networkPolicy": {"enabled": True}, "tls": {"enabled": True, "issuer": "job"}}
        objects, text = await self.upgraded(closed, earlier)
        assert "WARNING" not in text
        secret = first(objects, "Secret", "redis")["stringData"]
        assert secret["url-target"].startswith("rediss://")
        kept = first(earlier, "Secret", "redis")["stringData"]
        assert secret["password-target"] == kept["password-target"]

    async def test_a_closed_release_is_opened_by_a_value(self) -> None:
        objects, text = await self.upgraded(OPEN, render())
        assert {"NetworkPolicy", "CronJob"}.isdisjoint(each["kind"] for each in objects)
        assert text.count("WARNING") == 2


async def upgraded(
    values: Mapping[str, Any], earlier: list[dict[str, Any]], *without: str
) -> tuple[list[dict[str, Any]], str]:
    """Objects and notes of an upgrade of a release with these objects, except for kinds and its config maps."""
    kept = [each for each in earlier if each["kind"] not in (*without, "ConfigMap")]
    return await TestUpgrades().upgraded(values, kept)


class TestLostConfigMap:
    """Upgrades of a release of this chart whose config map `outrider-security` is not there."""

    @pytest.mark.parametrize("values", [{}, DRAFTS, RAY], ids=["plain", "drafts", "ray"])
    @pytest.mark.parametrize("made", [(), ("NetworkPolicy", "Secret")], ids=["nothing", "policies and secrets"])
    async def test_a_first_installation_that_failed_is_done_closed(
        self, values: dict[str, Any], made: tuple[str, ...]
    ) -> None:
        """Helm makes policies and secrets before config maps, and everything that runs after them."""
        objects, text = await upgraded(values, [each for each in render(values) if each["kind"] in made])
        kinds = {each["kind"] for each in objects}
        assert {"NetworkPolicy", "CronJob"} <= kinds
        assert first(objects, "ConfigMap", "security")["data"] == {"issuer": "job", "networkPolicies": "true"}
        assert "WARNING" not in text

    @pytest.mark.parametrize("values", [{}, MEMORY, DRAFTS, RAY], ids=["plain", "memory", "drafts", "ray"])
    @pytest.mark.parametrize("issuer", ["job", "cert-manager"])
    async def test_a_closed_release_stays_closed_with_the_same_certificates(
        self, values: dict[str, Any], issuer: str
    ) -> None:
        installed = render(merged(values, {"tls": {"issuer": issuer}}))
        objects, text = await upgraded(values, installed)
        assert objects == installed
        assert "WARNING" not in text
        objects, _ = await upgraded(merged(values, {"tls": {"enabled": True}}), installed)
        assert objects == installed, "saying it does not change who issues"

    async def test_objects_of_another_release_say_nothing(self) -> None:
        others = render(OPEN, release="another")
        objects, _ = await upgraded({}, others)
        assert first(objects, "ConfigMap", "security")["data"] == {"issuer": "job", "networkPolicies": "true"}

    async def test_lost_policies_are_not_left_out_in_silence(self) -> None:
        with pytest.raises(
            HelmError, match=r"outrider-security is missing.* Set networkPolicy\.enabled \(true or false\)"
        ):
            await upgraded({}, render(), "NetworkPolicy")
        installed = render()
        objects, _ = await upgraded({"networkPolicy": {"enabled": True}}, installed, "NetworkPolicy")
        assert objects == installed
        objects, _ = await upgraded({"networkPolicy": {"enabled": False}}, render(), "NetworkPolicy")
        assert "NetworkPolicy" not in {each["kind"] for each in objects}
        assert "CronJob" in {each["kind"] for each in objects}

    async def test_where_nothing_shows_certificates_the_values_have_to_say_it(self) -> None:
        """Such as draft workers that are groups of nodes, each a LeaderWorkerSet."""
        with pytest.raises(HelmError, match=r"Set tls\.enabled .* to what the release had"):
            await upgraded({}, render(), "Deployment")
        installed, said = render(), {"tls": {"enabled": True, "issuer": "job"}}
        objects, _ = await upgraded(said, installed, "Deployment")
        assert objects == installed
