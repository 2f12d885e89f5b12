"""The bodies of the Files and Batches APIs. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from coordinator.api.schema.body_parts import Body
from coordinator.batches.files import LIFE_MAX_S, LIFE_MIN_S
from outrider.errors import InvalidRequest

METADATA_MAX: Final = 16
_KEY_CHARS_MAX: Final = 64
_VALUE_CHARS_MAX: Final = 512
_ID_CHARS_MAX: Final = 256


class ExpiresAfter(Body):
    """When a file expires."""

    anchor: Literal["created_at"] = Field(description="from when the seconds count")
    seconds: Annotated[int, Field(ge=LIFE_MIN_S, le=LIFE_MAX_S)] = Field(description="life of the file")


class CreateBatchBody(Body):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=_ID_CHARS_MAX)] = Field(description="an uploaded file of requests")
    endpoint: Annotated[str, Field(max_length=_ID_CHARS_MAX)] = Field(
        description="the path of all its requests: `/v1/completions`, `/v1/chat/completions` or `/v1/responses`"
    )
    completion_window: Annotated[str, Field(max_length=_ID_CHARS_MAX)] = Field(description="`24h`")
    metadata: Annotated[dict[str, str], Field(max_length=METADATA_MAX)] | None = Field(
        default=None, description="texts to find the batch by; at most 64 characters as a key, 512 as a value"
    )
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="life of the files of its output; 30 days where it is left out"
    )

    def check(self) -> None:
        """Raises InvalidRequest for metadata that are too long."""
        for key, value in (self.metadata or {}).items():
            if not 1 <= len(key) <= _KEY_CHARS_MAX or len(value) > _VALUE_CHARS_MAX:
                raise InvalidRequest(
                    "metadata",
                    f"metadata: a key has 1 to {_KEY_CHARS_MAX} characters, a value at most {_VALUE_CHARS_MAX}",
                )


class FileUpload(BaseModel):
    """The form of POST /v1/files."""

    model_config = ConfigDict(extra="forbid")

    file: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/octet-stream"})] = Field(
        description="a file of requests, one JSON object per line, at most 200 MiB and 50,000 requests"
    )
    purpose: Literal["batch"] = Field(description="the use of the file")
    anchor: Literal["created_at"] | None = Field(
        default=None, alias="expires_after[anchor]", description="from when the seconds count"
    )
    seconds: Annotated[int, Field(ge=LIFE_MIN_S, le=LIFE_MAX_S)] | None = Field(
        default=None, alias="expires_after[seconds]", description="life of the file; 30 days where it is left out"
    )
