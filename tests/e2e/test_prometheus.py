"""A real Prometheus, configured as the component `monitoring` has it, beside real processes under load: everything that
is asked is answered, and the dashboards are not empty."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.scaling.autoscaling_model import autoscalers
from tests.e2e.rollout.prometheus import Prometheus
from tests.e2e.secured import SecuredOptions, SecuredSystem
from tests.k8s.test_monitoring import all_alerts, all_queries, committed_dashboards, dashboard_queries

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not here (Debian: apt-get install prometheus)",
    ),
]
TIMEOUT_S = 60.0
# What a fleet that is well has no samples of, or that needs more traffic than a test sends.
MAY_BE_EMPTY = {
    "outrider-speculation: Draft workers whose hints are not accepted",
    "outrider-speculation: Changes of state, per second",
    "outrider-speculation: Probes per second, by outcome",
    "outrider-service: Requests per second, by arm",  # no canary
}
# What judges this machine's speed, or is late once, may be true for a while. Certificates of a day do expire soon.
MAY_BE_PENDING = (
    "OutriderCertificateExpires",
    "OutriderSpeculationSlower",
    "OutriderSlowFirstToken",
    "OutriderScrapeDown",
)


async def until(prometheus: Prometheus, query: str, least: int) -> None:
    """Until so many series answer it."""
    seen: object = None
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if len(found := await prometheus.ask(query)) >= least:
            return
        seen = found
        await asyncio.sleep(0.5)
    raise AssertionError(f"{query} has not had {least} answers in {TIMEOUT_S:g} s; {seen}; {prometheus.log}")


def written_out(query: str) -> str:
    """With what Grafana puts in."""
    for variable, value in (("$__rate_interval", "1m"), ("$namespace", ".*"), ("$model", ".*")):
        query = query.replace(variable, value)
    return query


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredSystem]:
    async with SecuredSystem(SecuredOptions(), tmp_path_factory.mktemp("logs")) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(system: SecuredSystem, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program is not None
    made = Prometheus(program, system, tmp_path_factory.mktemp("prometheus"), scrape_s=1)
    try:
        await made.until_ready()
        await until(made, "up == 1", 3)
        await load(system)
        await until(made, "outrider_spec_decode_num_drafts_total > 0", 1)
        await until(made, "outrider:time_per_output_token_seconds:mean_rate5m", 1)
        yield made
    finally:
        made.stop()


async def load(system: SecuredSystem) -> None:
    """Texts that are drafted for, one that is not, and a mistake of a client's."""
    body = {"model": "target", "prompt": "import os\n", "max_tokens": 64, "temperature": 0}
    kinds = ({"speculation": {"always": True}}, {"n": 2, "seed": 1})
    num_rounds = num_accepted = 0
    async with system.http(system.key) as client:
        # On a busy machine a text may be over before its first hint.
        while num_rounds < 4 or not num_accepted:
            assert num_rounds < 20, "no hint was ever accepted"
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body | each) for each in kinds))
            assert [answer.status_code for answer in answers] == [200, 200]
            statistics = answers[0].json()["metrics"]["speculative_decoding"]
            num_accepted += statistics["num_accepted_draft_tokens"]
            num_rounds += 1
            await asyncio.sleep(1.5)  # over several scrapes, so that there are rates
        plain = await client.post("/v1/completions", json=body | {"speculation": {"enabled": False}})
        wrong = await client.post("/v1/completions", json=body | {"top_p": 7})
        await asyncio.sleep(2.5)
    assert (plain.status_code, wrong.status_code) == (200, 400)


async def test_prometheus_understands_every_query(prometheus: Prometheus) -> None:
    for _, query, _ in all_queries():
        await prometheus.ask(written_out(query))


async def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    empty = [
        where
        for dashboard in committed_dashboards()
        for where, query, _ in dashboard_queries(dashboard)
        if where not in MAY_BE_EMPTY and not await prometheus.ask(written_out(query))
    ]
    assert empty == []


async def test_every_rule_is_evaluated_without_an_error_and_nothing_that_is_well_raises_an_alarm(
    prometheus: Prometheus,
) -> None:
    found = [rule for group in (await prometheus.get("rules"))["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in found} >= {alert["alert"] for alert in all_alerts()}
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    assert await prometheus.ask('ALERTS{alertstate="firing"}') == {}
    assert await prometheus.ask(f'ALERTS{{alertname!~"{"|".join(MAY_BE_PENDING)}"}}') == {}


async def test_the_autoscalers_count_what_runs_and_what_speculates(
    prometheus: Prometheus, system: SecuredSystem
) -> None:
    """The very queries of the ScaledObjects, while eight texts are asked for all the time, two of them plain."""
    queries = {name: scaler.triggers[0].query for name, scaler in autoscalers("target").items()}
    is_over = asyncio.Event()

    async def keep_asking(speculation: dict[str, bool]) -> None:
        body = {"model": "target", "prompt": "import os\n", "max_tokens": 300, "ignore_eos": True}
        async with system.http(system.key) as client:
            while not is_over.is_set():
                answer = await client.post("/v1/completions", json=body | {"speculation": speculation})
                assert answer.status_code == 200, answer.text

    clients = [asyncio.create_task(keep_asking({"always": True})) for _ in range(6)]
    clients += [asyncio.create_task(keep_asking({"enabled": False})) for _ in range(2)]
    try:
        # Scrapes may meet a client between two texts; most do not.
        await until(prometheus, f"({queries['target']}) == 8", 1)
        await until(prometheus, f"({queries['draft']}) == 6", 1)
    finally:
        is_over.set()
        await asyncio.gather(*clients)
    for query in queries.values():
        await until(prometheus, f"({query}) == 0", 1)


async def test_metrics_are_those_of_the_process_that_they_name(prometheus: Prometheus, system: SecuredSystem) -> None:
    for role in ("target", "draft"):
        series = await prometheus.ask(
            f'count by (engine, namespace, host) (outrider_max_num_seqs{{job="outrider-{role}"}})'
        )
        assert series == {f"engine={role}-0,host=127.0.0.1,namespace=outrider": 1.0}
    async with system.http(system.metrics_key) as client:
        door = (await client.get("/metrics")).text  # of the only replica there is
    (line,) = [each for each in door.splitlines() if each.startswith("outrider_generation_tokens_total{")]
    # Nothing is asked for any more, so the next scrape has the value of the page. The last one may be older.
    num_tokens = float(line.rpartition(" ")[2])
    await until(prometheus, f'sum(outrider_generation_tokens_total{{job="outrider-coordinator"}}) == {num_tokens:g}', 1)
