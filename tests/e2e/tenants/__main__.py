"""`python -m tests.e2e.tenants`: what one tenant can do to another.

A system of real processes is started: Redis, a target and a draft worker of the demo pair, and a coordinator, with
certificates and API keys. One tenant sends a trickle of short requests of every kind, over HTTP and gRPC. The other one
attacks, by one scenario of the list after the other, and between the attacks sends an ordinary load of the same size.
Under an attack the first tenant's requests may take twice as long as beside that ordinary load (median; four times for
the p99), and none may be refused or fail. No process may end, keep memory that grows from round to round, or stand
still.

  --list                       every attack, in a sentence
  --scenario long-prompts      one of them; may be repeated
  --hosting plain              without Ray and HAProxy
  --short                      two minutes: the attacks that show most, with wide limits

Exit status: 0 when all of that held, 1 when not, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coordinator.settings import Hosting
from outrider.errors import OutriderError
from outrider.local.until_signalled import run_until_signalled
from tests.e2e.command_line import add_output, add_seed, new_parser, say, tell
from tests.e2e.tenants import attempts, connections, grammars, work  # noqa: F401 - each fills the list
from tests.e2e.tenants.experiment import Experiment, Plan, report
from tests.e2e.tenants.judge import Limits, Row, table
from tests.e2e.tenants.scenario import SCENARIOS

HOSTINGS = {"plain": Hosting.PLAIN, "ray": Hosting.RAY_SERVE}
SECONDS, RATE = 15.0, 8.0
SHORT_SECONDS, SHORT_RATE = 4.0, 10.0
SHORT_LIMITS = Limits({0.5: 6.0}, latency_max_s=15.0, kept_once_bytes=512 << 20)
"""For a machine with much other work, and one round: these find what stops a neighbour, not what slows one down or what
grows."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("tenants", __doc__)
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        choices=sorted(SCENARIOS),
        metavar="NAME",
        help="an attack of the list; may be repeated (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="the attacks, and nothing else")
    parser.add_argument(
        "--hosting",
        choices=[*HOSTINGS, "both"],
        default="both",
        help="what runs the coordinator (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of each attack in each round (default: {SECONDS:g}; short form: {SHORT_SECONDS:g})",
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help=f"well-behaved requests a second (default: {RATE:g}; short form: {SHORT_RATE:g})",
    )
    parser.add_argument("--short", action="store_true", help="fewer attacks, less time, wide limits, plain hosting")
    add_seed(parser, "everything that is random")
    add_output(parser)
    given = parser.parse_args(arguments)
    if given.seconds is None:
        given.seconds = SHORT_SECONDS if given.short else SECONDS
    if given.rate is None:
        given.rate = SHORT_RATE if given.short else RATE
    if given.seconds <= 0 or given.rate <= 0:
        parser.error("--seconds and --rate must be above 0")
    return given


def plans(given: argparse.Namespace) -> list[Plan]:
    """A plan for each hosting."""
    chosen = [
        each
        for each in SCENARIOS.values()
        if (each.name in given.scenario if given.scenario else each.is_short or not given.short)
    ]
    hosting = "plain" if given.short and given.hosting == "both" else given.hosting
    limits = SHORT_LIMITS if given.short else Limits()
    return [
        Plan(chosen, kind, given.seconds, given.rate, given.seed, limits, *((1, 2) if given.short else (2, 6)))
        for name, kind in HOSTINGS.items()
        if hosting in (name, "both")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        for each in SCENARIOS.values():
            print(f"{each.name:36} {each.text}")
        return 0
    say(f"Seed {given.seed}.")
    log_dir = given.logs or Path(tempfile.mkdtemp(prefix="outrider-tenants-"))

    async def run() -> int:
        results = []
        for plan in plans(given):
            results.append((plan, await Experiment(plan, log_dir / str(plan.hosting), say).run()))
        return conclude(results, given)

    try:
        return run_until_signalled(run)
    except OutriderError as error:
        say(f"!! {error}")
        return 1


def conclude(results: Sequence[tuple[Plan, Sequence[Row]]], given: argparse.Namespace) -> int:
    """Says how it went. Returns the exit status."""
    problems = {f"{plan.hosting}, {row.name}": row.faults for plan, rows in results for row in rows if row.faults}
    is_clean = not problems
    counted = {"is_clean": is_clean, "runs": [report(plan, rows) for plan, rows in results]}
    tell(given, counted, (), problems)
    for plan, rows in results:
        text = f"Hosting {plan.hosting}, {plan.seconds:g} s a round:\n\n{table(rows)}\n"
        if given.markdown:
            print(text, flush=True)
        else:
            say(text)
    num_attacks = sum(len(rows) for _, rows in results)
    verdict = "nobody was harmed" if is_clean else f"{len(problems)} HARM A NEIGHBOUR, see above"
    say(f"{num_attacks} attacks: {verdict} (seed {given.seed}).")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
