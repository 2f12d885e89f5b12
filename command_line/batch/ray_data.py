"""Runs files of any size with Ray Data: cuts them into pieces, of which each becomes a batch of the server.

Ray Data spreads the pieces over its cluster and runs a piece again whose process was lost. A piece is found again by
its content, in the output folder and among the server's batches, so a repetition computes nothing twice. Where a
batch's time was up, what it had answered is kept as a partial output, and a repetition runs the other lines.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

from command_line.batch.client import BatchClient, RequestFile
from command_line.batch.follow import follow
from command_line.batch.options import RunOptions
from command_line.batch.pieces import Piece, batches_of, cut, left_of, lines_of
from command_line.progress import Progress
from outrider.errors import ConfigurationError, OutriderError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_CPUS: Final = 0.1  # of a piece, which mostly waits for the server
_PIECES_MAX: Final = 100_000
_INSTALL: Final = "--ray needs Ray Data: pip install 'outrider[ray-data]'"


@dataclass(frozen=True, slots=True)
class PieceFiles:
    """The files of one batch in the output folder: `output`, `errors`, and `partial` while lines are left."""

    system: FileSystem
    base: str  # their common path

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return bool(self.system.get_file_info(self._path(name)).is_file)

    def lines(self, name: str) -> list[bytes]:
        """The lines of a file, each with its newline; none without a file."""
        if not self.has(name):
            return []
        with self.system.open_input_file(self._path(name)) as opened:
            return list(io.BufferedReader(opened, 1 << 20))

    def num_lines(self, name: str) -> int:
        """The number of a file's lines."""
        return len(self.lines(name))

    def put(self, name: str, source: Path) -> None:
        """Copies a file here; it is there as a whole or not at all."""
        target = self._path(name)
        self.system.create_dir(str(Path(target).parent), recursive=True)
        temporary = f"{target}.part"
        with source.open("rb") as opened, self.system.open_output_stream(temporary) as stream:
            shutil.copyfileobj(opened, stream, 1 << 20)
        self.system.move(temporary, target)

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        if self.has(name):
            self.system.delete_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self.base}.{name}.jsonl"


@dataclass(frozen=True, slots=True)
class PieceRunner:
    """Runs one piece, in a process of Ray. The output folder gets a file per batch, named by its content."""

    options: RunOptions
    url: str
    output: str  # a URI

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs the batches of a piece; returns an outcome for each."""
        piece = Piece(**row)
        outcomes = []
        try:
            for number, lines in enumerate(_batches(self.options.file, piece)):
                outcomes.append(self._run(piece, number, lines))
        except (OutriderError, httpx.HTTPError, OSError) as error:
            outcomes.append(_outcome(piece, "error", str(error) or type(error).__name__))
        return outcomes

    def _run(self, piece: Piece, number: int, lines: list[bytes]) -> dict[str, Any]:
        """Runs one batch, unless its answers are there."""
        with tempfile.TemporaryDirectory(prefix="outrider-batch-") as folder:
            path = Path(folder, f"{Path(piece.path).stem}.{piece.start:012d}.{number}.jsonl")
            path.write_bytes(b"".join(lines))
            system, output = _open(self.output)
            files = PieceFiles(system, f"{output}/{path.stem}.{RequestFile.read(path).digest[:12]}")
            if files.has("output"):
                num_failed = files.num_lines("errors")
                return _outcome(piece, "done before", num_completed=len(lines) - num_failed, num_failed=num_failed)
            before = files.lines("partial")
            path.write_bytes(b"".join(left_of(lines, before)))
            batch = asyncio.run(self._answers(RequestFile.read(path), Path(folder)))
            if batch["status"] == "failed":
                error = batch["errors"]["data"][0]
                return _outcome(piece, "refused", f"its line {error['line']}: {error['message']}")
            if batch["status"] == "cancelled":
                return _outcome(piece, "cancelled", f"batch {batch['id']} was cancelled")
            answers = Path(folder, "output")
            with answers.open("ab") as file:
                file.writelines(before)
            counts, usage = batch["request_counts"], batch["usage"]
            tokens = {f"num_{name}": usage[name] for name in ("input_tokens", "output_tokens")}
            if batch["status"] == "expired":
                files.put("partial", answers)
                num_left = len(lines) - len(before) - counts["completed"]
                message = f"the time of batch {batch['id']} was up; {num_left} of {len(lines)} lines have no answer"
                sums = {"num_completed": counts["completed"] + len(before), "num_left": num_left}
                outcome = _outcome(piece, "expired", message, **sums, **tokens)
            else:
                # The answers come last: where they are, all is there.
                if Path(folder, "errors").exists():
                    files.put("errors", Path(folder, "errors"))
                files.put("output", answers)
                files.delete("partial")
                sums = {"num_completed": counts["completed"] + len(before), "num_failed": counts["failed"]}
                outcome = _outcome(piece, batch["status"], **sums, **tokens)
        asyncio.run(self._delete(batch))
        return outcome

    async def _answers(self, file: RequestFile, folder: Path) -> dict[str, Any]:
        """Runs a batch, or finds that of an earlier run, and downloads its results; returns it."""
        async with BatchClient.at(self.options, self.url) as client:
            batch = await client.find(file, takes_partial=True)
            if batch is None or not await client.has_results(batch):
                batch = await client.create(file)
            batch = await follow(client, batch, lambda _: None, lambda _: None)
            for name, file_id in (("errors", batch["error_file_id"]), ("output", batch["output_file_id"])):
                if file_id is not None:
                    await client.download(file_id, folder / name)
        return batch

    async def _delete(self, batch: dict[str, Any]) -> None:
        """Deletes what the server need not keep any more: it counts for the tenant's quota."""
        async with BatchClient.at(self.options, self.url) as client:
            await client.delete_files(batch)


def run_pieces(options: RunOptions, url: str, progress: Progress) -> Counter[str]:
    """Runs all files that `options.file` names; returns sums over their lines, and `num_lost` batches.

    Raises ConfigurationError if Ray Data or the files are missing, and ApiError if the server cannot be reached.
    """
    try:
        import pyarrow.fs  # noqa: F401
        import ray.data
    except ImportError as error:
        raise ConfigurationError(f"{_INSTALL} ({error})") from error
    output = _uri(options.output or f"{options.file.rstrip('/').removesuffix('.jsonl')}.output")
    pieces = find_pieces(options.file)
    runner = PieceRunner(options, url, output)
    asyncio.run(_look(options, url))
    progress.note(f"{len(pieces)} pieces, {options.at_once} at once; answers: {output}")
    totals: Counter[str] = Counter()
    with _cluster(options.ray_address):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # our own lines say how far it is
        rows = ray.data.from_items([asdict(piece) for piece in pieces], override_num_blocks=len(pieces))
        most = ray.data.TaskPoolStrategy(size=min(options.at_once, len(pieces)))
        ran = rows.flat_map(runner, compute=most, num_cpus=_CPUS)
        for number, outcome in enumerate(ran.iter_rows(), 1):
            totals.update({name: value for name, value in outcome.items() if name.startswith("num_")})
            where = f"{outcome['path']} from byte {outcome['start']}"
            if outcome["message"]:
                progress.warn(f"{where}: {outcome['status']}: {outcome['message']}")
            else:
                told = f"{outcome['num_completed']} answers, {outcome['num_failed']} failed"
                progress.note(f"{where}: {outcome['status']}: {told}")
            progress.update(f"{number} batches of {len(pieces)} or more, {totals['num_completed']} answers")
    return totals


def find_pieces(source: str) -> list[Piece]:
    """The pieces of a file, or of all files `*.jsonl` in a folder. Raises ConfigurationError."""
    from pyarrow.fs import FileSelector, FileType

    system, path = _open(_uri(source))
    try:
        info = system.get_file_info(path)
        if info.type is FileType.Directory:
            found = system.get_file_info(FileSelector(path, recursive=True))
            files = sorted((each for each in found if each.path.endswith(".jsonl")), key=lambda each: each.path)
        else:
            files = [info] if info.is_file else []
    except OSError as error:
        raise ConfigurationError(f"FILE: {source} cannot be read: {error}") from error
    pieces = [piece for each in files for piece in cut(each.path, each.size)]
    if not pieces:
        raise ConfigurationError(f"FILE: {source} is no file with requests, and no folder with such files (*.jsonl)")
    if len(pieces) > _PIECES_MAX:
        raise ConfigurationError(f"FILE: {source} has {len(pieces)} pieces; at most {_PIECES_MAX} are run at once")
    return pieces


async def _look(options: RunOptions, url: str) -> None:
    """Fails before Ray starts if there is no server. Raises ConfigurationError."""
    async with BatchClient.at(options, url):
        pass


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    """Connects to a cluster of Ray, or starts one on this machine."""
    import ray

    try:
        ray.init(
            address=address or os.environ.get("RAY_ADDRESS") or "local",
            include_dashboard=False if address is None and "RAY_ADDRESS" not in os.environ else None,
            logging_level="error",
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"--ray-address: Ray cannot be reached: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _batches(source: str, piece: Piece) -> Iterator[list[bytes]]:
    system, _ = _open(_uri(source))
    with system.open_input_file(piece.path) as opened, io.BufferedReader(opened, 1 << 20) as file:
        yield from batches_of(lines_of(file, piece))


def _uri(place: str) -> str:
    return place.rstrip("/") if "://" in place else Path(place).resolve().as_uri()


def _open(uri: str) -> tuple[FileSystem, str]:
    """The file system of a place, and its path there. Raises ConfigurationError."""
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{uri} cannot be opened: {error}") from error


def _outcome(piece: Piece, status: str, message: str = "", **sums: int) -> dict[str, Any]:
    names = ("num_completed", "num_failed", "num_left", "num_input_tokens", "num_output_tokens")
    told = {"status": status, "message": message, "num_lost": int(bool(message) and status != "expired")}
    return asdict(piece) | told | {name: sums.get(name, 0) for name in names}
