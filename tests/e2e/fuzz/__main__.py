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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import OutriderError
from outrider.local.until_signalled import run_until_signalled
from tests.e2e.command_line import add_output, add_seed, new_parser, say, tell
from tests.e2e.fuzz.experiment import MAKERS, Experiment, Outcome, Plan
from tests.e2e.fuzz.inputs import Input, from_json

SHOWN_MAX = 50  # faults of each kind, in words; the report has them all


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("fuzz", __doc__)
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="how many (default: %(default)s)")
    add_seed(parser, "all inputs and their order")
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
    add_output(parser)
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
        seed=given.seed,
        only=tuple(given.only),
        replayed=given.replayed,
        num_clients=given.clients,
    )
    say(f"Seed {plan.seed}.")
    log_dir = given.logs or Path(tempfile.mkdtemp(prefix="outrider-fuzz-"))
    failure_dir = given.failures or log_dir / "failures"

    async def run() -> int:
        return report(await Experiment(plan, log_dir, failure_dir, say).run(), given)

    try:
        return run_until_signalled(run)
    except OutriderError as error:
        say(f"!! {error}")
        return 1


def report(outcome: Outcome, given: argparse.Namespace) -> int:
    """Says how it went. Returns the exit status."""
    failures, late = outcome.failures[:SHOWN_MAX], outcome.late_alone[:SHOWN_MAX]
    problems = {
        "Wrong": [f"{each.each.kind}: {each.each.what[:80]!r}: {each.fault[:300]}" for each in failures],
        "Wrong in between": outcome.check_faults[:SHOWN_MAX],
        "Holds up the loop": [f"{each.each.what[:80]!r}: {each.fault}" for each in late],
        "Left behind": outcome.growth,
        "Ended by itself": outcome.ends,
    }
    tell(given, outcome.to_json(), outcome.footprints, problems)
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
    say(f"{outcome.num_inputs} inputs in {outcome.seconds:.0f} s: {verdict} (seed {given.seed}).")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
