"""Compares the simulator's prediction with a real coordinator in front of targets whose step times are known.

The coordinator, Redis and the clients are real. The targets have the product's service and scheduler, and their steps
take the time that the flags name instead of a model's. `outrider simulate` gets the same step times, requests and
number of streams. Both run a closed loop of plain decoding, and both measure the requests that end in a stretch of
time. Between two steps nothing but the network and the coordinator is left to differ.

The exit status is 1 if throughput, or the median of TTFT or TPOT, differs by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.scaling.fake_fleet import Front, fake_targets, front, registry
from benchmarks.shared.figures import percentile, rounded
from benchmarks.shared.json_process import JsonProcess
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, report, say
from command_line.simulate.report import STEP_US
from command_line.simulator.fleet import DraftPool, Fleet, Network, RequestKind, TargetPool, Traffic
from command_line.simulator.world import Outcome, World

MODEL: Final = "fake"
CHECKED: Final = ("tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
_OPEN_PER_S: Final = 150.0


def fleet_of(arguments: argparse.Namespace, num_streams: int) -> Fleet:
    """The fleet and the load that the flags describe, as the simulator takes them."""
    return Fleet(
        target=TargetPool(
            count=arguments.targets,
            fixed_ms=arguments.fixed_ms,
            token_ms=arguments.token_ms,
            sequence_ms=arguments.sequence_ms,
            max_num_seqs=arguments.sessions,
        ),
        draft=DraftPool(count=0),
        network=Network(step_us=arguments.step_us),
        traffic=Traffic(concurrency=num_streams, warmup_s=arguments.warmup_s, seconds=arguments.predicted_s),
        kinds=(
            RequestKind(
                prompt_tokens=(arguments.prompt_tokens, arguments.prompt_tokens),
                output_tokens=tuple(arguments.output_tokens),
            ),
        ),
    )


def predicted(outcome: Outcome) -> dict[str, float]:
    """The simulator's figures under the names of the measured ones."""
    found = {"tokens_per_s": outcome.tokens_per_s}
    for name, percentiles in (("ttft", outcome.ttft_ms), ("tpot", outcome.tpot_ms)):
        if percentiles is not None:
            found |= {f"{name}_p50_ms": percentiles.p50, f"{name}_p90_ms": percentiles.p90}
    return found


def measured(counted: Mapping[str, Any]) -> dict[str, float]:
    """The clients' figures."""
    found = {"tokens_per_s": counted["num_tokens"] / counted["seconds"]}
    for name in ("ttft", "tpot"):
        values = counted[f"{name}_ms"]
        found |= {f"{name}_p{share}_ms": percentile(values, share / 100) for share in (50, 90)}
    return found


def compare(real: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Each figure as measured and as predicted, and the ratio of the two."""
    return {
        name: {
            "measured": rounded(value),
            "predicted": rounded(simulated[name]),
            "predicted_over_measured": rounded(simulated[name] / value),
        }
        for name, value in real.items()
        if name in simulated
    }


def disagreements(compared: Mapping[str, Mapping[str, float]], tolerance: float) -> list[str]:
    """The checked figures that differ by more than the tolerance, as a share of the measured value, or are missing."""
    found = [name for name in CHECKED if name not in compared]
    for name in compared.keys() & set(CHECKED):
        ratio = compared[name]["predicted_over_measured"]
        if not abs(ratio - 1.0) <= tolerance:
            found.append(f"{name}: predicted is {ratio:g} of measured")
    return sorted(found)


async def serve(arguments: argparse.Namespace, targets: JsonProcess, found: Front, num_streams: int) -> dict[str, Any]:
    """Runs the closed loop; returns what the clients counted, and the coordinator's use of processors."""
    await found.clients.ask(
        do="open",
        protocol=arguments.protocol,
        address=found.address(arguments.protocol),
        model=MODEL,
        num=num_streams,
        per_s=_OPEN_PER_S,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        repeats=True,
        stamps=False,
        token_ids=targets.facts["token_ids"],
    )
    await asyncio.sleep(arguments.warmup_s)
    await found.clients.ask(do="begin")
    before_s = found.coordinator.cpu_s()
    await asyncio.sleep(arguments.seconds)
    used_s = found.coordinator.cpu_s() - before_s
    counted = await found.clients.ask(do="end")
    await found.clients.ask(do="close")
    await found.wait_for("outrider_num_requests_running", {"model_name": MODEL}, 0)
    if counted["failures"]:
        raise RuntimeError(f"requests failed: {counted['failures']}")
    return counted | {"coordinator_cores": used_s / counted["seconds"]}


async def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    levels: dict[str, Any] = {}
    wrong = []
    shape = {name: getattr(arguments, name) for name in ("targets", "fixed_ms", "token_ms", "sequence_ms")}
    with registry() as url:
        async with (
            fake_targets(MODEL, url, **shape, max_num_seqs=arguments.sessions) as targets,
            front(url, arguments.targets) as found,
        ):
            for num_streams in arguments.streams:
                counted = await serve(arguments, targets, found, num_streams)
                say(f"{num_streams} streams: {len(counted['ttft_ms'])} requests ended")
                levels[str(num_streams)] = counted
    for num_streams in arguments.streams:
        outcome, counted = World(fleet_of(arguments, num_streams)).run(), levels[str(num_streams)]
        compared = compare(measured(counted), predicted(outcome))
        levels[str(num_streams)] = {
            **compared,
            "requests_ended": len(counted["ttft_ms"]),
            "coordinator_cores": rounded(counted["coordinator_cores"]),
            "predicted_coordinator_cores": rounded(outcome.coordinator_utilisation or 0.0),
            "simulated_in_s": rounded(outcome.wall_s),
        }
        wrong += [f"{num_streams} streams: {each}" for each in disagreements(compared, arguments.tolerance)]
    return {"levels": levels, "wrong": wrong}, wrong


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[50, 200], help="(default: %(default)s)")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http", help="(default: %(default)s)")
    parser.add_argument("--targets", type=int, default=4, help="target workers (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=64, help="batch slots of each (default: %(default)s)")
    parser.add_argument("--fixed-ms", type=float, default=80.0, help="of a step (default: %(default)s)")
    parser.add_argument("--token-ms", type=float, default=0.2, help="of a step, per token (default: %(default)s)")
    parser.add_argument("--sequence-ms", type=float, default=0.4, help="of a step, per session (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument(
        "--output-tokens", type=int, nargs=2, default=[40, 80], help="least and most (default: %(default)s)"
    )
    parser.add_argument(
        "--step-us", type=float, default=STEP_US,
        help="of a coordinator's processor per step and stream, for the simulator (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--warmup-s", type=float, default=15.0, help="before the measurement (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement (default: %(default)s)")
    parser.add_argument("--predicted-s", type=float, default=60.0, help="of the simulated one (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.1, help="as a share (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    result, wrong = asyncio.run(run(arguments))
    report(arguments, {"machine": machine(), "arguments": given(arguments), **result})
    for each in wrong:
        say(f"NOT WITHIN BOUNDS: {each}")
    return 1 if wrong else 0
