"""The flags of `outrider canary` and its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.canary.plan import Objective
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS

_TRIED = "What is tried"
_ON_WHOM = "On whom"
_RULE = "The rule"

RedisUrl = Annotated[
    str | None,
    typer.Option(help="The Redis that the coordinator uses.", show_default="OUTRIDER_REDIS_URL"),
]
RedisUrlFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds the URL and its password, in place of --redis-url.",
        show_default="OUTRIDER_REDIS_URL_FILE",
    ),
]
Share = Annotated[
    float,
    typer.Option(min=0.001, max=0.999, help="Of the request keys, 0 to 1.", rich_help_panel=_ON_WHOM),
]
Off = Annotated[bool, typer.Option("--off", help="No speculation at all.", rich_help_panel=_TRIED)]
DraftModel = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Draft workers whose model folder has this name; from now on nobody else has them. It begins when there "
        "is one.",
        show_default=False,
        rich_help_panel=_TRIED,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_SPECULATIVE_TOKENS,
        help="At most so many hints a step.",
        show_default="the target's choice",
        rich_help_panel=_TRIED,
    ),
]
Better = Annotated[
    Objective,
    typer.Option(
        "--objective",
        help="What has to be better; none: it is enough not to be worse, as for an arm that is cheaper.",
        rich_help_panel=_RULE,
    ),
]
Margin = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="How much worse mean TPOT and TTFT may be, of control's.",
        rich_help_panel=_RULE,
    ),
]
FailureMargin = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="How much higher the shares of failures and of departures may be.",
        rich_help_panel=_RULE,
    ),
]
MinRequests = Annotated[
    int,
    typer.Option(
        min=50,
        help="Of each arm, before their times are compared; that takes many keys too.",
        rich_help_panel=_RULE,
    ),
]
Alpha = Annotated[
    float,
    typer.Option(
        min=0.0001,
        max=0.5,
        help="Chance of a wrong decision, however often one looks and however alike the requests of a key are; the "
        "fewer keys, the later there is one.",
        rich_help_panel=_RULE,
    ),
]
Duration = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Such as 90s, 30m, 24h, 7d. Undecided by then, it is given up.",
        rich_help_panel=_RULE,
    ),
]
Auto = Annotated[
    bool,
    typer.Option(
        "--auto/--recommend",
        help="Act as the rule says, or only say so. Time ends it in either case.",
        rich_help_panel=_RULE,
    ),
]
AuditShare = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Of the canary's greedy and seeded requests: run again without speculation, and compared. Unless it is 0 "
        "the rule promotes nothing before one was.",
        show_default="0.02; 0 with --off",
        rich_help_panel=_ON_WHOM,
    ),
]
Reason = Annotated[str, typer.Option(help="Kept with the decision.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="For machines; with --watch an object a line.")]
Watch = Annotated[bool, typer.Option("--watch", help="Look again and again, until it is decided.")]
Every = Annotated[float, typer.Option(min=0.5, max=3600.0, help="Seconds between two looks of --watch.")]
