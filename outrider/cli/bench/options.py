"""The flags of `outrider bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ASKED = "Whom to ask"
_LOAD = "How hard"
_ASKING = "What to ask"
_RESULT = "What to make of it"

Url = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]URL",
        help="A server, with or without /v1; several are measured in turns.",
        show_default="http://127.0.0.1:8000",
        rich_help_panel=_ASKED,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to ask for.", show_default="the first of GET /v1/models", rich_help_panel=_ASKED
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY", help="Sent to every server as a bearer token.", rich_help_panel=_ASKED
    ),
]
TimeoutS = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait for one whole answer.", rich_help_panel=_ASKED)
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Closed loop: so many requests are under way at any time.",
        show_default="1,8",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="R[,R...]",
        help="Open loop instead: R requests per second in Poisson arrivals, whatever the server does.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Counted requests per server, level and round.",
        show_default="8 × the level, at least 16; with --duration-s as many as fit",
        rich_help_panel=_LOAD,
    ),
]
DurationS = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Seconds after which no further request begins, per server, level and round.",
        show_default=False,
        rich_help_panel=_LOAD,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Requests before the counted ones, each time.",
        show_default="one per connection",
        rich_help_panel=_LOAD,
    ),
]
NumRounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        min=1,
        max=1000,
        help="How often all servers take turns at all levels; medians of 3 or more can be trusted.",
        rich_help_panel=_LOAD,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help='JSON lines with a "prompt" each, or plain text with blank lines between prompts.',
        show_default="a few built-in ones",
        rich_help_panel=_ASKING,
    ),
]
Chat = Annotated[
    bool,
    typer.Option("--chat/--completions", help="Which endpoint to use.", rich_help_panel=_ASKING),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest output, tokens.", rich_help_panel=_ASKING)]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="0 always says the likeliest.", rich_help_panel=_ASKING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Seeds the arrivals, and request i with SEED + i.",
        show_default="0 for arrivals, none in requests",
        rich_help_panel=_ASKING,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Ask for --max-tokens tokens whatever the model says, so that all servers do equal work.",
        rich_help_panel=_ASKING,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="An object merged into each request; null takes a field away.",
        show_default=False,
        rich_help_panel=_ASKING,
    ),
]
SloTtftMs = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Goodput: longest TTFT of a good answer.", show_default=False, rich_help_panel=_RESULT
    ),
]
SloTpotMs = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Goodput: longest TPOT of a good answer.", show_default=False, rich_help_panel=_RESULT
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Everything as one JSON object; - for standard output.",
        show_default=False,
        rich_help_panel=_RESULT,
    ),
]
Requests = Annotated[
    bool,
    typer.Option("--requests", help="Put every single request into --json too.", rich_help_panel=_RESULT),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.svg",
        help="Draw throughput and TPOT over the levels.",
        show_default=False,
        rich_help_panel=_RESULT,
    ),
]
