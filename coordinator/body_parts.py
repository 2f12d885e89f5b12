"""What every part of a request body is made of: strict pydantic models that give up at the first wrong entry. Pure.

Pydantic writes down all that is wrong. Of eight megabytes of nulls, where numbers are due, that is gigabytes and half a
minute; a client is told of the first one anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from outrider.errors import InvalidRequest

ItemT = TypeVar("ItemT")


class _First(FailFast):
    """Hashable, as what unions are made of has to be."""

    def __hash__(self) -> int:
        return 0


FIRST_ERROR_ONLY: Final = _First()
Listed = Annotated[list[ItemT], FIRST_ERROR_ONLY]
"""A list of a body."""

_FIELDS_MAX: Final = 64  # more than any part has


class Body(BaseModel):
    """Strict: a number in quotes is not a number. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_flood_of_fields(cls, content: Any) -> Any:
        if isinstance(content, dict) and len(content) > _FIELDS_MAX:
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next(name for name in content if name not in known)
            raise InvalidRequest(unknown, f"unknown parameter {unknown!r}")
        return content
