"""Transfers one file: resumes what an earlier process left, retries with back-off, and compares the checksum.

Invariant: a file has its own name only once it is whole, compared, and on the disk. Until then it is NAME.….part; its
name carries the identity of the content, so another version is never appended to it.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from typing import Any, BinaryIO, Final, Protocol, TypeVar

from command_line.fetch.record import RecordedFile
from command_line.fetch.sources import CHUNK_BYTES, Listing, Source, SourceFile
from outrider.errors import ConfigurationError, Unavailable

TRIES_MAX: Final = 6
"""Tries in a row without progress, before a file is given up. They take half a minute and more."""
PROGRESS_BYTES: Final = 1 << 20
"""Bytes that a try must bring, or the rest of the file, to count as progress. That bounds all tries together."""
SYNC_BYTES: Final = 64 << 20
"""Bytes after which the disk is waited for."""
_WAIT_MAX_S: Final = 30.0
PART: Final = ".part"
T = TypeVar("T")


class Stopped(Exception):
    """The transfer was asked to stop."""


class Watcher(Protocol):
    """Told what happens; calls come from several threads."""

    def advance(self, num_bytes: int) -> None:
        """Bytes are there, or (negative) were thrown away."""
        ...

    def note(self, message: str) -> None:
        """Something that an operator may want to know."""
        ...


class Hashes:
    """Checksums of a content that passes by: sha256, and the kind that the source states."""

    def __init__(self, file: SourceFile) -> None:
        self._digest = file.digest
        self._sha256 = hashlib.sha256()
        self._all: list[Any] = [self._sha256]
        self._stated: Any = self._sha256
        kind = None if file.digest is None else file.digest.kind
        if kind == "git-sha1":
            self._stated = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        elif kind == "md5":
            self._stated = hashlib.md5(usedforsecurity=False)
        if self._stated is not self._sha256:
            self._all.append(self._stated)

    def update(self, content: bytes) -> None:
        """Takes the next bytes."""
        for each in self._all:
            each.update(content)

    @property
    def sha256(self) -> str:
        """In hexadecimal."""
        return self._sha256.hexdigest()

    @property
    def stated(self) -> str:
        """The checksum of the source's kind, in hexadecimal."""
        found: str = self._stated.hexdigest()
        return found

    @property
    def are_right(self) -> bool:
        """Whether the content is what the source states; true where it states nothing."""
        return self._digest is None or self.stated == self._digest.value


class Transfer:
    """Transfers files of one listing into one folder."""

    def __init__(self, source: Source, listing: Listing, folder: Path, watcher: Watcher, stop: Event) -> None:
        self._source = source
        self._listing = listing
        self._folder = folder
        self._watcher = watcher
        self._stop = stop
        self._counted = Lock()
        self.num_bytes_read = 0  # from the source

    def fetch(self, file: SourceFile) -> RecordedFile:
        """Transfers a file. Raises Unavailable, ConfigurationError, OSError and Stopped."""
        path, part = self._folder / file.path, part_of(self._folder, file)
        path.parent.mkdir(exist_ok=True)
        is_fresh = not part.exists()
        hashes = self._read_into(part, file)
        if not hashes.are_right and not is_fresh:
            self._watcher.note(f"{file.path}: what an earlier run left of it is damaged; it is fetched anew")
            self._throw_away(part)
            hashes = self._read_into(part, file)
        if not hashes.are_right:
            self._throw_away(part)
            assert file.digest is not None
            raise ConfigurationError(
                f"{file.path} has the {file.digest.kind} {hashes.stated}, and {self._source.address} states "
                f"{file.digest.value}: its bytes were changed on the way, or at the source. It was removed; run the "
                "command again, and if it happens again look at proxies, mirrors and the source itself"
            )
        os.replace(part, path)
        compared = "size" if file.digest is None else file.digest.kind
        return RecordedFile(file.path, file.size, hashes.sha256, file.identity, compared)

    def _read_into(self, part: Path, file: SourceFile) -> Hashes:
        hashes = Hashes(file)
        with part.open("r+b" if part.exists() else "w+b") as out:
            at = self._resume(out, file, hashes)
            num_failed = 0
            while at < file.size:
                before, error = at, None
                try:
                    at = self._read_on(out, file, hashes, at)
                except _Broken as broken:
                    at, error = broken.at, broken.error
                has_progressed = at == file.size or at - before >= PROGRESS_BYTES
                num_failed = 0 if has_progressed else num_failed + 1
                if num_failed:
                    self._pause(file.path, num_failed, error or Unavailable(f"{file.path}: the content ended early"))
                elif error is not None and at < file.size:
                    self._watcher.note(f"{error.message}; it goes on at {at / file.size:.0%} of {file.path}")
            out.flush()
            os.fsync(out.fileno())
        return hashes

    def _resume(self, out: BinaryIO, file: SourceFile, hashes: Hashes) -> int:
        """Takes what an earlier run left; returns where to go on. What no checksum covers counts only as far as the
        disk surely has it."""
        size = out.seek(0, os.SEEK_END)
        kept = 0 if size > file.size else size if file.digest else size - size % SYNC_BYTES
        out.truncate(kept)
        out.seek(0)
        left = kept
        while left:
            self._check_stop()
            chunk = out.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise OSError(f"{file.path}: what an earlier run left cannot be read")
            hashes.update(chunk)
            left -= len(chunk)
        self._watcher.advance(kept)
        return kept

    def _read_on(self, out: BinaryIO, file: SourceFile, hashes: Hashes, at: int) -> int:
        """Reads one response; returns where it ended. Raises _Broken."""
        try:
            for chunk in self._source.read(self._listing, file, at):
                self._check_stop()
                if at + len(chunk) > file.size:
                    raise ConfigurationError(
                        f"{file.path} has more than the {file.size} bytes that {self._source.address} lists"
                    )
                out.write(chunk)
                hashes.update(chunk)
                if (at + len(chunk)) // SYNC_BYTES > at // SYNC_BYTES:
                    out.flush()
                    os.fsync(out.fileno())
                at += len(chunk)
                with self._counted:
                    self.num_bytes_read += len(chunk)
                self._watcher.advance(len(chunk))
        except Unavailable as error:
            raise _Broken(at, error) from error
        return at

    def _pause(self, path: str, num_failed: int, error: Unavailable) -> None:
        if num_failed >= TRIES_MAX:
            raise Unavailable(
                f"{error.message}; given up after {num_failed} tries. What is there is kept: the same command goes on",
                error.retry_after_s,
            ) from error
        wait_s = pause_s(num_failed, error)
        self._watcher.note(f"{error.message}; try {num_failed + 1} of {TRIES_MAX} in {wait_s:.0f} s")
        if self._stop.wait(wait_s):
            raise Stopped

    def _throw_away(self, part: Path) -> None:
        self._watcher.advance(-part.stat().st_size)
        part.unlink()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped


class _Broken(Exception):
    """A response that broke off at a position."""

    def __init__(self, at: int, error: Unavailable) -> None:
        super().__init__(at)
        self.at = at
        self.error = error


def part_of(folder: Path, file: SourceFile) -> Path:
    """The name of a file that is not whole yet."""
    version = hashlib.sha256(f"{file.identity} {file.size}".encode()).hexdigest()[:16]
    return folder / f"{file.path}.{version}{PART}"


def pause_s(num_failed: int, error: Unavailable) -> float:
    """Time before the next try: doubled each time, drawn from its upper half, and at least what the server asks."""
    longest = min(2.0 ** (num_failed - 1), _WAIT_MAX_S)
    return max(random.uniform(longest / 2, longest), error.retry_after_s if error.retry_after_s > 1 else 0.0)


def with_retries(call: Callable[[], T], watcher: Watcher, stop: Event) -> T:
    """Calls until it succeeds, at most TRIES_MAX times. Raises what the last try raised."""
    for number in range(1, TRIES_MAX + 1):
        try:
            return call()
        except Unavailable as error:
            if number == TRIES_MAX:
                raise
            wait_s = pause_s(number, error)
            watcher.note(f"{error.message}; try {number + 1} of {TRIES_MAX} in {wait_s:.0f} s")
            if stop.wait(wait_s):
                raise Stopped from error
    raise AssertionError


def sha256_of(path: Path, stop: Event) -> str:
    """The checksum of a file. Raises OSError and Stopped."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if stop.is_set():
                raise Stopped
            found.update(chunk)
    return found.hexdigest()
