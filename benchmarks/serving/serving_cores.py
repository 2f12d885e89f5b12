"""Compares cores apart and shared through the public API, with hints and without.

`outrider serve` runs twice on the same cores, with a core for each worker (the default) and with `--share-cores`. Each
server counts as two systems, with speculation on and, by a field of the request, off. The load generator of `outrider
bench` measures the four in turns at 1, 8 and 32 streams, so that coordinators and client take their part of the cores.
The small target comes first, then the one grown to 275 M parameters.

The defaults take about twelve minutes on two cores. `--target small --rounds 1 --duration-s 1` shows in a minute that
it runs. A gap is the time between two chunks of one answer. Decoding is greedy, and prefix caches are on.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.serving.api import System, measure
from benchmarks.serving.http_servers import outrider_server, start_in_turn
from benchmarks.shared.figures import rounded
from benchmarks.shared.machine import machine
from benchmarks.shared.options import DEMO, given, report, say
from command_line.bench.cells import Cell, cells
from command_line.client import COMPLETIONS
from command_line.load.load import Level, Loop, parse_levels
from command_line.load.prompts import Workload
from command_line.load.summary import MS_PER_S, Slo, ratios, spread
from demo.corpus import held_out_prompts
from demo.grow import grow
from outrider.local.free_ports import free_ports

SMALL, GROWN = "small", "grown"
SERVERS: Final = {"apart": (), "shared": ("--share-cores",)}
SYSTEMS: Final = tuple(
    System(f"{server}, {hints}", server, {} if hints == "hints" else {"speculation": {"enabled": False}})
    for server in SERVERS
    for hints in ("hints", "plain")
)


def figures(cell: Cell) -> dict[str, Any]:
    """Figures of one system at one level. Times are in milliseconds, over the requests of all rounds."""
    gaps_s = [gap for turn in cell.turns for each in turn.results if each.is_ok for gap in each.itl_s]
    speed = spread(each.output_tokens_per_s for each in cell.rounds)
    summary = cell.summary
    return {
        "tokens_per_s": None if speed is None else [rounded(each) for each in (speed.median, speed.min, speed.max)],
        "gap_ms_p99": None if summary.itl_ms is None else rounded(summary.itl_ms.p99),
        "gap_ms_max": rounded(max(gaps_s) * MS_PER_S) if gaps_s else None,
        "tpot_ms_p99": None if summary.tpot_ms is None else rounded(summary.tpot_ms.p99),
        "num_ok": summary.num_ok,
        "num_failed": summary.num_failed,
        "client_cpu_share": rounded(cell.client_cpu_share),
    }


def compare(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each level, and hints or plain: the figures of both servers, and shared over apart within rounds."""
    rows = []
    for level in dict.fromkeys(cell.level for cell in found):
        by_name = {cell.server: cell for cell in found if cell.level == level}
        for hints in ("hints", "plain"):
            own = {server: by_name[f"{server}, {hints}"] for server in SERVERS}
            rates = {server: [each.output_tokens_per_s for each in cell.rounds] for server, cell in own.items()}
            over = spread(ratios(rates["shared"], rates["apart"]))
            rows.append(
                {
                    "streams": int(level.value),
                    "hints": hints,
                    **{server: figures(cell) for server, cell in own.items()},
                    "shared_over_apart": over and [rounded(each) for each in (over.median, over.min, over.max)],
                }
            )
    return rows


def table(result: Mapping[str, Any]) -> str:
    """The tables of the page of results, and what they were measured with."""
    made = [str(result["machine"])]
    for target, rows in result["targets"].items():
        made += [
            "",
            f"| {target}, streams | cores | tokens/s | gap, p99 | gap, longest | TPOT, p99 | shared over apart |",
            "|---|---|---|---|---|---|---|",
            *(_line(row, server) for row in rows for server in SERVERS),
        ]
    failed = sum(row[server]["num_failed"] for rows in result["targets"].values() for row in rows for server in SERVERS)
    return "\n".join([*made, "", f"{failed} requests failed."])


def _line(row: Mapping[str, Any], server: str) -> str:
    own = row[server]
    shown = [_range(own["tokens_per_s"])]
    shown += [f"{own[name]:.3g} ms" if own[name] is not None else "" for name in _TIMES]
    over = f"{_range(row['shared_over_apart'])}" if server == "shared" else ""
    return f"| {row['streams']}, {row['hints']} | {server} | {' | '.join(shown)} | {over} |"


_TIMES: Final = ("gap_ms_p99", "gap_ms_max", "tpot_ms_p99")


def _range(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:g} ({values[1]:g} to {values[2]:g})"


async def run(
    arguments: argparse.Namespace, target: Path, levels: Sequence[Level], num_tokens: int
) -> list[dict[str, Any]]:
    """Rows of one target."""
    prompts = tuple(held_out_prompts(arguments.prompts, seed=arguments.seed))
    workload = Workload(COMPLETIONS, prompts, num_tokens, 0.0, None, True, {})
    ports = iter(free_ports(2 * len(SERVERS)))
    commands = [
        outrider_server(target, arguments.draft, *words, port=next(ports), grpc_port=next(ports), name=name)
        for name, words in SERVERS.items()
    ]
    with tempfile.TemporaryDirectory() as logs:
        async with AsyncExitStack() as stack:
            servers = await start_in_turn(commands, Path(logs))
            for server in servers:
                stack.push_async_callback(server.stop)
            urls = {server.asked.name: server.asked.url for server in servers}
            measured = await measure(SYSTEMS, urls, levels, workload, arguments)
    return compare(cells([system.name for system in SYSTEMS], measured, Slo()))


async def run_all(arguments: argparse.Namespace, levels: Sequence[Level]) -> dict[str, Any]:
    targets = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.target:
            say(f"target: {name}")
            folder = DEMO / "target"
            if name == GROWN:
                grow(folder, folder := Path(scratch) / GROWN)
            num_tokens = arguments.tokens if name == SMALL else arguments.grown_tokens
            targets[name] = await run(arguments, folder, levels, num_tokens)
    return {"machine": machine(), "arguments": given(arguments), "targets": targets}


def parse(argv: Iterable[str] | None = None) -> tuple[argparse.Namespace, tuple[Level, ...]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=(SMALL, GROWN), default=[SMALL, GROWN])
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", help="model folder of the draft")
    parser.add_argument("--concurrency", default="1,8,32", help="requests in flight (default %(default)s)")
    parser.add_argument("--duration-s", type=float, default=4.0, help="of a turn (default %(default)s)")
    parser.add_argument("--warmup", type=int, help="requests of a turn not counted; default: one per stream")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--grown-tokens", type=int, default=40, help="the same, grown target (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(requests=None)
    arguments = parser.parse_args(None if argv is None else list(argv))
    return arguments, parse_levels(Loop.CLOSED, arguments.concurrency)


def main() -> None:
    arguments, levels = parse()
    report(arguments, asyncio.run(run_all(arguments, levels)), table=table)


if __name__ == "__main__":
    main()
