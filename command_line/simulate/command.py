"""`outrider simulate`: predicts what a fleet does under load, in virtual time.

The simulator imports the schedulers of all workers, so it is imported only when needed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from command_line.progress import Progress
from command_line.report import is_printed, print_notes, write_json
from command_line.settings import naming, takes_settings
from command_line.simulate import report
from command_line.simulate.options import SimulateOptions
from command_line.terminal import TerminalConsole, print_line

if TYPE_CHECKING:
    from command_line.simulator.fleet import Fleet


@takes_settings(SimulateOptions)
def simulate(**given: Any) -> None:
    """Predict what a fleet does under load: throughput, latencies, the best ratio of draft to target workers.

    No process is started. The production code for routing, admission, batching, hint trees and speculation runs in
    virtual time with synthetic models. Step times and acceptance come from the fleet file or from [cyan]outrider
    tune[/cyan]. Failures are not simulated.

    [bold]Words[/bold]

    TTFT is the time to the first token, E2EL to the last, TPOT = (E2EL - TTFT) ÷ (output tokens - 1), all at the
    coordinator; queue is the wait for a slot at the target; τ the tokens that a session's step commits.

    [bold]Examples[/bold]

    [cyan]outrider simulate --example > fleet.toml[/cyan] writes a fleet file that explains every setting.

    [cyan]outrider simulate fleet.toml --targets 40 --drafts 20 --rate 100[/cyan] simulates a fleet of 60 workers.

    [cyan]outrider simulate fleet.toml --ratios auto --jobs 4[/cyan] compares ten ways to spend the same money.

    [cyan]outrider tune --target big --draft small --json > pair.json; outrider simulate --pair pair.json[/cyan] uses
    measured step times and acceptance.

    [bold]Exit status[/bold]

    0: predicted; 2: a flag or a setting is wrong.
    """
    from command_line.simulator.fleet import example as example_file

    options = SimulateOptions(**given)
    if options.example:
        print_line(example_file().rstrip("\n"))
        return
    if options.concurrency is not None and options.rate is not None:
        raise typer.BadParameter(
            "is another kind of load than --concurrency; give only one of them", param_hint="--rate"
        )
    fleet = _fleet(options.fleet_file, options.pair)
    with naming("the fleet"):
        if options.concurrency is not None or options.rate is not None:
            traffic = replace(fleet.traffic, concurrency=options.concurrency, rate=options.rate)
            fleet = replace(fleet, traffic=traffic)
        fleet = replace(
            fleet,
            target=replace(fleet.target, **_given(count=options.targets)),
            draft=replace(fleet.draft, **_given(count=options.drafts)),
            traffic=replace(fleet.traffic, **_given(seconds=options.seconds, warmup_s=options.warmup_s)),
            **_given(seed=options.seed),
        )
    _predict(fleet, options)


def _given(**overrides: Any) -> dict[str, Any]:
    """The options that the user has set."""
    return {name: value for name, value in overrides.items() if value is not None}


def _predict(fleet: Fleet, options: SimulateOptions) -> None:
    from command_line.simulator.ratios import best, fleets_of_ratios, fleets_of_shares, predict_all
    from command_line.simulator.world import World

    ratios = options.ratios
    with naming("--ratios"):
        if ratios is not None:
            fleets = fleets_of_shares(fleet) if ratios == "auto" else fleets_of_ratios(fleet, ratios)
        elif options.plain and fleet.draft.count:
            fleets = [fleet.with_pools(fleet.target.count, 0), fleet]
        else:
            fleets = [fleet]
    with Progress(TerminalConsole(stderr=True)) as progress:
        progress.say(f"Simulating {len(fleets)} {'fleet' if len(fleets) == 1 else 'fleets'}.")

        def tell(place: str, share: float) -> None:
            progress.update(f"{place}: {share:.0%}")

        if 1 in (options.jobs, len(fleets)):
            outcomes = []
            for number, each in enumerate(fleets, 1):
                place = f"Fleet {number} of {len(fleets)}"
                outcomes.append(World(each).run(partial(tell, place)))
        else:
            outcomes = predict_all(fleets, options.jobs, lambda n: progress.update(f"{n} of {len(fleets)} done."))
    found = None if ratios is None else best(outcomes)
    console = TerminalConsole(stderr=is_printed(options.json))
    if found is None:
        console.print(report.table(outcomes))
    else:
        console.print(report.ratios_table(outcomes, found))
        console.print(Text(report.verdict(found), "bold"), soft_wrap=True)
    print_notes(console, [report.caption(fleet, outcomes)], report.warnings(fleet, outcomes))
    write_json(report.as_dict(fleet, outcomes, found), options.json)


def _fleet(fleet_file: Path | None, pair: Path | None) -> Fleet:
    from command_line.simulator.fleet import Fleet, parse_fleet, with_pair

    fleet = Fleet()
    if fleet_file is not None:
        with naming(str(fleet_file)):
            fleet = parse_fleet(fleet_file.read_text(encoding="utf-8"))
    if pair is not None:
        with naming("--pair"):
            fleet = with_pair(fleet, json.loads(pair.read_text(encoding="utf-8")))
    return fleet
