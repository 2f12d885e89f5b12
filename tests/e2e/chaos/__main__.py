"""`python -m tests.e2e.chaos`: breaks a running system at random and compares every answer with the right one.

A fleet of real processes (HAProxy, two coordinators on Ray Serve, target and draft workers of the demo pair, Redis) is
started, with certificates and API keys, and a relay of ours on every connection between its parts. More clients than
there are places ask all the time, over HTTP and gRPC; what is right was learned from the same fleet before anything was
broken, without speculation. Meanwhile one fault after the other is injected at a random moment and mended. At the end
nothing may be left: no session, no KV block, no descriptor, no key.

The first Ctrl-C ends the faults, and what was seen is reported; the second one ends everything at once.

Exit status: 0 when every answer was right and nothing was left behind, 1 when not, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import OutriderError
from outrider.local.until_signalled import run_until_signalled
from tests.e2e.chaos.experiment import Experiment, Outcome, Plan
from tests.e2e.chaos.fault import Fault
from tests.e2e.chaos.faults import FAULTS
from tests.e2e.chaos.fleet import FleetOptions
from tests.e2e.chaos.load import NotReproducible
from tests.e2e.command_line import add_output, add_seed, new_parser, say, tell


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("chaos", __doc__)
    bounds = parser.add_argument_group("how long (whichever comes first)")
    bounds.add_argument("--faults", type=int, default=10**9, metavar="N", help="injections (default: as many as fit)")
    bounds.add_argument("--seconds", type=float, default=300.0, help="beside start and end (default: %(default)s)")
    what = parser.add_argument_group("what")
    add_seed(what, "requests, faults, moments and times")
    what.add_argument("--only", action="append", default=[], metavar="WORDS",
                      help="faults whose name has these words in it, such as redis; may be repeated (default: all but "
                      "the rare ones)")  # fmt: skip
    what.add_argument("--at-once", type=int, default=1, metavar="N",
                      help="faults that may overlap; there is always a target that none of them touches "
                      "(default: %(default)s)")  # fmt: skip
    what.add_argument("--cases", type=int, default=Plan.num_cases, metavar="N",
                      help="requests, whose right answers are learned first (default: %(default)s)")  # fmt: skip
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument(
        "--clients",
        type=int,
        default=FleetOptions.num_clients,
        help="that ask all the time (default: %(default)s)",
    )
    fleet.add_argument("--targets", type=int, default=3, help="target workers (default: %(default)s)")
    fleet.add_argument("--ranks", type=int, default=1, help="processes of each target worker (default: %(default)s)")
    fleet.add_argument("--drafts", type=int, default=2, help="draft workers (default: %(default)s)")
    fleet.add_argument("--coordinators", type=int, default=2, help="with a Ray each (default: %(default)s)")
    fleet.add_argument("--replicas", type=int, default=2, help="of each coordinator (default: %(default)s)")
    fleet.add_argument("--engine", default="outrider", choices=("outrider", "vllm"),
                       help="of the targets; vllm: by the Python in OUTRIDER_VLLM_PYTHON, in float32, with greedy "
                       "requests, and without faults of our engine's own (default: %(default)s)")  # fmt: skip
    fleet.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: %(default)s")
    output = parser.add_argument_group("what is said at the end")
    add_output(output)
    output.add_argument("--list", action="store_true", help="the faults, and nothing else happens")
    given = parser.parse_args(arguments)
    if given.at_once >= given.targets:
        parser.error(f"--at-once {given.at_once} needs more than {given.at_once} targets")
    given.vllm_python = ""
    if given.engine == "vllm":
        given.vllm_python, given.dtype = os.environ.get("OUTRIDER_VLLM_PYTHON", ""), "float32"
        if not given.vllm_python:
            parser.error("--engine vllm: OUTRIDER_VLLM_PYTHON names no Python with vLLM (make test-engines makes one)")
    given.kinds = [kind for kind in chosen(given.only) if given.ranks > 1 or not kind.needs_ranks]
    if given.vllm_python:
        given.kinds = [kind for kind in given.kinds if not kind.needs_own_engine]
    if not given.kinds:
        parser.error(f"--only {' '.join(given.only)}: no such fault; --list tells them, some need --ranks 2")
    return given


def chosen(only: Sequence[str]) -> list[type[Fault]]:
    """The faults that were asked for, all but the rare ones if none was."""
    if not only:
        return [kind for kind in FAULTS if not kind.is_rare]
    return [kind for kind in FAULTS if any(words.lower() in kind.name.lower() for words in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        for kind in given.kinds if given.only else FAULTS:
            missing = f" (left out: {kind.why_not()})" if kind.why_not() else ""
            print(f"{kind.name:<36}{'(rare) ' if kind.is_rare else ''}{(kind.__doc__ or '').splitlines()[0]}{missing}")
        return 0
    kinds = [kind for kind in given.kinds if kind.why_not() is None]
    for kind in given.kinds:
        if kind not in kinds:
            say(f"Left out: {kind.name}, for {kind.why_not()}.")
    if not kinds:
        return 2
    plan = Plan(
        faults=kinds,
        seed=given.seed,
        num_faults_max=given.faults,
        seconds_max=given.seconds,
        num_at_once=given.at_once,
        num_cases=given.cases,
        fleet=FleetOptions(
            num_targets=given.targets,
            num_drafts=given.drafts,
            num_coordinators=given.coordinators,
            num_replicas=given.replicas,
            num_clients=given.clients,
            dtype=given.dtype,
            num_ranks=given.ranks,
            vllm_python=given.vllm_python,
        ),
    )
    say(f"Seed {plan.seed}.")
    log_dir = given.logs or Path(tempfile.mkdtemp(prefix="outrider-chaos-"))

    experiment = Experiment(plan, log_dir, say)

    async def run() -> int:
        return report(await experiment.run(), given)

    try:
        return run_until_signalled(run, experiment.end_early)
    except (NotReproducible, OutriderError) as error:
        say(f"!! {error}\nStandard error of workers: {log_dir}/*.stderr.log")
        return 1


def report(outcome: Outcome, given: argparse.Namespace) -> int:
    """Says how it went. Returns the exit status."""
    problems = {
        "Wrong": outcome.ledger.failures,
        "Wrong in batches": outcome.batches.failures,
        "Ended by itself": outcome.surprises,
        "Left behind": outcome.leaks,
        "A stranger could not know": outcome.strangers.silent,
    }
    tell(given, outcome.to_json(), outcome.footprints, problems)
    for table in (outcome.ledger.markdown(), outcome.strangers.markdown()):
        if given.markdown:
            print(f"{table}\n", flush=True)
        else:
            say(table)
    total = outcome.ledger.total()
    say(f"  {outcome.saturation}")
    say(f"  {outcome.batches}")
    say(
        f"{total.num_injected} faults in {outcome.seconds:.0f} s, {outcome.ledger.num_answers} answers: "
        f"{'every one of them right' if outcome.is_clean else 'NOT CLEAN, see above'} (seed {given.seed})."
    )
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
