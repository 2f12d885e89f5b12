"""Answers the calls of OpenAI's Files and Batches APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from coordinator.access.api_keys import Caller
from coordinator.api.batches.batch_answers import batch_answer, file_answer, page_answer
from coordinator.api.batches.batch_body import CreateBatchBody
from coordinator.api.batches.paths import BATCH_LIMIT_MAX, FILE_LIMIT_MAX, LIMIT
from coordinator.api.http.file_upload import Upload, read_upload
from coordinator.api.http.http_transport import caller_of, read_body, unless_small
from coordinator.api.schema.openai_schema import parse_body
from coordinator.batches.batch_desk import PURPOSE, BatchDesk
from coordinator.batches.files import FILE_BYTES_MAX, LIFE_S, StoredFile, check_life
from coordinator.intake.request_limit import TenantShares
from coordinator.service.generation_service import GenerationService
from outrider.errors import InvalidRequest, NotFound

UPLOADS_MAX: Final = 8
"""Files that one replica takes in at once. One tenant has half of them, so that slow ones do not keep others out."""
UPLOAD_BYTES_MAX: Final = 5 * FILE_BYTES_MAX
"""Most bytes of its disk that they take up together, for a while. One tenant's four may have the largest size."""
_UPLOAD_AGAIN_S: Final = 5.0
_FORM_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class BatchCalls:
    """The handlers of files and batches, over one service."""

    def __init__(self, service: GenerationService, desk: BatchDesk | None) -> None:
        """`desk` is None where batches are off."""
        self._service = service
        self._desk = desk
        self._uploads = TenantShares(UPLOADS_MAX, "files on their way", per_free=1, retry_after_s=_UPLOAD_AGAIN_S)
        self._upload_bytes = TenantShares(
            UPLOAD_BYTES_MAX, "bytes of files on their way", retry_after_s=_UPLOAD_AGAIN_S
        )

    async def upload(self, request: Request) -> Response:
        caller, desk = await self._admit(request)
        with self._uploads.taken(caller.tenant, 1), self._upload_bytes.taken(caller.tenant) as take_bytes:
            async with read_upload(request, take_bytes) as upload:
                life_s = _check_form(upload)
                file = await desk.files.upload(caller, upload.filename, PURPOSE, upload.pieces(), life_s)
        return JSONResponse(file_answer(file))

    async def files(self, request: Request) -> Response:
        caller, desk = await self._admit(request)
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", "order must be asc or desc")
        limit = _limit(request, FILE_LIMIT_MAX)
        after, purpose = query.get("after", ""), query.get("purpose")
        found: list[StoredFile] = []
        while len(found) <= limit:  # a page of one purpose may come out of several
            page = await desk.files.page(caller, after, limit + 1, oldest_first=order == "asc")
            found += [file for file in page if purpose is None or file.purpose == purpose]
            if len(page) <= limit:
                break
            after = page[-1].file_id
        return JSONResponse(page_answer([file_answer(file) for file in found], limit))

    async def file(self, request: Request, file_id: str) -> Response:
        """Returns a file's record, or deletes the file."""
        caller, desk = await self._admit(request)
        if request.method == "DELETE":
            await desk.files.delete(caller, file_id)
            return JSONResponse({"id": file_id, "object": "file", "deleted": True})
        return JSONResponse(file_answer(await desk.files.get(caller.tenant, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        caller, desk = await self._admit(request)
        file = await desk.files.get(caller.tenant, file_id)
        pieces = desk.files.store.pieces(file.content)
        first = await anext(pieces, b"")  # an error comes before the status
        headers = {"Content-Length": str(file.num_bytes)}
        return StreamingResponse(_joined(first, pieces), headers=headers, media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        caller, desk = await self._admit(request)
        raw = await read_body(request)
        body = await unless_small(self._service.threads, caller, raw, lambda: parse_body(CreateBatchBody, raw))
        body.check()
        batch = await desk.create(
            caller,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            window=body.completion_window,
            metadata=body.metadata,
            output_life_s=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        return JSONResponse(batch_answer(batch))

    async def batches(self, request: Request) -> Response:
        caller, desk = await self._admit(request)
        limit = _limit(request, BATCH_LIMIT_MAX)
        found = await desk.page(caller, request.query_params.get("after", ""), limit + 1)
        return JSONResponse(page_answer([batch_answer(batch) for batch in found], limit))

    async def batch(self, request: Request, batch_id: str) -> Response:
        caller, desk = await self._admit(request)
        return JSONResponse(batch_answer(await desk.get(caller, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        caller, desk = await self._admit(request)
        return JSONResponse(batch_answer(await desk.cancel(caller, batch_id)))

    async def _admit(self, request: Request) -> tuple[Caller, BatchDesk]:
        """Admits a call. Raises NotFound where batches are off, Overloaded."""
        if self._desk is None:
            raise NotFound(
                "batches are off at this server: start its coordinators with --batch-files FOLDER, or with "
                "--batch-files s3://BUCKET/PREFIX, to have /v1/files and /v1/batches"
            )
        caller = caller_of(request)
        await self._service.admit(caller)
        return caller, self._desk


def _check_form(upload: Upload) -> int:
    """Checks the fields of an upload; returns the life of the file. Raises InvalidRequest."""
    fields: dict[str, Any] = upload.fields
    if unknown := [name for name in fields if name not in _FORM_FIELDS]:
        raise InvalidRequest(unknown[0][:100], f"unknown part {unknown[0][:100]!r} of the form")
    if fields.get("purpose") != PURPOSE:
        raise InvalidRequest("purpose", f"purpose must be {PURPOSE}; files are kept for batches only")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return LIFE_S
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor", "expires_after.anchor must be created_at")
    if seconds is None or not seconds.isdecimal() or len(seconds) > 9:
        raise InvalidRequest("expires_after.seconds", "expires_after.seconds must be a number of seconds")
    return check_life(int(seconds))


def _limit(request: Request, most: int) -> int:
    """The size of a page. Raises InvalidRequest."""
    text = request.query_params.get("limit", str(LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most):
        raise InvalidRequest("limit", f"limit must be 1 to {most}")
    return int(text)


async def _joined(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece
        await asyncio.sleep(0)
