"""`python -m tests.e2e.fuzz`: ten thousand bad inputs for a running system, and a judgement of every answer.

A system of real processes is started: Redis, a target and a draft worker of the demo pair, a coordinator on Ray Serve
with certificates and API keys. Over HTTP, gRPC and broken streams it is sent what fuzzers make: requests from the
published OpenAPI document, bodies and messages near valid ones, bytes that are none, odd heads, keys, frames and event
ids. Nothing of it may be answered with an error of the server's, hold up the coordinator's event loop for more than
50 ms by its work, change another's answer, or leave anything behind.

Exit status: 0 when all of that held, 1 when not, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.cli.system import run_until_signalled
from outrider.errors import OutriderError
from tests.e2e.fuzz.experiment import MAKERS, Experiment, Outcome, Plan
from tests.e2e.fuzz.inputs import Input, from_json


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--inputs", type=int, default=10_000, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of all inputs and their order (default: a new one, which is printed)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=MAKERS,
        metavar="KIND",
        help=f"one of {', '.join(MAKERS)}; may be repeated (default: all)",
    )
    parser.add_argument("--clients", type=int, default=4, help="that send at once (default: %(default)s)")
    parser.add_argument(
        "--tolerate-lag",
        action="store_true",
        help="tell how late the event loop was, and judge the rest: for machines with much other work",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="sends an input that was saved, and nothing else; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was counted")
    parser.add_argument("--markdown", action="store_true", help="the table on standard output")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="of all processes (default: a new folder)")
    parser.add_argument(
        "--failures",
        type=Path,
        metavar="DIR",
        help="where inputs are saved that were answered wrongly (default: in --logs)",
    )
    given = parser.parse_args(arguments)
    if given.inputs < 1 or given.clients < 1:
        parser.error("--inputs and --clients must be at least 1")
    try:
        given.replayed = tuple(map(saved, given.replay))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--replay: {error}")
    return given


def saved(path: Path) -> Input:
    """An input of a file. Raises ValueError or OSError."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("input"), dict):
        raise ValueError(f"{path} holds no input")
    return from_json(content["input"])


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    plan = Plan(
        num_inputs=given.inputs,
        seed=secrets.randbelow(10**6) if given.seed is None else given.seed,
        only=tuple(given.only),
        replayed=given.replayed,
        num_clients=given.clients,
    )
    say(f"Seed {plan.seed}.")
    log_dir = given.logs or Path(tempfile.mkdtemp(prefix="outrider-fuzz-"))
    failure_dir = given.failures or log_dir / "failures"

    async def run() -> int:
        return report(plan, await Experiment(plan, log_dir, failure_dir, say).run(), given)

    try:
        return run_until_signalled(run)
    except OutriderError as error:
        say(f"!! {error}")
        return 1


def report(plan: Plan, outcome: Outcome, given: argparse.Namespace) -> int:
    """Says how it went. Returns the exit status."""
    if given.json is not None:
        given.json.write_text(json.dumps({"seed": plan.seed, **outcome.to_json()}, indent=1) + "\n")
    for line in outcome.footprints:
        say(f"  {line}")
    for title, lines in (
        (
            "Wrong",
            [
                f"{each.each.kind}: {each.each.what[:80]!r}: {each.fault[:300]}"
                for each in outcome.failures[:50]
            ],
        ),
        ("Wrong in between", outcome.check_faults[:50]),
        ("Holds up the loop", [f"{each.each.what[:80]!r}: {each.fault}" for each in outcome.late_alone[:50]]),
        ("Left behind", outcome.growth),
        ("Ended by itself", outcome.ends),
    ):
        for line in lines:
            say(f"{title}: {line}")
    if given.markdown:
        print(outcome.markdown(), flush=True)
    else:
        say(outcome.markdown())
    lag = outcome.lag
    say(
        f"The loop was late by its own work {lag.num_own_late} times, of {lag.num_late} in all (at most "
        f"{lag.any_max_s * 1e3:.0f} ms, waits for a processor included)."
    )
    is_good = outcome.is_clean or (given.tolerate_lag and outcome.is_right)
    verdict = "nothing wrong" if is_good else "NOT CLEAN, see above"
    say(f"{outcome.num_inputs} inputs in {outcome.seconds:.0f} s: {verdict} (seed {plan.seed}).")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
