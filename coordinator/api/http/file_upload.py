"""Reads an uploaded file from a form of bounded size, through Starlette's parser, which keeps long ones on the disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from coordinator.api.http.http_transport import paced
from coordinator.batches.file_store import PIECE_BYTES
from coordinator.batches.files import FILE_BYTES_MAX
from outrider.errors import BodyTooLong, ClientLeft, InvalidRequest

UPLOAD_WAIT_MAX_S: Final = 900.0
_FIELDS_MAX: Final = 8
_FIELD_BYTES_MAX: Final = 4096
_FORM_BYTES_MAX: Final = 64 << 10  # besides the file
_FILENAME_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Upload:
    """A form with one file."""

    filename: str
    fields: dict[str, str]
    file: UploadFile

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the content of the file."""
        while piece := await self.file.read(PIECE_BYTES):
            yield piece


@asynccontextmanager
async def read_upload(request: Request, take_bytes: Callable[[int], None]) -> AsyncIterator[Upload]:
    """Reads the form; its file is there inside the context. `take_bytes` gets the number of bytes before they are kept,
    and may refuse them. Raises InvalidRequest, BodyTooSlow, ClientLeft."""
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequest("file", "the body must be a form (multipart/form-data) with the parts file and purpose")
    parser = MultiPartParser(
        request.headers,
        _bounded(request, take_bytes),
        max_files=1,
        max_fields=_FIELDS_MAX,
        max_part_size=_FIELD_BYTES_MAX,
    )
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise ClientLeft("the client went away while it sent the file") from None
    except (MultiPartException, ValueError, KeyError) as error:
        raise InvalidRequest(None, f"the body is no valid form: {error}") from error
    try:
        file, fields = None, {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name == "file":
                file = value
            elif isinstance(value, str) and name not in fields:
                fields[name] = value
            else:
                raise InvalidRequest(name[:100], f"the form has a part {name[:100]!r} that it should not have")
        if file is None:
            raise InvalidRequest("file", "the form has no file; its part is called file, and has a filename")
        yield Upload((file.filename or "file")[:_FILENAME_CHARS_MAX], fields, file)
    finally:
        await form.close()


async def _bounded(request: Request, take_bytes: Callable[[int], None]) -> AsyncGenerator[bytes]:
    """Passes the body on. Raises BodyTooLong if it is too long, by its header or as it comes."""
    most = FILE_BYTES_MAX + _FORM_BYTES_MAX
    length = request.headers.get("Content-Length", "")
    too_long = BodyTooLong("file", f"the file is longer than {FILE_BYTES_MAX} bytes; send it in parts")
    if length.isdecimal() and (len(length) > 20 or int(length) > most):
        raise too_long
    num_bytes = 0
    async for piece in paced(request.stream(), UPLOAD_WAIT_MAX_S):
        num_bytes += len(piece)
        if num_bytes > most:
            raise too_long
        take_bytes(len(piece))
        yield piece
