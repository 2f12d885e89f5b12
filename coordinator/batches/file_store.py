"""Storage for the content of files, by name: the interface, a folder that all replicas share, and a bucket of S3.

A stored file never changes: names are new for each write. A write that breaks off leaves nothing under its name.
Names are paths of letters, digits, `-`, `_`, `.` and `/` that this package makes; no client chooses one.

The bucket, of S3 or of a server that talks its protocol, has the address `s3://BUCKET/PREFIX`; `outrider.buckets` says
where credentials come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from outrider.buckets import S3, open_bucket
from outrider.errors import ConfigurationError, NotFound, StorageUnavailable

PIECE_BYTES: Final = 256 << 10
"""Bytes of a piece in which files are read and written."""
S3_SCHEME: Final = f"{S3}://"
_S3_PART_BYTES: Final = 8 << 20  # of an upload; S3 takes parts from 5 MiB
_S3_TIMEOUT: Final = timedelta(seconds=30)  # of one call
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_.-]+)*")


class FileStore(Protocol):
    """Interface of a storage. All methods raise StorageUnavailable if it does not answer."""

    async def write(self, name: str, content: AsyncIterator[bytes]) -> int:
        """Stores a file, and returns its length in bytes."""

    async def read(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes `[start, end)`, which lie in the file. Raises NotFound."""

    def pieces(self, name: str) -> AsyncIterator[bytes]:
        """Yields a whole file in pieces. Raises NotFound."""

    async def delete(self, name: str) -> None:
        """Deletes a file, if there is one."""


def check_name(name: str) -> str:
    """Returns a name of a stored file. Raises ValueError for one that this package does not make."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is no name of a stored file")
    return name


async def one_piece(content: bytes) -> AsyncIterator[bytes]:
    """Yields a short content, for `FileStore.write`."""
    yield content


class FolderStore:
    """Files in a folder. Replicas on several machines share it over the network, or use S3."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError if the folder cannot be written."""
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".probe-{uuid.uuid4().hex}"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as error:
            raise ConfigurationError(f"--batch-files {folder} cannot be written: {error.strerror}") from error

    async def write(self, name: str, content: AsyncIterator[bytes]) -> int:
        path = self._folder / check_name(name)
        temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        num_bytes = 0
        try:
            await asyncio.to_thread(_create, temporary)
            async for piece in content:
                await asyncio.to_thread(_append, temporary, piece)
                num_bytes += len(piece)
            await asyncio.to_thread(_publish, temporary, path)
        except OSError as error:
            raise _failed(error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return num_bytes

    async def read(self, name: str, start: int, end: int) -> bytes:
        try:
            return await asyncio.to_thread(_read, self._folder / check_name(name), start, end)
        except FileNotFoundError:
            raise NotFound("the content of the file is gone") from None
        except OSError as error:
            raise _failed(error) from error

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        start = 0
        while piece := await self.read(name, start, start + PIECE_BYTES):
            yield piece
            start += len(piece)

    async def delete(self, name: str) -> None:
        path = self._folder / check_name(name)
        try:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            with contextlib.suppress(OSError):  # others' files are in it
                if path.parent != self._folder:
                    await asyncio.to_thread(path.parent.rmdir)
        except OSError as error:
            raise _failed(error) from error


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        file.write(piece)


def _publish(temporary: Path, path: Path) -> None:
    """Gives a complete file its name once its content is on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(max(end - start, 0))


def _failed(error: OSError) -> StorageUnavailable:
    return StorageUnavailable(f"the storage of batches' files fails: {error.strerror or type(error).__name__}", 10.0)


class S3Store:
    """Files in a bucket."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for an address without a bucket, or without the package `obstore`."""
        bucket = open_bucket(url, f"--batch-files {url}", (S3,), _S3_TIMEOUT)
        self._store, self._obstore, self._errors = bucket.store, bucket.obstore, bucket.errors

    async def write(self, name: str, content: AsyncIterator[bytes]) -> int:
        path, num_bytes = check_name(name), 0
        try:
            async with self._obstore.open_writer_async(self._store, path, buffer_size=_S3_PART_BYTES) as writer:
                async for piece in content:
                    await writer.write(piece)
                    num_bytes += len(piece)
        except BaseException as error:
            await self._discard(path)  # closing the writer has published what had come
            if isinstance(error, (self._errors.BaseError, OSError)):
                raise _s3_failed(error) from error
            raise
        return num_bytes

    async def _discard(self, path: str) -> None:
        with contextlib.suppress(Exception):
            await self._obstore.delete_async(self._store, path)

    async def read(self, name: str, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        try:
            return bytes(await self._obstore.get_range_async(self._store, check_name(name), start=start, end=end))
        except (self._errors.NotFoundError, FileNotFoundError):
            raise NotFound("the content of the file is gone") from None
        except self._errors.BaseError as error:
            raise _s3_failed(error) from error

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        try:
            found = await self._obstore.get_async(self._store, check_name(name))
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)
        except (self._errors.NotFoundError, FileNotFoundError):
            raise NotFound("the content of the file is gone") from None
        except self._errors.BaseError as error:
            raise _s3_failed(error) from error

    async def delete(self, name: str) -> None:
        try:
            await self._obstore.delete_async(self._store, check_name(name))
        except (self._errors.NotFoundError, FileNotFoundError):
            return
        except self._errors.BaseError as error:
            raise _s3_failed(error) from error


def _s3_failed(error: Exception) -> StorageUnavailable:
    return StorageUnavailable(f"S3 does not take the call: {str(error)[:300]}", 10.0)
