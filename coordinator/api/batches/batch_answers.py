"""The answers of the Files and Batches APIs, and how they are written. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from coordinator.api.responses.response_answers import ReasoningTokens
from coordinator.api.schema.answers import Count, PromptTokensDetails
from coordinator.batches.batch import Batch, BatchState
from coordinator.batches.files import StoredFile


class FileObject(BaseModel):
    """A stored file."""

    id: str = Field(description="the file's id")
    object: Literal["file"]
    bytes: Count = Field(description="length of its content")
    created_at: Count = Field(description="seconds since 1970")
    expires_at: Count = Field(description="when it is deleted, seconds since 1970")
    filename: str = Field(description="the name that the client gave it")
    purpose: str = Field(description="`batch`, or `batch_output` of what a batch wrote")
    status: Literal["processed"] = Field(description="for older clients")


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject] = Field(description="the files")
    first_id: str | None = Field(description="id of the first")
    last_id: str | None = Field(description="id of the last, to ask for what is `after` it")
    has_more: bool = Field(description="whether others follow")


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str = Field(description="the file's id")
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(BaseModel):
    """An error in a file of requests."""

    code: str = Field(description="the reason, for programs")
    message: str = Field(description="the reason, for people")
    param: str | None = Field(description="the parameter to change")
    line: int | None = Field(description="the line, from 1")


class BatchErrors(BaseModel):
    """Errors in a file of requests, at most a hundred."""

    object: Literal["list"]
    data: list[BatchError] = Field(description="the errors, in the order of the lines")


class RequestCounts(BaseModel):
    """How many requests a batch has."""

    total: Count = Field(description="all; 0 until the file is checked")
    completed: Count = Field(description="answered")
    failed: Count = Field(description="ended with an error")


class BatchUsage(BaseModel):
    """Tokens of the requests that were answered, so far."""

    input_tokens: Count = Field(description="tokens in the prompts")
    input_tokens_details: PromptTokensDetails
    output_tokens: Count = Field(description="generated tokens")
    output_tokens_details: ReasoningTokens
    total_tokens: Count = Field(description="the sum of both")


class BatchObject(BaseModel):
    """A batch. Times are in seconds since 1970, null where it has not come to that."""

    id: str = Field(description="the batch's id")
    object: Literal["batch"]
    endpoint: str = Field(description="the path of its requests")
    errors: BatchErrors | None = Field(description="why its file was refused")
    input_file_id: str = Field(description="the file of requests")
    completion_window: str = Field(description="always `24h`")
    status: BatchState = Field(description="its state")
    output_file_id: str | None = Field(description="the file of answers, once there is one")
    error_file_id: str | None = Field(description="the file of requests that failed, if some did")
    created_at: Count
    in_progress_at: Count | None
    expires_at: Count = Field(description="when requests that have not run are given up")
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None = Field(description="as it was sent")


class BatchList(BaseModel):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject] = Field(description="the batches")
    first_id: str | None = Field(description="id of the first")
    last_id: str | None = Field(description="id of the last, to ask for what is `after` it")
    has_more: bool = Field(description="whether others follow")


def file_answer(file: StoredFile) -> dict[str, Any]:
    """Writes a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_answer(batch: Batch) -> dict[str, Any]:
    """Writes a batch."""
    errors = {"object": "list", "data": list(batch.errors)} if batch.errors else None
    at, counts = batch.times.get, batch.counts
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.window,
        "status": batch.state,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": at(BatchState.IN_PROGRESS),
        "expires_at": batch.expires_at,
        "finalizing_at": at(BatchState.FINALIZING),
        "completed_at": at(BatchState.COMPLETED),
        "failed_at": at(BatchState.FAILED),
        "expired_at": at(BatchState.EXPIRED),
        "cancelling_at": at(BatchState.CANCELLING),
        "cancelled_at": at(BatchState.CANCELLED),
        "request_counts": {
            "total": batch.num_lines,
            "completed": counts.num_completed,
            "failed": counts.num_failed,
        },
        "usage": {
            "input_tokens": counts.num_input_tokens,
            "input_tokens_details": {"cached_tokens": counts.num_cached_tokens},
            "output_tokens": counts.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning_tokens},
            "total_tokens": counts.num_input_tokens + counts.num_output_tokens,
        },
        "metadata": batch.metadata,
    }


def page_answer(items: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Writes a page of at most `limit` items, of which one more is given if there are more."""
    shown = items[:limit]
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
