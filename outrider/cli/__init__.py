"""The `outrider` command line. Each command lives in a module of its own; this one only names them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.cli.audit.command import audit
from outrider.cli.bench.command import bench
from outrider.cli.canary.command import canary
from outrider.cli.certificates import certificates
from outrider.cli.chat import chat
from outrider.cli.demo import demo
from outrider.cli.keys import keys
from outrider.cli.passthrough import PASSTHROUGH, coordinator, draft_worker, target_worker
from outrider.cli.plan import plan
from outrider.cli.profile import profile
from outrider.cli.serve import serve
from outrider.cli.simulate.command import simulate
from outrider.cli.tune.command import tune
from outrider.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help=(
        "Distributed speculative decoding.\n\n"
        "A small draft model rides ahead and guesses; the large target model checks many guesses in one forward "
        "pass. What is said stays exactly what the target would have said alone.\n\n"
        "Begin with [bold]outrider demo[/bold], which needs nothing but this folder. Then "
        "[bold]outrider serve --target DIR --draft DIR[/bold] serves a pair of your own on this machine, and the "
        "three single-process commands place the same parts on several machines around one Redis."
    ),
    epilog="OUTRIDER_REDIS_URL names the Redis to use, OUTRIDER_REDIS_URL_FILE a file that does; OUTRIDER_CACHE_DIR "
    "the place of logs and grown models.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="One machine")(demo)
app.command(rich_help_panel="One machine")(serve)
app.command(rich_help_panel="One machine")(chat)
app.command(rich_help_panel="One machine")(tune)
app.command(rich_help_panel="One machine")(plan)
app.command(rich_help_panel="One machine")(profile)
app.command(rich_help_panel="A fleet")(simulate)
app.command(rich_help_panel="A running server")(audit)
app.command(rich_help_panel="A running server")(bench)
app.add_typer(canary, name="canary", rich_help_panel="A running server")
app.command(rich_help_panel="Security")(certificates)
app.command(rich_help_panel="Security")(keys)
app.command(rich_help_panel="One process", **PASSTHROUGH)(target_worker)
app.command(rich_help_panel="One process", **PASSTHROUGH)(draft_worker)
app.command(rich_help_panel="One process", **PASSTHROUGH)(coordinator)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point: errors that were raised on purpose become one paragraph and exit status 1."""
    try:
        app()
    except OutriderError as error:
        Console(stderr=True).print(Text.assemble(("outrider: ", "bold red"), error.message), soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        # Somebody closed our output, `| head` for one; the interpreter must not complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
