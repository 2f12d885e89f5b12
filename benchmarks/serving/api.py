"""Compares Outrider's and vLLM's HTTP servers under the same load.

`outrider serve` (a target worker, a draft worker and the coordinator), vLLM's server plain and vLLM's server with the
same draft run together on the same two cores. The load generator of `outrider bench` measures them alternately: in
each round, at each level, every system has one turn, and the first system rotates. Outrider counts as two systems,
with speculation on and, by a field of the request, off. Idle servers keep running; the result shows their CPU use
(`idle_cores`). The client shares the two cores with all of them.

vLLM's engine has one core by default; the other is for its HTTP front and the client. With its threads on both cores
(--vllm-cores 0-1) they spin where the front should run, and the server was several times slower.

A closed loop (--concurrency) measures capacity, an open loop (--rate) what users see: TTFT, TPOT, ITL, E2EL and, with
an objective (--slo-ttft-ms, --slo-tpot-ms), goodput. Decoding is greedy, every answer has the requested length, and
all systems get the same held-out prompts in the same order. Prefix caches are on, the servers' default.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.process import PeerError, add_vllm_arguments, check_vllm, idle_costs
from benchmarks.serving.http_servers import (
    ServerCommand,
    outrider_server,
    start_in_turn,
    vllm_server,
)
from benchmarks.shared import plot
from benchmarks.shared.figures import spread
from benchmarks.shared.machine import machine
from benchmarks.shared.options import parser_of, report, say, target_model
from command_line.bench.cells import Cell, TurnResult, cells
from command_line.bench.document import document
from command_line.bench.run import Run
from command_line.bench.runner import ready_servers, run_turns
from command_line.client import COMPLETIONS
from command_line.load.load import Level, Loop, Plan, Turn, parse_levels
from command_line.load.load import turns as turns_of
from command_line.load.prompts import Workload
from command_line.load.requests import Server
from command_line.load.summary import Slo, ratios
from demo.corpus import held_out_prompts
from outrider.errors import InvalidRequest
from outrider.local.free_ports import free_ports

TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class System:
    """A server, and the fields added to each request."""

    name: str
    server: str
    extra: Mapping[str, Any]


SYSTEMS: Final = (
    System("outrider-plain", "outrider", {"speculation": {"enabled": False}}),
    System("outrider-draft", "outrider", {}),
    System("vllm-plain", "vllm-plain", {}),
    System("vllm-draft", "vllm-draft", {}),
)


def schedule(levels: Sequence[Level], num_rounds: int, num_systems: int) -> Iterator[Turn]:
    """Every turn of every system: rounds of all levels; the first system rotates."""
    plan = Plan(tuple(levels), num_rounds, None, None, None, 0)
    yield from turns_of(plan, num_systems)


async def measure(
    systems: Sequence[System],
    urls: Mapping[str, str],
    levels: Sequence[Level],
    workload: Workload,
    arguments: argparse.Namespace,
) -> list[TurnResult]:
    """Runs all turns; results by index into `systems`."""
    measured = []
    servers = [Server(system.name, urls[system.server]) for system in systems]
    waiting = ready_servers(servers, model=None, api_key=None, timeout_s=TIMEOUT_S)
    async with waiting as (client, found):
        for turn in schedule(levels, arguments.rounds, len(systems)):
            # Every turn is a plan of its own, because systems add different fields to requests. The round is
            # part of the seed, so each round has other arrivals, the same for all systems.
            plan = Plan((turn.level,), 1, arguments.requests, arguments.duration_s, arguments.warmup, turn.number)
            asking = replace(workload, extra=systems[turn.server].extra)
            say(f"round {turn.number + 1} of {arguments.rounds}, {turn.level}, {systems[turn.server].name}")
            one = run_turns(client, [found[turn.server]], plan, asking, timeout_s=TIMEOUT_S, on_request=lambda *_: None)
            measured += [replace(result, turn=turn) async for result in one]
    return measured


def compare(found: Sequence[Cell]) -> dict[str, Any]:
    """Ratios of one system to another by level: tokens per second within rounds, and TPOT p50."""
    pairs = (
        ("outrider-draft", "outrider-plain"),
        ("vllm-draft", "vllm-plain"),
        ("outrider-draft", "vllm-draft"),
        ("outrider-draft", "vllm-plain"),
        ("outrider-plain", "vllm-plain"),
    )
    made: dict[str, Any] = {}
    for level in dict.fromkeys(cell.level for cell in found):
        by_name = {cell.server: cell for cell in found if cell.level == level}
        made[str(level)] = {
            f"{ours} / {theirs}": spread(
                ratios(
                    [each.output_tokens_per_s for each in by_name[ours].rounds],
                    [each.output_tokens_per_s for each in by_name[theirs].rounds],
                )
            )
            for ours, theirs in pairs
            if ours in by_name and theirs in by_name
        }
    return made


def commands(arguments: argparse.Namespace, systems: Sequence[System], target: Path) -> list[ServerCommand]:
    """Commands of the servers that the systems need, each once."""
    ports = free_ports(4)
    needed = dict.fromkeys(system.server for system in systems)
    made = []
    for name in needed:
        if name == "outrider":
            made.append(outrider_server(target, arguments.draft, port=ports[0], grpc_port=ports[1]))
            continue
        made.append(
            vllm_server(
                arguments.vllm_python,
                target,
                arguments.draft if name == "vllm-draft" else None,
                port=ports[2 if name == "vllm-plain" else 3],
                num_speculative_tokens=arguments.num_speculative_tokens,
                max_num_seqs=32,
                cores=arguments.vllm_cores,
                preload=arguments.vllm_preload,
            )
        )
    return made


async def run(
    arguments: argparse.Namespace, systems: Sequence[System], levels: Sequence[Level]
) -> tuple[dict[str, Any], list[Cell]]:
    """Runs the benchmark; returns the result without the machine's description, and its cells."""
    prompts = tuple(held_out_prompts(arguments.prompts, seed=arguments.seed))
    workload = Workload(COMPLETIONS, prompts, arguments.tokens, 0.0, None, True, {})
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    with tempfile.TemporaryDirectory() as logs, target_model(arguments) as target:
        async with AsyncExitStack() as stack:
            servers = await start_in_turn(commands(arguments, systems, target), Path(logs))
            for server in servers:
                stack.push_async_callback(server.stop)
            urls = {server.asked.name: server.asked.url for server in servers}
            idle = await idle_costs({server.asked.name: [server.pid] for server in servers}, seconds=3.0)
            measured = await measure(systems, urls, levels, workload, arguments)
    plan = Plan(tuple(levels), arguments.rounds, arguments.requests, arguments.duration_s, arguments.warmup, 0)
    bench = Run(tuple(Server(system.name, "", "") for system in systems), plan, workload, slo, TIMEOUT_S)
    found = cells([system.name for system in systems], measured, slo)
    load = document(bench, found, has_requests=False, is_cut_short=False)
    vllm = {
        "cores": arguments.vllm_cores,
        "preload": [path.name for path in arguments.vllm_preload],
        "num_speculative_tokens": arguments.num_speculative_tokens,
    }
    return {"vllm": vllm, "processes": idle, "ratios": compare(found), "load": load}, found


def draw(path: Path, found: Sequence[Cell], title: str) -> None:
    """Draws tokens per second over the level, a line per system; whiskers are the extremes over rounds."""
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    for cell in found:
        rate = cell.over_rounds["output_tokens_per_s"]
        if rate is not None:
            point = (cell.level.value, rate.median, rate.min, rate.max)
            series.setdefault(cell.server, []).append(point)
    is_open = any(cell.level.loop is Loop.OPEN for cell in found)
    plot.lines(path, title, series, "requests/s" if is_open else "streams", "tokens/s")


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[System], tuple[Level, ...]]:
    parser = parser_of(__doc__, draws="tokens per second over the levels")
    add_vllm_arguments(parser)
    parser.add_argument("--vllm-cores", default="0", help="of its engine's threads, such as 0-1 (default %(default)s)")
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", default="1,8,32", help="closed loop: requests in flight (default %(default)s)")
    load.add_argument("--rate", help="open loop instead, requests per second, such as 4,12")
    parser.add_argument("--duration-s", type=float, default=4.0, help="of a turn (default %(default)s)")
    parser.add_argument("--requests", type=int, help="time limit of a turn; default: as many as fit")
    parser.add_argument("--warmup", type=int, help="requests of a turn not counted; default: one per stream")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")
    parser.add_argument("--slo-ttft-ms", type=float, help="longest TTFT that counts as goodput")
    parser.add_argument("--slo-tpot-ms", type=float, help="longest TPOT that counts as goodput")
    parser.add_argument("--num-speculative-tokens", type=int, default=5, help="of vLLM (default %(default)s)")
    arguments = parser.parse_args(argv)
    wanted = arguments.systems or [name for name in names if arguments.vllm_python or not name.startswith("vllm")]
    if arguments.vllm_python is None and any(name.startswith("vllm") for name in wanted):
        parser.error("--systems: vLLM's need --vllm-python")
    loop, text = (Loop.OPEN, arguments.rate) if arguments.rate is not None else (Loop.CLOSED, arguments.concurrency)
    try:
        levels = parse_levels(loop, text)
    except InvalidRequest as error:
        parser.error(str(error))
    return arguments, [system for system in SYSTEMS if system.name in wanted], levels


def main() -> None:
    arguments, systems, levels = parse()
    if arguments.vllm_python is None:
        say("vLLM is left out; --vllm-python names the python of an environment that has it")
    try:
        if arguments.vllm_python is not None:
            check_vllm(arguments.vllm_python)
        result, found = asyncio.run(run(arguments, systems, levels))
    except PeerError as error:
        sys.exit(f"benchmarks.api: {error}")
    size = "target grown to 275 M" if arguments.grown else arguments.target.name
    title = f"HTTP servers on two cores, {arguments.tokens} tokens, {size}"
    report(arguments, {"machine": machine(), **result}, lambda _, path: draw(path, found, title))
