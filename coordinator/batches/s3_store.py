"""Files in a bucket of S3, or of a server that talks its protocol, through `obstore`.

The address is `s3://BUCKET/PREFIX`; `outrider.buckets` says where credentials come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final

from coordinator.batches.file_store import PIECE_BYTES, check_name
from outrider.buckets import S3, open_bucket
from outrider.errors import NotFound, Unavailable

SCHEME: Final = f"{S3}://"
_PART_BYTES: Final = 8 << 20  # of an upload; S3 takes parts from 5 MiB
_TIMEOUT: Final = timedelta(seconds=30)  # of one call


class S3Store:
    """Files in a bucket."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for an address without a bucket, or without the package `obstore`."""
        bucket = open_bucket(url, f"--batch-files {url}", (S3,), _TIMEOUT)
        self._store, self._obstore, self._errors = bucket.store, bucket.obstore, bucket.errors

    async def write(self, name: str, content: AsyncIterator[bytes]) -> int:
        path, num_bytes = check_name(name), 0
        try:
            async with self._obstore.open_writer_async(self._store, path, buffer_size=_PART_BYTES) as writer:
                async for piece in content:
                    await writer.write(piece)
                    num_bytes += len(piece)
        except BaseException as error:
            await self._discard(path)  # closing the writer has published what had come
            if isinstance(error, (self._errors.BaseError, OSError)):
                raise _failed(error) from error
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
            raise _failed(error) from error

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        try:
            found = await self._obstore.get_async(self._store, check_name(name))
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)
        except (self._errors.NotFoundError, FileNotFoundError):
            raise NotFound("the content of the file is gone") from None
        except self._errors.BaseError as error:
            raise _failed(error) from error

    async def delete(self, name: str) -> None:
        try:
            await self._obstore.delete_async(self._store, check_name(name))
        except (self._errors.NotFoundError, FileNotFoundError):
            return
        except self._errors.BaseError as error:
            raise _failed(error) from error


def _failed(error: Exception) -> Unavailable:
    return Unavailable(f"S3 does not take the call: {str(error)[:300]}", 10.0)
