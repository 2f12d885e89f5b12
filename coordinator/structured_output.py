"""What a client may ask the output to look like, as a grammar. Pure.

Two ways of asking: OpenAI's `response_format` and vLLM's `structured_outputs`. JSON is written with ", " and ": "
between its parts and no other space, unless `disable_any_whitespace` is false: models that are free to put space
anywhere may put it everywhere.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from coordinator.body_parts import Body, Listed
from coordinator.json_size import check_json_size
from outrider.errors import InvalidRequest
from outrider.sampling_params import GrammarKind, GrammarSpec

_ANY_OBJECT = '{"type": "object"}'
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchemaFormat(Body):
    """`strict` changes nothing: the output always follows the schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def to_grammar(self) -> GrammarSpec | None:
        """None for any text. Raises InvalidRequest when a schema is missing or superfluous."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format.json_schema",
                "response_format needs json_schema for its type json_schema only",
            )
        if self.json_schema is not None:
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _dumped(self.json_schema.schema_))
        return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """Exactly one of the first five."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")  # a JSON schema
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None  # Lark, as llguidance understands it
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = True

    def to_grammar(self) -> GrammarSpec:
        """Raises InvalidRequest when not exactly one kind is given, or one makes no sense by itself."""
        values = self.model_dump(by_alias=True)
        given = [kind for kind in _KINDS if values[kind] is not None]
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs",
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got {', '.join(given) or 'none'}",
            )
        any_whitespace = not self.disable_any_whitespace
        if self.regex is not None:
            return GrammarSpec(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return GrammarSpec(GrammarKind.LARK, _alternation(self.choice))
        if self.grammar is not None:
            return GrammarSpec(GrammarKind.LARK, self.grammar)
        if self.json_object:
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, any_whitespace)
        return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema_text(self.json_), any_whitespace)


def _schema_text(schema: dict[str, Any] | str | None) -> str:
    if not isinstance(schema, str):
        return _dumped(schema)
    check_json_size(schema.encode(), "structured_outputs.json", "structured_outputs.json")
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            "structured_outputs.json", f"structured_outputs.json is not JSON: {error}"
        ) from error
    return schema


def _alternation(choices: list[str]) -> str:
    if not choices or not all(choices):
        raise InvalidRequest(
            "structured_outputs.choice", "structured_outputs.choice needs texts, none of them empty"
        )
    return "start: " + " | ".join(_dumped(choice) for choice in choices)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
