"""The flags of `outrider simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FLEET = "Which fleet (instead of what the file says)"
_WHAT = "What to find out"
_RESULT = "What to make of it"

FleetFile = Annotated[
    Path | None,
    typer.Argument(
        exists=True,
        dir_okay=False,
        metavar="[FLEET.toml]",
        help="Pools, costs, network and traffic; --example prints one.",
        show_default="every setting's default",
    ),
]
Example = Annotated[
    bool,
    typer.Option("--example", help="Print a fleet file with every setting explained, and do nothing else."),
]
Targets = Annotated[
    int | None,
    typer.Option(min=1, help="Target workers.", show_default="the file's", rich_help_panel=_FLEET),
]
Drafts = Annotated[
    int | None,
    typer.Option(min=0, help="Draft workers.", show_default="the file's", rich_help_panel=_FLEET),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Closed loop: so many requests are under way at any time.",
        show_default="the file's, or half of all places",
        rich_help_panel=_FLEET,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=1e-6,
        help="Open loop instead: so many requests per second, Poisson.",
        show_default=False,
        rich_help_panel=_FLEET,
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.01, help="Of virtual time that count.", show_default="the file's", rich_help_panel=_FLEET
    ),
]
WarmupS = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Before them, not counted.", show_default="the file's", rich_help_panel=_FLEET
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Of everything random.", show_default="the file's", rich_help_panel=_FLEET),
]
Pair = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="PAIR.json",
        help="Costs and agreement that [cyan]outrider tune --json[/cyan] measured, instead of the file's.",
        rich_help_panel=_FLEET,
    ),
]
Ratios = Annotated[
    str | None,
    typer.Option(
        metavar="auto|D:T[,D:T...]",
        help="Compare ratios of draft to target workers for the fleet's money.",
        rich_help_panel=_WHAT,
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain/--no-plain",
        help="Also what the same targets do without draft workers.",
        rich_help_panel=_WHAT,
    ),
]
Jobs = Annotated[
    int, typer.Option(min=1, max=256, help="Simulations at once, a process each.", rich_help_panel=_WHAT)
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write everything there; - prints it.", rich_help_panel=_RESULT
    ),
]
