"""The flags of `outrider audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MAX_TOKENS = 100

_ASKING = "What to ask"
_ASKED = "Whom to ask"
_RESULT = "What to make of it"

Url = Annotated[
    str,
    typer.Option(help="Address of the server, as `outrider serve` printed it.", rich_help_panel=_ASKED),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OUTRIDER_API_KEY", help="Sent as a bearer token.", rich_help_panel=_ASKED),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Model to ask for.", show_default="each request's, else the only one", rich_help_panel=_ASKED
    ),
]
TimeoutS = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait for one answer.", rich_help_panel=_ASKED)
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(
        help="A text to continue; may be given more than once.",
        show_default="a few built-in ones",
        rich_help_panel=_ASKING,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A file that is one prompt.",
        show_default=False,
        rich_help_panel=_ASKING,
    ),
]
Requests = Annotated[
    Path | None,
    typer.Option(
        metavar="<file>|-",
        help="Bodies of /v1/completions or /v1/chat/completions, one JSON object a line; - for standard input.",
        show_default=False,
        rich_help_panel=_ASKING,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest output, tokens.",
        show_default=f"each request's, {DEFAULT_MAX_TOKENS} for prompts",
        rich_help_panel=_ASKING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, max=2.0, show_default="each request's, 0 for prompts", rich_help_panel=_ASKING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="For sampled requests that have none.",
        show_default="a fixed one",
        rich_help_panel=_ASKING,
    ),
]
Repeat = Annotated[
    int, typer.Option(min=1, help="Runs with speculation per request.", rich_help_panel=_ASKING)
]
Concurrency = Annotated[
    int,
    typer.Option(
        min=1,
        max=256,
        help="Requests at once; with more than 1 they share the server's batches.",
        rich_help_panel=_ASKING,
    ),
]
RequireSpeculation = Annotated[
    bool,
    typer.Option(
        "--require-speculation", help="Fail when no hint was verified at all.", rich_help_panel=_RESULT
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Report as one JSON object on standard output.", rich_help_panel=_RESULT),
]
