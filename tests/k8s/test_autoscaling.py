"""The ScaledObjects over a day of traffic: the pools scale apart, do not flap, and a real Prometheus agrees."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.scaling import autoscaling_model
from benchmarks.scaling.autoscaling_day import check_with_prometheus, draw, exposition, summary
from benchmarks.scaling.autoscaling_model import (
    SLOTS,
    Fleet,
    Moment,
    Text,
    autoscalers,
    num_reversals,
    replay,
)
from benchmarks.scaling.horizontal_autoscaler import Autoscaler
from coordinator.observability.metrics import CoordinatorMetrics
from outrider.observability.telemetry import TargetMetrics

Day = tuple[list[Moment], Fleet]

REVERSALS_MAX = 16  # of a pool in a day that has two waves; without any calm there are hundreds


@pytest.fixture(scope="module", params=[1, 2, 3])
def day(request: pytest.FixtureRequest) -> Day:
    return replay(int(request.param))


def test_the_night_has_targets_and_no_drafts_and_the_day_both(day: Day) -> None:
    found = summary(*day)
    assert found["night"]["wanted_targets"] >= 4
    assert found["night"]["wanted_drafts"] <= 1
    assert found["afternoon"]["wanted_targets"] >= 4
    assert found["afternoon"]["wanted_drafts"] >= 4
    assert found["quiet morning"] == {"wanted_targets": 1.0, "wanted_drafts": 1.0}


def test_neither_pool_flaps(day: Day) -> None:
    moments, _ = day
    for name in ("wanted_targets", "wanted_drafts"):
        assert num_reversals([getattr(each, name) for each in moments]) <= REVERSALS_MAX


def test_without_the_calm_of_the_manifests_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the bound above says something."""

    def hasty() -> dict[str, Autoscaler]:
        made = autoscalers()
        for scaler in made.values():
            scaler.up = replace(scaler.up, window_s=0)
            scaler.down = replace(scaler.down, window_s=0)
        return made

    monkeypatch.setattr(autoscaling_model, "autoscalers", hasty)
    moments, _ = replay(1)
    assert num_reversals([each.wanted_drafts for each in moments]) > 10 * REVERSALS_MAX


def test_most_texts_that_speculate_have_a_draft_worker_and_few_wait(day: Day) -> None:
    found = summary(*day)
    assert found["speculating texts without a draft"] < 0.1
    assert found["share of moments with texts waiting"] < 0.1


def test_requests_are_those_of_the_day_and_not_of_the_hour_before() -> None:
    fleet = Fleet(random.Random(1))
    for now_s, is_counted in ((-Fleet.STEP_S, False), (0.0, True)):
        fleet.running = [Text(pays=False, num_left=1.0)]
        fleet.advance(now_s)
        assert (fleet.num_served > 0) is is_counted


def test_a_worker_is_asked_to_carry_less_than_it_can() -> None:
    """Whoever starts another only when one is full lets everybody wait for as long as a start takes."""
    for scaler in autoscalers().values():
        assert scaler.triggers[0].threshold < SLOTS


def test_drafts_may_go_to_zero_and_targets_may_not() -> None:
    made = autoscalers()
    assert (made["draft"].min_replicas, made["target"].min_replicas) == (0, 1)


def test_the_picture_shows_both_pools(day: Day) -> None:
    picture = draw(day[0])
    assert picture.startswith("<svg")
    for name in ("draft workers", "target workers", "in fallback"):
        assert name in picture


@pytest.mark.slow
def test_a_real_prometheus_leads_to_the_same_decisions() -> None:
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus is None or promtool is None:
        pytest.skip("prometheus and promtool are not in the PATH (Debian: apt-get install prometheus)")
    moments, _ = replay(1)
    assert check_with_prometheus(moments, prometheus, promtool) == 0


def test_what_prometheus_is_given_are_the_names_that_processes_export() -> None:
    moments, _ = replay(1)
    given = {line.split()[2] for line in exposition(moments[-4:], 0) if line.startswith("# TYPE")}
    exported = {
        family.name
        for registry in (CoordinatorMetrics().registry, TargetMetrics("m", "w").registry)
        for family in registry.collect()
    }
    assert given <= exported


def answers(query: str, series: Mapping[str, int], folder: Path) -> list[float]:
    """The values of a query's answer over these series, by promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not in the PATH (Debian: apt-get install prometheus)")
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": f"{value}x8"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "1m", "exp_samples": [{"labels": "{no='such'}", "value": 0}]}
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    got = re.search(r"got:\s*(.*)", done.stdout + done.stderr)
    assert got is not None, done
    return [float(value) for value in re.findall(r"\{\} ([-+.\dE]+)", got[1])]


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_where_no_request_was_yet_the_answer_is_nothing_to_do_and_not_no_answer(pool: str, tmp_path: Path) -> None:
    """Workers load at a cold start, and coordinators have counted nothing: without an answer KEDA would add workers."""
    metrics = TargetMetrics("m", "target-0")
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    own = 'job="outrider-target",namespace="outrider",engine="target-0",model_name="llama-3.3-70b"'
    loading = {
        f"{sample.name}{{{own}}}": int(sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith(("outrider_num_requests", "outrider_kv_cache_usage"))
    }
    assert len(loading) == 3
    coordinator = {'up{job="outrider-coordinator",namespace="outrider"}': 1}
    for trigger in autoscalers()[pool].triggers:
        assert answers(trigger.query, loading | coordinator, tmp_path) == [0.0]
    assert answers(autoscalers()[pool].triggers[0].query, {"up": 0}, tmp_path) == [], "the pool must not shrink"
