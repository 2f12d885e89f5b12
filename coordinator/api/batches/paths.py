"""The calls of the Files and Batches APIs, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from coordinator.api.batches.batch_answers import BatchList, BatchObject, DeletedFile, FileList, FileObject
from coordinator.api.batches.batch_body import CreateBatchBody, FileUpload
from coordinator.api.schema.openapi_parts import (
    NO_RETRY,
    RETRY_AFTER,
    Operation,
    Schema,
    error,
    json_answer,
    parameter,
)

BATCH_MODELS: Final[tuple[type[BaseModel], ...]] = (
    CreateBatchBody, FileUpload, FileObject, FileList, DeletedFile, BatchObject, BatchList,
)  # fmt: skip

FILE_LIMIT_MAX: Final = 1000
BATCH_LIMIT_MAX: Final = 100
LIMIT: Final = 20

_FILE: Final = parameter("file_id", "The file's id.", where="path")
_BATCH: Final = parameter("batch_id", "The batch's id.", where="path")
_AFTER: Final = parameter("after", "The id behind which the page begins.", where="query")
_PURPOSE: Final = parameter("purpose", "Only files of this purpose.", where="query")
_ORDER: Final = parameter("order", "By creation: `desc`, the newest first, or `asc`.", where="query")
_COMMON: Final = {
    "404": error("There is no such file or batch, or the server runs without `--batch-files`."),
    "429": error("Everything is full.", RETRY_AFTER),
    "503": error("Redis or the storage does not answer.", RETRY_AFTER),
}
_REFUSED: Final = {"400": error("Refused; the error names the parameter.")}
_CONTENT: Final[Schema] = {
    "description": "The content.",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


def _limit(most: int) -> Schema:
    text = f"Most entries of the page; {LIMIT} where it is left out."
    about: dict[str, Any] = parameter("limit", text, where="query")
    return about | {"schema": {"type": "integer", "minimum": 1, "maximum": most}}


BATCH_OPERATIONS: Final = (
    Operation(
        "/v1/files",
        "upload_file",
        "Stores a file of requests for a batch.",
        {"200": json_answer(FileObject), **_COMMON},
        can_resume=False,
        upload=FileUpload,
        method="post",
    ),
    Operation(
        "/v1/files",
        "files",
        "The files of the caller.",
        {"200": json_answer(FileList), **_COMMON, **_REFUSED},
        None,
        [_limit(FILE_LIMIT_MAX), _AFTER, _ORDER, _PURPOSE],
    ),
    Operation("/v1/files/{file_id}", "file", "A file.", {"200": json_answer(FileObject), **_COMMON}, None, [_FILE]),
    Operation(
        "/v1/files/{file_id}",
        "delete_file",
        "Deletes a file.",
        {"200": json_answer(DeletedFile), **_COMMON},
        None,
        [_FILE],
        method="delete",
    ),
    Operation(
        "/v1/files/{file_id}/content", "file_content", "The content of a file.", {"200": _CONTENT, **_COMMON}, None,
        [_FILE],
    ),
    Operation(
        "/v1/batches",
        "create_batch",
        "Creates a batch: runs the requests of a file in spare capacity.",
        {"200": json_answer(BatchObject), **_COMMON},
        CreateBatchBody,
        can_resume=False,
    ),
    Operation(
        "/v1/batches",
        "batches",
        "The batches of the caller.",
        {"200": json_answer(BatchList), **_COMMON, **_REFUSED},
        None,
        [_limit(BATCH_LIMIT_MAX), _AFTER],
    ),
    Operation(
        "/v1/batches/{batch_id}", "batch", "A batch.", {"200": json_answer(BatchObject), **_COMMON}, None, [_BATCH],
    ),
    Operation(
        "/v1/batches/{batch_id}/cancel",
        "cancel_batch",
        "Cancels a batch; what has ended is kept.",
        {"200": json_answer(BatchObject), **_COMMON, "409": error("It has ended.", NO_RETRY)},
        None,
        [_BATCH],
        method="post",
    ),
)  # fmt: skip
