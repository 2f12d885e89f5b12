"""`outrider simulate`: predicts what a fleet does under load, in virtual time.

The simulator brings the schedulers of all workers with it, so it is imported when it is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.progress import Progress
from outrider.cli.simulate import options, report
from outrider.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.simulate.fleet import Fleet


def simulate(
    fleet_file: options.FleetFile = None,
    example: options.Example = False,
    targets: options.Targets = None,
    drafts: options.Drafts = None,
    concurrency: options.Concurrency = None,
    rate: options.Rate = None,
    seconds: options.Seconds = None,
    warmup_s: options.WarmupS = None,
    seed: options.Seed = None,
    pair: options.Pair = None,
    ratios: options.Ratios = None,
    plain: options.Plain = True,
    jobs: options.Jobs = 1,
    json_file: options.JsonFile = None,
) -> None:
    """Predict what a fleet does under load: throughput, latencies, the best ratio of draft to target workers.

    Nothing is started. The code that decides in production (routing, admission, batching, hint trees, how many hints to
    verify, whether to listen at all) runs in virtual time, with made-up models: what steps cost and how often guesses
    hold is what the fleet file says, or what [cyan]outrider tune[/cyan] measured of a pair. Failures are not simulated.

    [bold]Words[/bold]

    TTFT is the time to the first token, E2EL to the last, TPOT = (E2EL - TTFT) ÷ (output tokens - 1), all at the
    coordinator; queue is the wait for a place at the target; τ the tokens that a session's step commits.

    [bold]Examples[/bold]

    [cyan]outrider simulate --example > fleet.toml[/cyan] writes a file with every setting explained.

    [cyan]outrider simulate fleet.toml --targets 40 --drafts 20 --rate 100[/cyan] looks at a fleet of 60.

    [cyan]outrider simulate fleet.toml --ratios auto --jobs 4[/cyan] spends the same money in ten ways.

    [cyan]outrider tune --target big --draft small --json > pair.json; outrider simulate --pair pair.json[/cyan] takes
    costs and agreement as measured.

    [bold]Exit status[/bold]

    0 predicted; 2 a flag or a setting is wrong.
    """
    from outrider.simulate.fleet import example as example_file

    if example:
        print(example_file(), end="")
        return
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("is another kind of load than --concurrency; give one", param_hint="--rate")
    for flag, value in (("--rate", rate), ("--seconds", seconds), ("--warmup-s", warmup_s)):
        # The ranges let through what compares with nothing, and what never ends.
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number", param_hint=flag)
    fleet = _fleet(fleet_file, pair)
    with _naming("the fleet"):
        load = fleet.traffic
        if concurrency is not None or rate is not None:
            load = replace(load, concurrency=concurrency, rate=rate)
        load = replace(
            load,
            seconds=load.seconds if seconds is None else seconds,
            warmup_s=load.warmup_s if warmup_s is None else warmup_s,
        )
        fleet = replace(
            fleet,
            target=replace(fleet.target, count=targets or fleet.target.count),
            draft=replace(fleet.draft, count=fleet.draft.count if drafts is None else drafts),
            traffic=load,
            seed=fleet.seed if seed is None else seed,
        )
    _predict(fleet, ratios, plain, jobs, json_file)


def _predict(fleet: Fleet, ratios: str | None, plain: bool, jobs: int, json_file: Path | None) -> None:
    from outrider.simulate.ratios import best, fleets_of_ratios, fleets_of_shares, predict_all
    from outrider.simulate.world import World

    with _naming("--ratios"):
        if ratios is not None:
            fleets = fleets_of_shares(fleet) if ratios == "auto" else fleets_of_ratios(fleet, ratios)
        elif plain and fleet.draft.count:
            fleets = [fleet.with_pools(fleet.target.count, 0), fleet]
        else:
            fleets = [fleet]
    with Progress(Console(stderr=True, highlight=False)) as progress:
        progress.say(f"Simulating {len(fleets)} {'fleet' if len(fleets) == 1 else 'fleets'}.")
        if jobs == 1:
            outcomes = []
            for number, each in enumerate(fleets, 1):
                place = f"Fleet {number} of {len(fleets)}"
                outcomes.append(World(each).run(partial(_tell, progress, place)))
        else:
            outcomes = predict_all(fleets, jobs, lambda n: progress.update(f"{n} of {len(fleets)} done."))
    found = None if ratios is None else best(outcomes)
    is_printed = json_file is not None and str(json_file) == "-"
    console = Console(stderr=is_printed, highlight=False)
    if found is None:
        console.print(report.table(outcomes))
    else:
        console.print(report.ratios_table(outcomes, found))
        console.print(Text(report.verdict(found), "bold"), soft_wrap=True)
    console.print(Text(report.caption(fleet, outcomes), "dim"), soft_wrap=True)
    for warning in report.warnings(fleet, outcomes):
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)
    text = json.dumps(report.as_dict(fleet, outcomes, found))
    if is_printed:
        print(text, flush=True)
    elif json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")


def _tell(progress: Progress, place: str, share: float) -> None:
    progress.update(f"{place}: {share:.0%}")


def _fleet(fleet_file: Path | None, pair: Path | None) -> Fleet:
    from outrider.simulate.fleet import Fleet, parse_fleet, with_pair

    fleet = Fleet()
    if fleet_file is not None:
        with _naming(str(fleet_file)):
            fleet = parse_fleet(fleet_file.read_text(encoding="utf-8"))
    if pair is not None:
        with _naming("--pair"):
            fleet = with_pair(fleet, json.loads(pair.read_text(encoding="utf-8")))
    return fleet


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Errors about a value become usage errors that name where it stands."""
    try:
        yield
    except (InvalidRequest, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=place) from error
