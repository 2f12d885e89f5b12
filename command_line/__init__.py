"""The `outrider` command line: registers every command and reports errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from command_line.audit.command import audit
from command_line.batch.command import batch
from command_line.bench.command import bench
from command_line.canary.command import canary
from command_line.certificates.command import certificates
from command_line.chat import chat
from command_line.checkout import not_installed
from command_line.fetch.command import fetch
from command_line.keys import keys
from command_line.passthrough import PASSTHROUGH, coordinator, draft_worker, memory_worker, target_worker
from command_line.plan.command import plan
from command_line.profile import profile
from command_line.simulate.command import simulate
from command_line.terminal import TerminalConsole, print_line
from outrider import __version__
from outrider.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help=(
        "Distributed speculative decoding.\n\nA small draft model drafts tokens; the large target model verifies "
        "many of them in one forward pass. The output is exactly what the target would have generated "
        "alone.\n\nBegin with [bold]outrider demo[/bold], which needs no model of your own. Then [bold]outrider "
        "serve --target DIR --draft DIR[/bold] serves your own pair of models on this machine. The three "
        "single-process commands run the same parts on several machines around one Redis."
    ),
    epilog="OUTRIDER_REDIS_URL is the URL of the Redis to use, OUTRIDER_REDIS_URL_FILE a file that contains it. "
    "OUTRIDER_CACHE_DIR is the folder for logs and grown models.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
one_machine: list[Callable[..., None]] = [chat, plan, profile]
try:
    from command_line.start.demo import demo
    from command_line.start.serve import serve
    from command_line.tune.command import tune
except ModuleNotFoundError as error:  # a coordinator's image has no workers to start
    if error.name not in ("draft_worker", "target_worker"):
        raise
else:
    one_machine = [demo, serve, chat, tune, plan, profile]
for command in one_machine:
    app.command(rich_help_panel="One machine")(command)
app.command(rich_help_panel="A fleet")(fetch)
app.command(rich_help_panel="A fleet")(simulate)
app.command(rich_help_panel="A running server")(audit)
app.add_typer(batch, name="batch", rich_help_panel="A running server")
app.command(rich_help_panel="A running server")(bench)
app.add_typer(canary, name="canary", rich_help_panel="A running server")
app.command(rich_help_panel="Security")(certificates)
app.command(rich_help_panel="Security")(keys)
app.command(rich_help_panel="One process", **PASSTHROUGH)(target_worker)
app.command(rich_help_panel="One process", **PASSTHROUGH)(draft_worker)
app.command(rich_help_panel="One process", **PASSTHROUGH)(memory_worker)
app.command(rich_help_panel="One process", **PASSTHROUGH)(coordinator)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_line(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Runs the command line. An OutriderError is printed as one paragraph and exits with status 1."""
    try:
        try:
            app()
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers"):
                raise
            raise not_installed(error.name, "worker") from error
    except OutriderError as error:
        TerminalConsole(stderr=True).print(Text.assemble(("outrider: ", "bold red"), error.message), soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader closed our output, as `| head` does. Without this the interpreter complains again at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
