"""The flags of `outrider canary` and its commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.canary.plan import Objective
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS

_tried_option = partial(typer.Option, rich_help_panel="What is tried")
_on_whom_option = partial(typer.Option, rich_help_panel="On whom")
_rule_option = partial(typer.Option, rich_help_panel="The rule")

RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="The Redis that the coordinator uses.",
        show_default="OUTRIDER_REDIS_URL, else that of the `outrider serve` that runs on this machine",
    ),
]
RedisUrlFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File that contains the URL with its password, instead of --redis-url.",
        show_default="OUTRIDER_REDIS_URL_FILE",
    ),
]
Share = Annotated[float, _on_whom_option(min=0.001, max=0.999, help="Share of the request keys, 0 to 1.")]
Model = Annotated[
    str,
    _on_whom_option(
        metavar="NAME",
        help="Only requests of this served model. Give it with --draft-model where several models are served: the "
        "draft is one model's, and requests of the others would go without hints.",
        show_default="all models",
    ),
]
Off = Annotated[bool, _tried_option("--off", help="No speculation at all.")]
DraftModel = Annotated[
    str,
    _tried_option(
        metavar="NAME",
        help="Use draft workers whose model has this name (its folder's, or their --served-model-name). From then on "
        "no other request uses them. The canary begins when one of them is live.",
        show_default=False,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    _tried_option(
        min=1,
        max=MAX_SPECULATIVE_TOKENS,
        help="Maximum of hints verified per step and sequence.",
        show_default="the target's choice",
    ),
]
Better = Annotated[
    Objective,
    _rule_option(
        "--objective",
        help="Metric that has to improve; none: it is enough that nothing gets worse, as for a cheaper arm.",
    ),
]
Margin = Annotated[
    float,
    _rule_option(min=0.0, max=1.0, help="Largest permitted increase of mean TPOT and TTFT, relative to the control."),
]
FailureMargin = Annotated[
    float,
    _rule_option(
        min=0.0, max=1.0, help="Largest permitted increase of the shares of failed and of abandoned requests."
    ),
]
MinRequests = Annotated[
    int,
    _rule_option(
        min=50,
        help="Requests of each arm before their times are compared; the comparison needs many keys too.",
    ),
]
Alpha = Annotated[
    float,
    _rule_option(
        min=0.0001,
        max=0.5,
        help="Probability of a wrong decision, however often the arms are compared and however similar the "
        "requests of a key are. With fewer keys the decision takes longer.",
    ),
]
Duration = Annotated[
    str,
    _rule_option(
        metavar="TIME",
        help="Longest duration, such as 90s, 30m, 24h or 7d. A canary that is undecided by then is aborted.",
    ),
]
Auto = Annotated[
    bool,
    _rule_option(
        "--auto/--recommend",
        help="Promote or abort as the rule decides, or only report what it would decide. "
        "The duration ends the canary in either case.",
    ),
]
AuditShare = Annotated[
    float | None,
    _on_whom_option(
        min=0.0,
        max=1.0,
        help="Share of the canary's greedy and seeded requests that are run again without speculation and "
        "compared. Unless it is 0, the rule promotes nothing before at least one was compared.",
        show_default="0.02; 0 with --off",
    ),
]
Reason = Annotated[str, typer.Option(help="Reason, stored with the decision.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one object per line.")]
Watch = Annotated[bool, typer.Option("--watch", help="Repeat until the canary is decided.")]
Every = Annotated[float, typer.Option(min=0.5, max=3600.0, help="Seconds between two updates of --watch.")]
