"""Commands of `outrider batch`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.text import Text

from command_line.batch.client import BatchClient, RequestFile
from command_line.batch.follow import OVER, follow
from command_line.batch.options import BatchOptions, RunOptions, ServerOptions
from command_line.batch.ray_data import run_pieces
from command_line.client import ApiError, server_address
from command_line.progress import Progress
from command_line.settings import naming, takes_settings
from command_line.terminal import TerminalConsole

_SOME_FAILED = 3
_INTERRUPTED = 130
_ERRORS_SHOWN = 10

batch = typer.Typer(
    help=(
        "Run files of requests in a server's spare capacity.\n\nA file has a request per line, as OpenAI's batches: "
        '[bold]{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": '
        '[{"role": "user", "content": "Hello"}]}}[/bold]. All lines have one url, and no two the same custom_id. '
        "The server checks the whole file before anything runs, and answers within 24 hours. Requests of other "
        "clients go first.\n\nThe server must run with [bold]--batch-files[/bold]."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@batch.command()
@takes_settings(RunOptions)
def run(**given: Any) -> None:
    """Run a file of requests and write the answers to a file.

    The command uploads the file, creates the batch, shows its progress and downloads the answers. They come in no
    particular order; custom_id tells them apart. Requests that failed go to a file of their own.

    Ctrl-C leaves the batch running at the server. The same command with the same file finds it again, also when it is
    complete, and goes on; [bold]outrider batch cancel ID[/bold] ends it.

    [bold]Examples[/bold]

    [cyan]outrider batch run requests.jsonl[/cyan] writes requests.output.jsonl.

    [cyan]outrider batch run requests.jsonl --detach[/cyan] prints the id of the batch and returns.

    [cyan]outrider batch run s3://bucket/requests --ray --output s3://bucket/answers[/cyan] runs millions of lines.

    [bold]Exit status[/bold]

    0: every request was answered; 3: some failed, or their time was up; 1: the file was refused, the batch was
    cancelled, or the server cannot be reached; 130: interrupted, and the batch goes on.
    """
    options = RunOptions(**given)
    url = _address(options)
    if options.ray:
        raise typer.Exit(_run_pieces(options, url))
    path = Path(options.file)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; --ray runs all files in one", param_hint="FILE")
    with naming("FILE"):
        file = RequestFile.read(path)
    output = Path(options.output) if options.output else path.with_name(f"{path.stem}.output.jsonl")
    state: dict[str, Any] = {}
    try:
        raise typer.Exit(asyncio.run(_run(options, url, file, output, state)))
    except KeyboardInterrupt:
        told = f"batch {state['id']} goes on at the server" if state else "there was no batch yet"
        _print(f"interrupted: {told}; the same command goes on from there")
        raise typer.Exit(_INTERRUPTED) from None


@batch.command()
@takes_settings(BatchOptions)
def status(**given: Any) -> None:
    """Show a batch: its state, its lines, its files, and the errors of its file."""
    options = BatchOptions(**given)
    found = asyncio.run(_one(options, _address(options), is_cancelling=False))
    TerminalConsole().print_json(json.dumps(found))


@batch.command()
@takes_settings(BatchOptions)
def cancel(**given: Any) -> None:
    """Cancel a batch: no line of it runs any more, and the answers so far stay as its output file."""
    options = BatchOptions(**given)
    found = asyncio.run(_one(options, _address(options), is_cancelling=True))
    _print(f"batch {found['id']} is {found['status']}")


def _address(options: ServerOptions) -> str:
    with naming("--url"):
        return server_address(options.url)


def _print(text: str) -> None:
    TerminalConsole(stderr=True).print(Text(text), soft_wrap=True)


async def _one(options: BatchOptions, url: str, *, is_cancelling: bool) -> dict[str, Any]:
    async with BatchClient.at(options, url) as client:
        return await (client.cancel if is_cancelling else client.get)(options.batch_id)


async def _run(options: RunOptions, url: str, file: RequestFile, output: Path, state: dict[str, Any]) -> int:
    """Runs a file; returns the exit status. `state` gets the batch's id."""
    try:
        with Progress(TerminalConsole(stderr=True)) as progress:
            async with BatchClient.at(options, url) as client:
                found = None if options.new else await client.find(file)
                if found is None:
                    progress.say(f"Uploading {file.path} to {url}.")
                    found = await client.create(file)
                    progress.note(f"batch {found['id']}")
                else:
                    progress.note(f"batch {found['id']}, which this file has already (--new creates another)")
                state["id"] = found["id"]
                if options.detach:
                    return 0
                ended = await follow(client, found, progress.update, progress.note)
                return await _finish(client, ended, output)
    except httpx.HTTPError as error:
        raise ApiError(f"--url {url}: {error or type(error).__name__}") from error


def _run_pieces(options: RunOptions, url: str) -> int:
    """Runs files of any size; returns the exit status."""
    with Progress(TerminalConsole(stderr=True)) as progress:
        try:
            totals = run_pieces(options, url, progress)
        except KeyboardInterrupt:
            progress.note("interrupted: batches go on at the server; the same command goes on from there")
            return _INTERRUPTED
    _print(f"{totals['num_completed']} answers, {totals['num_failed']} requests without an answer")
    if totals["num_lost"]:
        raise ApiError(f"{totals['num_lost']} batches did not run; the same command tries these again")
    if totals["num_left"]:
        _print(f"{totals['num_left']} more requests did not run in time; the same command runs these")
    return _SOME_FAILED if totals["num_failed"] or totals["num_left"] else 0


async def _finish(client: BatchClient, ended: dict[str, Any], output: Path) -> int:
    """Downloads the files of a batch that is over, and says how it went; returns the exit status."""
    assert ended["status"] in OVER
    if ended["status"] == "failed":
        errors = (ended["errors"] or {"data": []})["data"]
        for each in errors[:_ERRORS_SHOWN]:
            where = "" if each["line"] is None else f"line {each['line']}: "
            _print(f"{where}{each['message']}")
        raise ApiError(f"the file was refused, and nothing of it ran: {len(errors)} errors")
    if ended["output_file_id"] is not None:
        _print(f"{await client.download(ended['output_file_id'], output)} answers: {output}")
    failed = output.with_name(f"{output.stem.removesuffix('.output')}.errors.jsonl")
    if ended["error_file_id"] is not None:
        _print(f"{await client.download(ended['error_file_id'], failed)} requests without an answer: {failed}")
    if ended["status"] == "cancelled":
        raise ApiError(f"batch {ended['id']} was cancelled")
    return 0 if ended["error_file_id"] is None else _SOME_FAILED
