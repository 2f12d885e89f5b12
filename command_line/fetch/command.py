"""The command `outrider fetch`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer
from rich.console import Console
from rich.text import Text

from command_line.fetch import choice
from command_line.fetch.bucket import SCHEMES, BucketSource
from command_line.fetch.display import TransferDisplay
from command_line.fetch.fetching import PRESENT, Fetch, Outcome
from command_line.fetch.hub import SCHEME, HubSource
from command_line.fetch.local import FolderSource
from command_line.fetch.options import FetchOptions
from command_line.fetch.place import Place
from command_line.fetch.record import Record
from command_line.fetch.sources import Source
from command_line.fetch.transfer import Stopped, sha256_of
from command_line.report import check_writable, write_json
from command_line.settings import takes_settings
from command_line.terminal import TerminalConsole
from outrider.engine.loading.checkpoint_files import check_checkpoint
from outrider.errors import ConfigurationError

_SIGNALLED: Final = 128
WAIT_LOOK_S: Final = 2.0
"""Time between two looks at a folder that another process fetches."""


@takes_settings(FetchOptions)
def fetch(**given: Any) -> None:
    """Fetch a model's weights into a folder, whole or not at all.

    Only what serving needs is fetched: configuration, tokenizer, chat templates and safetensors; no pickles, no code,
    no second copy of the weights. Files are gathered in .FOLDER.partial, compared with the checksums of the source, and
    renamed to FOLDER in one step, with a record (outrider-fetch.json). If FOLDER is complete the command does nothing,
    so it can run before every start. If it broke off, or was killed, the next one goes on. Two at once are safe, also
    on a network file system.

    Hub: HF_TOKEN or HF_TOKEN_PATH for gated and private models, HF_ENDPOINT for a mirror. Buckets: the variables of the
    AWS and Google tools, or the pod's own role.

    [bold]Examples[/bold]

    [cyan]outrider fetch hf://Qwen/Qwen3-8B@main /models/target[/cyan] prints the commit that main is; write that one to
    get the same weights everywhere.

    [cyan]outrider fetch s3://models/qwen3-8b /models/target[/cyan]

    [cyan]outrider fetch /models/target /models/target[/cyan] only checks a folder.

    [bold]Exit status[/bold]

    0: FOLDER is complete; 1: it is not, and nothing of it has changed; 130 and 143: interrupted by Ctrl-C or SIGTERM.
    """
    options = FetchOptions(**given)
    check_writable("--json", options.json)
    console = TerminalConsole(stderr=True)
    stop = threading.Event()
    with _signals(stop) as received:
        try:
            if options.wait_only:
                document = _wait(options, console, stop)
            elif _is_in_place(options):
                document = _check(options, console, stop)
            else:
                outcome = _fetch(options, console, stop)
                document = outcome.document(options.folder.absolute())
                _print(console, _words(outcome, options.folder))
        except (Stopped, KeyboardInterrupt):
            _print(console, "interrupted: what was fetched is kept, and the same command goes on from there")
            raise typer.Exit(_SIGNALLED + (received[0] if received else signal.SIGINT)) from None
        except OSError as error:
            raise ConfigurationError(f"{options.folder}: {error.strerror or error}") from error
    write_json(document, options.json)


def open_source(address: str) -> Source:
    """The source of an address. Raises ConfigurationError."""
    if address.startswith(SCHEME):
        return HubSource(address)
    if address.startswith(SCHEMES):
        return BucketSource(address)
    if "://" in address:
        raise ConfigurationError(
            f"SOURCE {address}: only hf://, s3:// and gs:// are known, and folders of this machine"
        )
    return FolderSource(address)


def _fetch(options: FetchOptions, console: Console, stop: threading.Event) -> Outcome:
    place = Place(options.folder)
    with closing(open_source(options.source)) as source, TransferDisplay(console) as display:
        return Fetch(source, place, options, display, stop).run()


def _wait(options: FetchOptions, console: Console, stop: threading.Event) -> dict[str, Any]:
    """Waits for a folder with a record of this source. Raises ConfigurationError when the time is over."""
    until = time.monotonic() + options.max_wait_s
    is_told = False
    while True:
        record = Record.read(options.folder)
        if record is not None and record.source == options.source:
            _print(console, f"{options.folder} is complete: {record.source}, fetched at {record.fetched_at}")
            return {
                "state": PRESENT,
                "folder": str(options.folder.absolute()),
                "num_bytes_read": 0,
                **record.document(),
            }
        if not is_told:
            _print(console, f"waiting until {options.source} is fetched into {options.folder}")
            is_told = True
        if time.monotonic() >= until:
            raise ConfigurationError(
                f"nobody fetched {options.source} into {options.folder} within {options.max_wait_s:g} s: look at the "
                "log of the Job that does, or give more time with --max-wait-s"
            )
        if stop.wait(WAIT_LOOK_S):
            raise Stopped


def _is_in_place(options: FetchOptions) -> bool:
    return "://" not in options.source and Path(options.source).resolve() == options.folder.resolve()


def _check(options: FetchOptions, console: Console, stop: threading.Event) -> dict[str, Any]:
    """Checks a folder and writes nothing into it. Raises ConfigurationError."""
    with closing(FolderSource(options.source)) as source:
        listing = source.list_files()
    choice.refuse_unservable(listing, options.source)
    check_checkpoint(options.folder)
    record = Record.read(options.folder)
    for file in record.files if record else ():
        path = options.folder / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            raise ConfigurationError(f"{path} is missing, or has not the {file.size} bytes of its record")
        if options.verify and sha256_of(path, stop) != file.sha256:
            raise ConfigurationError(f"{path} has another sha256 than its record; fetch the model again")
    if options.verify and record is None:
        raise ConfigurationError(
            f"{options.folder} has no record (outrider-fetch.json), so there are no checksums to compare: without "
            "--verify names, sizes and headers are checked"
        )
    _print(console, f"{options.folder} is complete")
    document = {} if record is None else record.document()
    return {"state": PRESENT, "folder": str(options.folder.absolute()), "num_bytes_read": 0, **document}


def _words(outcome: Outcome, folder: Path) -> str:
    record = outcome.record
    commit = f" at {record.revision}" if record.revision else ""
    if outcome.state == PRESENT:
        return f"{folder} is complete: {record.source}{commit}, fetched at {record.fetched_at}"
    rate = outcome.num_bytes_read / max(outcome.duration_s, 0.001) / 1e6
    unchecked = sum(file.compared == "size" for file in record.files)
    told = f"; {unchecked} of {len(record.files)} files without a checksum to compare with" if unchecked else ""
    return (
        f"{folder}: {len(record.files)} files, {record.num_bytes / 1e9:.2f} GB of {record.source}{commit}, of which "
        f"{outcome.num_bytes_read / 1e9:.2f} GB were read in {outcome.duration_s:.0f} s ({rate:.0f} MB/s){told}"
    )


@contextmanager
def _signals(stop: threading.Event) -> Iterator[list[int]]:
    """Stops on SIGTERM as on Ctrl-C; process 1 of a container would not hear it otherwise. Yields what was received."""
    received: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop.set()
        raise KeyboardInterrupt

    before = {each: signal.signal(each, hear) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
