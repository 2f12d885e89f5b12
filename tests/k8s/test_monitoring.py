"""Alerts fire when they should, dashboards can be read, and nothing asks for a metric that nobody exports."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k8s.dashboards.__main__ import DASHBOARDS, FOLDER, write
from tests.k8s import alerts, grafana, queries, rules
from tests.k8s.custom_resources import check_custom_resource
from tests.k8s.exporters import Exports, exports
from tests.k8s.pods import NAME
from tests.k8s.test_manifests import K8S, check, rendered

MONITORING = K8S / "monitoring"
GUIDE = K8S.parent / "docs" / "operations" / "runbooks.md"
TESTS = sorted((MONITORING / "tests").glob("*.yaml"))
Json = dict[str, Any]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (Debian's package prometheus has it)"
)


def all_of(path: Path) -> list[Json]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def prometheus_rules() -> Json:
    """As Prometheus itself reads them."""
    (found,) = all_of(K8S / "helm" / "outrider" / "files" / "rules.yaml")
    return found


def all_rules() -> list[Json]:
    return [rule for group in prometheus_rules()["groups"] for rule in group["rules"]]


def all_alerts() -> list[Json]:
    return [rule for rule in all_rules() if "alert" in rule]


def all_tests() -> list[Json]:
    return [test for path in TESTS for test in all_of(path)[0]["tests"]]


def dashboard_queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each query of a dashboard: the panel or variable that has it, the PromQL and the legend."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{dashboard['uid']}: {panel['title']}", target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            for query in queries.label_values(variable["query"]["query"]):
                yield f"{dashboard['uid']}: ${variable['name']}", query, ""


def committed_dashboards() -> list[Json]:
    return [json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in DASHBOARDS]


def keda_queries() -> Iterator[tuple[str, str, str]]:
    for each in rendered("llama-70b"):
        if each["kind"] != "ScaledObject":
            continue
        for trigger in each["spec"]["triggers"]:
            yield f"{each['metadata']['name']}: {trigger['name']}", trigger["metadata"]["query"], ""


def runbook_queries() -> Iterator[tuple[str, str, str]]:
    for section in re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        for query in re.findall(r"```promql\n(.*?)```", section, re.DOTALL):
            yield f"runbook {section.splitlines()[0]}", query, ""


def all_queries() -> list[tuple[str, str, str]]:
    named = [(rule.get("alert") or rule["record"], rule["expr"], "") for rule in all_rules()]
    drawn = [each for dashboard in committed_dashboards() for each in dashboard_queries(dashboard)]
    return [*named, *drawn, *keda_queries(), *runbook_queries()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return exports(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def anchors() -> set[str]:
    return alerts.headings(GUIDE.read_text(encoding="utf-8"))


def mistakes_of(where: str, query: str, legend: str, exported: Exports) -> list[str]:
    reading = queries.read(query, exported, queries.recorded(all_rules(), exported))
    named = re.findall(r"\{\{(\w+)\}\}", legend)
    unknown = [label for label in named if label not in (reading.labels or ())]
    mistakes = [*reading.mistakes, *(f"its legend names {label}" for label in unknown)]
    return [f"{where}: {mistake}" for mistake in mistakes]


class TestQueries:
    def test_every_metric_and_label_that_is_asked_for_is_exported(self, exported: Exports) -> None:
        asked = all_queries()
        assert len(asked) > 100
        assert [mistake for each in asked for mistake in mistakes_of(*each, exported)] == []

    @pytest.mark.parametrize(
        ("query", "mistake"),
        [
            ("sum(rate(outrider_generation_token_total[5m]))", "outrider_generation_token_total is not exported"),
            ('outrider_draft_sessions{job="outrider-target"}', "is not exported by outrider-target"),
            ('outrider_draft_sessions{job="outrider-drafts"}', "no such job"),
            ('up{job="outrider-target",pool="target"}', "up has no label pool"),
            ('outrider_live_workers{job="outrider-coordinator",pool="targets"}', "never has pool targets"),
            (
                'outrider_request_failure_total{job="outrider-coordinator",code=~"INTERNAL|UNAVAILBLE"}',
                "never has code UNAVAILBLE",
            ),
            ('sum by (worker) (outrider_draft_sessions{job="outrider-draft"})', "has the label worker"),
            ("sum(rate(outrider_generation_tokens_total[5m])", "does not parse"),
            ('rate(outrider_draft_sessions{job="outrider-draft"})', "does not parse"),
            (
                'sum by (engine) (up) / sum by (job) (up)',
                "they never meet",
            ),
            ("outrider:request_error:ratio_rate5m", "is not recorded"),
            ('outrider:request_errors:ratio_rate5m{model_name="m"}', "has no label model_name"),
            ('histogram_quantile(0.9, sum(rate(outrider_time_to_first_token_seconds_bucket[5m])))', "label le"),
            ("sum(rate(outrider_generation_tokens_total[$interval]))", r"nobody sets $interval"),
            ('{__name__="up"}', "should have a name"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_found(self, query: str, mistake: str, exported: Exports) -> None:
        if "[5m]" in query:  # of the job that has it
            query = query.replace("total[", 'total{job="outrider-target"}[')
            query = query.replace("bucket[", 'bucket{job="outrider-coordinator"}[')
        reading = queries.read(query, exported, queries.recorded(all_rules(), exported))
        assert mistake in " ".join(reading.mistakes)

    def test_a_legend_without_its_label_is_found(self, exported: Exports) -> None:
        query = 'sum by (engine) (outrider_draft_sessions{job="outrider-draft"})'
        assert mistakes_of("x", query, "{{engine}}", exported) == []
        assert mistakes_of("x", query, "{{model_name}}", exported) == ["x: its legend names model_name"]


class TestDashboards:
    @pytest.mark.parametrize("dashboard", committed_dashboards(), ids=list(DASHBOARDS))
    def test_grafana_can_read_them_and_so_can_people(self, dashboard: Json) -> None:
        assert list(grafana.mistakes(dashboard)) == []

    def test_they_are_fresh(self, tmp_path: Path) -> None:
        write(tmp_path)
        stale = [
            name
            for name in DASHBOARDS
            if (tmp_path / f"{name}.json").read_bytes() != (FOLDER / f"{name}.json").read_bytes()
        ]
        assert not stale, "run `python -m k8s.dashboards`"

    def test_runbooks_that_panels_name_are_those_of_alerts(self) -> None:
        named = {
            name
            for dashboard in committed_dashboards()
            for panel in dashboard["panels"]
            for name in re.findall(r"runbook (\w+)", panel.get("description", ""))
        }
        assert len(named) > 10
        assert named <= {alert["alert"] for alert in all_alerts()}

    @pytest.mark.parametrize(
        ("spoil", "mistake"),
        [
            (lambda board: board["panels"][2].update(id=board["panels"][1]["id"]), "have the id"),
            (
                lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(unit="seconds"),
                "is not valid",
            ),
            (lambda board: board["panels"][1]["fieldConfig"]["defaults"].pop("unit"), "is not valid"),
            (lambda board: board["panels"][1].update(targets=[]), "is not valid"),
            (lambda board: board["panels"][1].update(description="Requests."), "does not say how to read it"),
            (lambda board: board["panels"][1].update(colour="red"), "is not valid"),
            (lambda board: board["panels"][1]["gridPos"].update(x=8), "lie on each other"),
            (lambda board: board["panels"][3]["gridPos"].update(x=17), "right edge"),
            (lambda board: board.update(refreshes="1s"), "refreshes"),
        ],
    )
    def test_a_mistake_is_found(self, spoil: Callable[[Json], object], mistake: str) -> None:
        board = DASHBOARDS["service"].to_json()
        spoil(board)
        assert mistake in " ".join(grafana.mistakes(board))


class TestAlerts:
    def test_each_says_how_bad_it_is_and_what_to_do(self, anchors: set[str], exported: Exports) -> None:
        assert list(alerts.without_a_way_out(all_alerts(), anchors)) == []
        recorded = queries.recorded(all_rules(), exported)
        for alert in all_alerts():
            labels = queries.read(alert["expr"], exported, recorded).labels or ()
            assert list(alerts.naming_labels_it_has_not(alert, labels)) == []

    def test_runbooks_are_of_alerts_that_there_are(self, anchors: set[str]) -> None:
        names = {alert["alert"].lower() for alert in all_alerts()}
        assert {anchor for anchor in anchors if anchor.startswith("outrider")} == names

    def test_each_runbook_has_a_query_causes_and_what_to_do(self) -> None:
        asked = {where.removeprefix("runbook ") for where, _, _ in runbook_queries()}
        assert asked == {alert["alert"] for alert in all_alerts()}
        text = GUIDE.read_text(encoding="utf-8")
        for word in ("Likely causes", "What to do"):
            assert text.count(f"- **{word}:**") == len(asked)

    def test_names_are_given_once(self) -> None:
        names = [rule.get("alert") or rule["record"] for rule in all_rules()]
        assert len(set(names)) == len(names)

    def test_each_is_tested(self) -> None:
        assert list(alerts.untested(all_alerts(), all_tests())) == []

    @pytest.mark.parametrize(
        ("spoil", "mistake"),
        [
            (lambda alert: alert["labels"].clear(), "has no severity"),
            (lambda alert: alert["annotations"].pop("summary"), "has no summary"),
            (lambda alert: alert["annotations"].update(runbook_url=f"{alerts.GUIDE}nowhere"), "no heading"),
            (
                lambda alert: alert["annotations"].update(runbook_url=f"{alerts.GUIDE}outriderkvfull"),
                "another",
            ),
        ],
    )
    def test_a_mistake_is_found(self, spoil: Callable[[Json], object], mistake: str, anchors: set[str]) -> None:
        alert = copy.deepcopy(all_alerts()[0])
        spoil(alert)
        assert mistake in " ".join(alerts.without_a_way_out([alert], anchors))

    def test_a_heading_that_is_missing_is_found(self, anchors: set[str]) -> None:
        assert list(alerts.without_a_way_out(all_alerts(), anchors - {"outriderkvfull"}))

    def test_a_label_that_an_alert_has_not_is_found(self) -> None:
        alert = {"alert": "X", "annotations": {"summary": "{{ $labels.model_name }}"}}
        assert list(alerts.naming_labels_it_has_not(alert, ["namespace"]))

    @pytest.mark.parametrize("lost", ["exp_samples", "name"])
    def test_an_alert_without_a_test_is_found(self, lost: str) -> None:
        tests = copy.deepcopy(all_tests())
        for test in tests:
            if test["name"] == "OutriderKvFull":
                for question in test["promql_expr_test"]:
                    question["exp_samples"] = []  # silent for ever
                if lost == "name":
                    test["name"] = "OutriderKvFul"
        found = list(alerts.untested(all_alerts(), tests))
        assert found[0] == "OutriderKvFull is never seen to fire"
        assert len(found) == (2 if lost == "name" else 1)


@needs_promtool
class TestPromtool:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The tests, and beside them the rules as Prometheus reads them."""
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(prometheus_rules()), encoding="utf-8")
        for path in TESTS:
            shutil.copy(path, tmp_path)
        return tmp_path

    def run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=60)

    def test_rules_are_valid(self, folder: Path) -> None:
        done = self.run(folder, "check", "rules", "rules.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    def test_the_configuration_without_the_operator_is_valid(self, folder: Path) -> None:
        shutil.copy(MONITORING / "prometheus.yaml", folder)
        (folder / "tls").mkdir()
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (folder / "tls" / name).write_text("checked elsewhere")
        done = self.run(folder, "check", "config", "--syntax-only", "prometheus.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize("name", [path.name for path in TESTS])
    def test_alerts_fire_when_they_should_and_not_before(self, folder: Path, name: str) -> None:
        done = self.run(folder, "test", "rules", name)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_an_alert_that_fires_too_soon_is_found(self, folder: Path) -> None:
        spoilt = prometheus_rules()
        for group in spoilt["groups"]:
            for rule in group["rules"]:
                if rule.get("alert") == "OutriderKvFull":
                    rule["for"] = "5m"
        (folder / "rules.yaml").write_text(yaml.safe_dump(spoilt), encoding="utf-8")
        assert self.run(folder, "test", "rules", "memory.yaml").returncode != 0


class TestComponent:
    @pytest.mark.parametrize(
        ("kind", "place", "field"),
        [("PodMonitor", "podMetricsEndpoints", "ports"), ("PrometheusRule", "groups", "rule")],
    )
    def test_a_misspelt_field_is_found(self, kind: str, place: str, field: str) -> None:
        spoilt = next(each for each in rendered("llama-70b") if each["kind"] == kind)
        check_custom_resource(spoilt)
        spoilt["spec"][place][0][field] = "x"
        with pytest.raises(AssertionError, match=field):
            check_custom_resource(spoilt)

    def test_jobs_are_those_that_rules_and_dashboards_select(self, exported: Exports) -> None:
        with_operator = {
            relabeling["replacement"]
            for monitor in rendered("llama-70b")
            if monitor["kind"] == "PodMonitor"
            for endpoint in monitor["spec"]["podMetricsEndpoints"]
            for relabeling in endpoint["relabelings"]
            if relabeling["targetLabel"] == "job"
        }
        (configuration,) = all_of(MONITORING / "prometheus.yaml")
        without = {each["job_name"] for each in configuration["scrape_configs"]}
        assert with_operator == without == exported.keys()

    def test_production_has_it_and_its_monitors_find_pods(self) -> None:
        objects = rendered("llama-70b")
        kinds = {each["kind"] for each in objects}
        assert {"PodMonitor", "PrometheusRule"} <= kinds
        assert list(rules.monitors_that_find_nothing(objects)) == []
        (boards,) = [each for each in objects if "grafana_dashboard" in each["metadata"].get("labels", {})]
        assert {name.removeprefix("outrider-").removesuffix(".json") for name in boards["data"]} == set(DASHBOARDS)

    @pytest.mark.parametrize("mistake", ["port", "selector"])
    def test_a_monitor_that_finds_nothing_is_found(self, mistake: str) -> None:
        objects = rendered("llama-70b")
        monitor = next(each for each in objects if each["kind"] == "PodMonitor")
        if mistake == "port":
            monitor["spec"]["podMetricsEndpoints"][0]["port"] = "replica"
        else:
            monitor["spec"]["selector"]["matchLabels"] = {NAME: "coordinators"}
        assert len(list(rules.monitors_that_find_nothing(objects))) == 1

    def test_with_certificates_monitors_show_theirs(self) -> None:
        objects = rendered("llama-70b")
        assert any(each["kind"] == "Certificate" for each in objects)
        monitors = [each for each in objects if each["kind"] == "PodMonitor"]
        (configuration,) = all_of(MONITORING / "prometheus.yaml")
        expected = {
            each["job_name"]: (each["scheme"], each["tls_config"]["server_name"])
            for each in configuration["scrape_configs"]
        }
        assert len(monitors) == len(expected)
        for monitor in monitors:
            check(monitor)
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                job = endpoint["relabelings"][0]["replacement"]
                assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == expected[job]

    def test_each_replica_that_a_pod_has_room_for_is_scraped(self) -> None:
        objects = rendered("llama-70b")
        (service,) = [each for each in objects if each["kind"] == "RayService"]
        serve = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
        (container,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
        num_cpus = serve["deployments"][0]["ray_actor_options"]["num_cpus"]
        fitting = int(container["resources"]["requests"]["cpu"]) // num_cpus
        num_replicas = min(fitting, serve["deployments"][0].get("max_replicas_per_node", fitting))
        first = serve["args"]["metrics_port"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert [named.get(f"replica-{index}") for index in range(num_replicas)] == [*range(first, first + num_replicas)]
        (monitor,) = [
            each
            for each in objects
            if (each["kind"], each["metadata"]["name"]) == ("PodMonitor", "outrider-coordinator")
        ]
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert scraped == {name for name in named if name.startswith("replica-")}


def test_a_schema_refuses_what_it_does_not_know() -> None:
    assert not jsonschema.Draft202012Validator(grafana.DASHBOARD).is_valid({})
