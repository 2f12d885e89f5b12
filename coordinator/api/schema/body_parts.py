"""Base classes of request bodies: strict pydantic models that stop at the first wrong entry. Pure.

Pydantic collects all errors by default, which takes gigabytes and 30 s for 8 MB of nulls in place of numbers. A client
is told only of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from outrider.errors import InvalidRequest
from outrider.sampling_params import Bounds

ItemT = TypeVar("ItemT")


class _First(FailFast):
    """FailFast that is hashable, as members of a union must be."""

    def __hash__(self) -> int:
        return 0


FIRST_ERROR_ONLY: Final = _First()
Listed = Annotated[list[ItemT], FIRST_ERROR_ONLY]
"""A list in a body, which stops at its first error."""


def described(bounds: Bounds | None = None, **schema: Any) -> Any:
    """Tells the model's JSON schema of what is checked later, where errors name the parameter as clients know it."""
    extra: dict[str, Any] = {**(bounds.schema if bounds else {}), **schema}
    return Field(json_schema_extra=extra)


TokenId = Annotated[int, described(minimum=0)]

_FIELDS_MAX: Final = 64  # more than any part has


class Body(BaseModel):
    """A strict model: numbers in quotes are refused, and so are unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    """Parameters that are not served, each with the values that change nothing."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Parameters that cannot change the output: accepted at any value, and named in the response's header."""
    _ignored: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        text = "not served; accepted where it changes nothing"
        handler.resolve_ref_schema(schema)["properties"] |= {
            **{name: {"enum": [*values, None], "description": text} for name, values in cls.neutral.items()},
            **{name: {"description": "accepted and not used: it cannot change the output"} for name in cls.unused},
        }
        return schema

    @property
    def ignored(self) -> tuple[str, ...]:
        """The parameters that were sent and not used, as paths without indices, and tools that are left out, with
        theirs; each once."""
        return self._ignored

    def ignore(self, *names: str) -> None:
        """Adds parameters that were sent and are not used."""
        self._ignored = tuple(dict.fromkeys((*self._ignored, *names)))

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_flood_of_fields(cls, content: Any) -> Any:
        if isinstance(content, dict) and len(content) > _FIELDS_MAX:
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next(name for name in content if name not in known)
            raise InvalidRequest(unknown, f"unknown parameter {unknown!r}")
        return content


class LenientBody(Body):
    """A part of a body whose unknown fields are ignored: clients send back what other servers gave them."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the fields that are not known here and have a value."""
        return tuple(name for name, value in (self.model_extra or {}).items() if value is not None)
