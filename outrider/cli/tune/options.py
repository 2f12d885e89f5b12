"""The flags of `outrider tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.deployment import Dtype, Quantization

_MODELS = "Which pair"
_MACHINE = "As it will be served"
_MEASURING = "How to measure"
_RESULT = "What to make of it"

Target = Annotated[
    Path, typer.Option(help="Model folder of the target.", show_default="the demo's", rich_help_panel=_MODELS)
]
Draft = Annotated[
    Path, typer.Option(help="Model folder of the draft.", show_default="the demo's", rich_help_panel=_MODELS)
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help='JSON lines with a "prompt" each, or plain text with blank lines between prompts. Acceptance depends on '
        "what is asked: give what your users ask.",
        show_default="a few built-in ones",
        rich_help_panel=_MODELS,
    ),
]
DtypeChoice = Annotated[Dtype, typer.Option(help="Type of the weights.", rich_help_panel=_MACHINE)]
QuantizationChoice = Annotated[
    Quantization, typer.Option(help="Of the target's weights.", rich_help_panel=_MACHINE)
]
NumThreads = Annotated[
    int,
    typer.Option(
        min=1, max=1024, help="Threads of the target; a draft worker has one.", rich_help_panel=_MACHINE
    ),
]
CpuAffinity = Annotated[
    str | None,
    typer.Option(
        metavar="CORES",
        help="Cores to measure on, such as 0 or 0,1.",
        show_default="any",
        rich_help_panel=_MACHINE,
    ),
]
BatchSizes = Annotated[
    str,
    typer.Option(metavar="N[,N...]", help="Sessions at once to give advice for.", rich_help_panel=_MACHINE),
]
ContextLen = Annotated[
    int,
    typer.Option(
        min=1,
        help="Tokens behind each session while steps are timed; at most half of what the model can.",
        rich_help_panel=_MACHINE,
    ),
]
MaxSpeculativeTokens = Annotated[
    int, typer.Option(min=1, max=20, help="Longest block of hints to consider.", rich_help_panel=_MACHINE)
]
OverheadMs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="What the target worker adds to a plain step with one session; the other overheads follow in proportion.",
        show_default="0.35, measured with the demo pair",
        rich_help_panel=_MACHINE,
    ),
]
LinkMs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="A message from worker to worker, one way.",
        show_default="0.15, loopback",
        rich_help_panel=_MACHINE,
    ),
]
MaxTokens = Annotated[int, typer.Option(min=8, help="Greedy tokens per prompt.", rich_help_panel=_MEASURING)]
BudgetS = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=3600.0,
        help="Most seconds for each of the four phases; loading comes on top.",
        rich_help_panel=_MEASURING,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=_RESULT)
]
AsFlags = Annotated[
    bool, typer.Option("--flags", help="Print only the commands to paste.", rich_help_panel=_RESULT)
]
