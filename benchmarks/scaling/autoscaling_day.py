"""Checks that the two pools scale independently.

A day of traffic is replayed against a model of the fleet (`autoscaling_model`): random arrivals,
targets with a fixed number of slots, draft workers that speed up their requests, starts that take minutes. Every
15 s of that day the queries of the chart's ScaledObjects are answered, and the their autoscalers
apply Kubernetes' formula (`horizontal_autoscaler`).

There are two kinds of traffic. People, most of them in the afternoon, have outputs that are easy to draft. Batches, at
night, have not: they are in fallback and have no draft worker. So the night needs targets and no drafts, the day both.

With `--prometheus` the metrics of that day are loaded into a real Prometheus. It answers the ScaledObjects' queries for
each moment of the day, and the resulting decisions are compared with those of the replay. Nothing here measures speed:
the result is the number of replicas of each pool over time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.scaling.autoscaling_model import (
    DAY_S,
    KV_SHARE,
    LEAD_S,
    Fleet,
    Moment,
    autoscalers,
    num_reversals,
    replay,
)
from benchmarks.scaling.horizontal_autoscaler import SYNC_S
from command_line.bench.plot import Line, Panel
from command_line.bench.plot import draw as chart
from outrider.local.free_ports import free_ports

OWN: Final = 'namespace="outrider",model_name="llama-3.3-70b"'


def exposition(moments: Sequence[Moment], base_s: int) -> Iterator[str]:
    """Metrics of the fleet's processes, in OpenMetrics' text format with timestamps."""
    families: dict[str, list[str]] = {}

    def put(name: str, labels: str, moment: Moment, value: float) -> None:
        at_s = base_s + LEAD_S + moment.at_s
        families.setdefault(name, []).append(f"outrider_{name}{{{labels}}} {value:.6g} {at_s:.3f}")

    for moment in moments:
        for index in range(moment.targets):
            labels = f'job="outrider-target",{OWN},engine="target-{index}"'
            own = moment.num_running // moment.targets + (index < moment.num_running % moment.targets)
            put("num_requests_running", labels, moment, own)
            put("num_requests_waiting", labels, moment, 0)
            put("kv_cache_usage_perc", labels, moment, own * KV_SHARE)
        # Two coordinators share the waiting and the speculating requests.
        for index in range(2):
            labels = f'job="outrider-coordinator",{OWN},engine="coordinator",instance="c-{index}"'

            def half(value: int, index: int = index) -> int:
                return value // 2 + (value % 2 if index else 0)

            put("num_requests_queued", labels, moment, half(moment.num_waiting))
            num_drafted = min(moment.num_drafted, moment.num_paying)
            counts = {
                "speculating": num_drafted,
                "undrafted": moment.num_paying - num_drafted,
                "paused": moment.num_running + moment.num_waiting - moment.num_paying,
            }
            for state, count in counts.items():
                put("fallback_requests", f'{labels},state="{state}"', moment, half(count))
    for name, lines in families.items():
        yield f"# TYPE outrider_{name} gauge"
        yield from lines
    yield "# EOF"


def check_with_prometheus(moments: Sequence[Moment], prometheus: str, promtool: str) -> int:
    """Number of moments at which a real Prometheus' answers to the ScaledObjects' queries lead to other decisions.

    Raises RuntimeError if it does not run.
    """
    base_s = int(time.time()) // 3600 * 3600 - 2 * DAY_S
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "day.txt")
        text.write_text("\n".join(exposition(moments, base_s)) + "\n", encoding="utf-8")
        made = subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", str(text), f"{folder}/data"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"promtool: {made.stderr[-500:]}")
        (port,) = free_ports(1)
        Path(folder, "prometheus.yml").write_text("scrape_configs: []\n", encoding="utf-8")
        words = [
            prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            # A scrape marks vanished series as stale; a file cannot.
            f"--query.lookback-delta={SYNC_S - 1:g}s",
        ]  # fmt: skip
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return _num_differences(moments, base_s, f"http://127.0.0.1:{port}")
        finally:
            server.terminate()
            server.wait(30)


def _num_differences(moments: Sequence[Moment], base_s: int, url: str) -> int:
    scalers = autoscalers()
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        _wait_until_ready(client)
        answers = {
            pool: [_asked(client, trigger.query, moments, base_s) for trigger in scaler.triggers]
            for pool, scaler in scalers.items()
        }
    replicas = {"target": 1, "draft": 0}
    num_different = 0
    for index, moment in enumerate(moments):
        for pool, scaler in scalers.items():
            totals = [series[index] for series in answers[pool]]
            replicas[pool] = scaler.decide(moment.at_s, replicas[pool], totals)
        num_different += (replicas["target"], replicas["draft"]) != (
            moment.wanted_targets,
            moment.wanted_drafts,
        )
    return num_different


def _asked(client: httpx.Client, query: str, moments: Sequence[Moment], base_s: int) -> list[float]:
    """The query's value at each moment."""
    start = base_s + LEAD_S + moments[0].at_s
    values: list[float] = []
    for first in range(0, len(moments), 10_000):  # below the most points that Prometheus returns at once
        part = moments[first : first + 10_000]
        asked: dict[str, str | float] = {
            "query": query,
            "start": start + first * SYNC_S,
            "end": start + (first + len(part) - 1) * SYNC_S,
            "step": SYNC_S,
        }
        answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
        (series,) = answer["data"]["result"]
        values += [float(value) for _, value in series["values"]]
    assert len(values) == len(moments), f"{query}: {len(values)} answers for {len(moments)} moments"
    return values


def _wait_until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError("Prometheus did not become ready within a minute")
        time.sleep(0.1)


def draw(moments: Sequence[Moment]) -> str:
    """Draws the day as SVG: requests of both kinds, and replicas of each pool."""
    day = [each for each in moments if each.at_s >= 0][:: round(900 / SYNC_S)]  # a point every 15 minutes
    hours = [f"{each.at_s / 3600:g}:00" if each.at_s % (4 * 3600) == 0 else "" for each in day]
    requests = {
        "requests that speculate, or would": [each.num_paying for each in day],
        "requests in fallback": [each.num_running + each.num_waiting - each.num_paying for each in day],
    }
    replicas = {
        "draft workers": [each.wanted_drafts for each in day],
        "target workers": [each.wanted_targets for each in day],
    }
    panels = [
        Panel(title, "", hours, [Line(values, first + place) for place, values in enumerate(lines.values())])
        for title, first, lines in (("requests at once", 0, requests), ("replicas wanted", 2, replicas))
    ]
    return chart("One day, two pools", panels, [*requests, *replicas])


def summary(moments: Sequence[Moment], fleet: Fleet) -> dict[str, Any]:
    """The figures that the documentation states."""
    day = [moment for moment in moments if moment.at_s >= 0]

    def by_hour(hours: range, name: str) -> float:
        chosen = [getattr(each, name) for each in day if int(each.at_s // 3600) in hours]
        return round(sum(chosen) / len(chosen), 1)

    return {
        "requests": fleet.num_served,
        "night": {name: by_hour(range(1, 4), name) for name in ("wanted_targets", "wanted_drafts")},
        "afternoon": {name: by_hour(range(13, 16), name) for name in ("wanted_targets", "wanted_drafts")},
        "quiet morning": {name: by_hour(range(7, 8), name) for name in ("wanted_targets", "wanted_drafts")},
        "reversals": {
            "target": num_reversals([each.wanted_targets for each in day]),
            "draft": num_reversals([each.wanted_drafts for each in day]),
        },
        "share of moments with texts waiting": round(sum(each.num_waiting > 0 for each in day) / len(day), 4),
        "speculating texts without a draft": round(
            1 - sum(each.num_drafted for each in day) / max(sum(each.num_paying for each in day), 1), 4
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks autoscaling_day", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the day as SVG")
    parser.add_argument("--prometheus", action="store_true", help="compare with a real Prometheus from the PATH")
    given = parser.parse_args(arguments)
    moments, fleet = replay(given.seed)
    print(json.dumps(summary(moments, fleet), indent=2))
    if given.plot is not None:
        given.plot.write_text(draw(moments), encoding="utf-8")
    if given.prometheus:
        programs = shutil.which("prometheus"), shutil.which("promtool")
        if programs[0] is None or programs[1] is None:
            print(
                "prometheus and promtool are not in the PATH (Debian: apt-get install prometheus)",
                file=sys.stderr,
            )
            return 2
        num_different = check_with_prometheus(moments, programs[0], programs[1])
        print(f"decisions from Prometheus' answers: {num_different} of {len(moments)} differ")
        return 1 if num_different else 0
    return 0
