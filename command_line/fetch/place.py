"""The folder that is fetched into, the one beside it that is filled first, and the lock of both.

Beside FOLDER lie, while a fetch runs or after it broke off:

.FOLDER.partial   files that are whole, files that are not (`*.part`), and a journal of those that are whole
.FOLDER.lock      the lease of the process that fetches
.FOLDER.old       the replaced folder, for the moment until it is removed

FOLDER itself comes into being by one rename. Replacing takes two, and for that instant there is no FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Final

import filelock

from command_line.fetch.record import RECORD, Record, RecordedFile
from command_line.fetch.sources import SourceFile
from command_line.fetch.transfer import Stopped, Watcher, part_of
from outrider.engine.loading.checkpoint_files import partial_folder
from outrider.errors import ConfigurationError, Unavailable

LEASE_S: Final = 60.0
"""Time after which a silent process on another machine counts as dead. One on this machine is known to be."""
_POLL_S: Final = 0.5
_JOURNAL: Final = ".outrider-fetch.journal"
_SPARE_BYTES: Final = 64 << 20


class Place:
    """A folder to fetch into."""

    def __init__(self, folder: Path, lease_s: float = LEASE_S) -> None:
        """Raises ConfigurationError for a folder that cannot be renamed into being."""
        self.folder = folder.absolute()
        if not self.folder.name:
            raise ConfigurationError(f"FOLDER {folder} is the root of a file system; name a folder in it")
        self.partial = partial_folder(self.folder)
        self._lease_s = lease_s
        self._lock = self.folder.with_name(f".{self.folder.name}.lock")
        self._old = self.folder.with_name(f".{self.folder.name}.old")
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigurationError(f"FOLDER {folder} is no folder; name one, or a name that is free")
        if os.path.ismount(self.folder):
            raise ConfigurationError(
                f"FOLDER {folder} is where a volume is mounted, and that cannot be replaced in one step: name a folder "
                f"in it, such as {folder / 'model'}"
            )

    def record(self) -> Record | None:
        """The record of the folder; None if there is nothing. Raises ConfigurationError if it was not fetched."""
        found = Record.read(self.folder)
        if found is None and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigurationError(
                f"FOLDER {self.folder} has files that `outrider fetch` did not write; name another folder, or remove "
                f"them. (`outrider fetch {self.folder} {self.folder}` checks a model that is there.)"
            )
        return found

    @contextmanager
    def locked(self, max_wait_s: float, watcher: Watcher, stop: Event) -> Iterator[None]:
        """Keeps other processes out, on this machine and on others that share the volume. `stop` is set if the lease
        is lost. Raises Unavailable if another one takes too long, ConfigurationError if nothing can be written here.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            lease = self._lease(stop)
            try:
                lease.acquire(timeout=0)
            except filelock.Timeout:
                watcher.note(f"another process fetches {self.folder}; this one waits for it, up to {max_wait_s:.0f} s")
                lease.acquire(timeout=max_wait_s, poll_interval=_POLL_S)
        except filelock.Timeout as error:
            raise Unavailable(
                f"another process has fetched {self.folder} for {max_wait_s:.0f} s; wait longer with --max-wait-s",
                60.0,
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"{self.folder.parent} cannot be written ({error.strerror or error}); mount the volume with write "
                "access"
            ) from error
        try:
            yield
        except Stopped:
            if lease.compromise is not None:
                raise Unavailable(f"another process took over {self.folder}; run the command again", 10.0) from None
            raise
        finally:
            with suppress(OSError):
                lease.release()

    def _lease(self, stop: Event | None) -> filelock.SoftFileLease:
        """A lock that another machine can see to be abandoned: its holder renews it as long as it lives."""
        return filelock.SoftFileLease(
            self._lock,
            lease_duration=self._lease_s,
            on_compromise=None if stop is None else lambda _: stop.set(),
            thread_local=False,
        )

    def prepare(self, files: list[SourceFile]) -> dict[str, RecordedFile]:
        """Makes the partial folder, removes from it what belongs to no file of these; returns those that are whole."""
        self.partial.mkdir(exist_ok=True)
        finished = {found.path: found for found in self._journal()}
        whole = {}
        keep = {_JOURNAL}
        for file in files:
            found = finished.get(file.path)
            path = self.partial / file.path
            if found and found.identity == file.identity and path.is_file() and path.stat().st_size == file.size:
                whole[file.path] = found
                keep.add(file.path)
            else:
                keep.add(part_of(self.partial, file).relative_to(self.partial).as_posix())
        for path in [*self.partial.rglob("*")]:
            if path.is_file() and path.relative_to(self.partial).as_posix() not in keep:
                path.unlink()
        lines = [json.dumps(asdict(found)) + "\n" for found in whole.values()]
        fresh = self.partial / f"{_JOURNAL}.new"
        fresh.write_text("".join(lines), encoding="utf-8")  # without what a killed process tore
        os.replace(fresh, self.partial / _JOURNAL)
        return whole

    def finish(self, file: RecordedFile) -> None:
        """Notes that a file is whole."""
        with (self.partial / _JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(asdict(file)) + "\n")

    def check_space(self, files: list[SourceFile]) -> None:
        """Raises ConfigurationError if the disk has no room for what is missing of these files."""
        missing = sum(file.size - self._bytes_of(file) for file in files)
        free = shutil.disk_usage(self.partial).free
        if missing + _SPARE_BYTES > free:
            raise ConfigurationError(
                f"{missing / 1e9:.1f} GB are to be fetched, and {self.folder.parent} has room for {free / 1e9:.1f} GB; "
                f"nothing of them was fetched. Make the volume larger, or remove what is not needed"
            )

    def publish(self, record: Record) -> None:
        """Renames the partial folder to the folder. What it replaces is removed afterwards."""
        record.write(self.partial)
        for folder in (self.partial / RECORD, *_folders(self.partial)):
            _sync(folder)
        if self._old.exists():
            shutil.rmtree(self._old)
        if self.folder.exists():
            os.rename(self.folder, self._old)
        try:
            os.rename(self.partial, self.folder)
        except BaseException:
            if self._old.exists() and not self.folder.exists():
                os.rename(self._old, self.folder)
            raise
        _sync(self.folder.parent)
        (self.folder / _JOURNAL).unlink(missing_ok=True)  # so late that a process that is killed before goes on
        shutil.rmtree(self._old, ignore_errors=True)

    def tidy(self) -> None:
        """Removes what a process that was killed left beside a folder that is whole, unless another one is at work."""
        if not self.partial.exists() and not self._old.exists():
            return
        with suppress(OSError), self._lease(None).acquire(timeout=0):  # a Timeout is an OSError
            shutil.rmtree(self.partial, ignore_errors=True)
            shutil.rmtree(self._old, ignore_errors=True)

    def _bytes_of(self, file: SourceFile) -> int:
        for path in (self.partial / file.path, part_of(self.partial, file)):
            with suppress(OSError):
                return path.stat().st_size
        return 0

    def _journal(self) -> Iterator[RecordedFile]:
        try:
            lines = (self.partial / _JOURNAL).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            with suppress(ValueError, TypeError):  # a line that was not finished
                yield RecordedFile(**json.loads(line))


def _folders(folder: Path) -> list[Path]:
    return [*(path for path in folder.rglob("*") if path.is_dir()), folder]


def _sync(path: Path) -> None:
    """Waits until the disk has a file, or a folder's names."""
    with suppress(OSError):  # some network file systems sync no folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
