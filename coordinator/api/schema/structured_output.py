"""Output formats that a client may request, converted to grammars. Pure.

The parameters are OpenAI's `response_format` and vLLM's `structured_outputs`. JSON is generated with ", " and ": " and
no other white space unless `disable_any_whitespace` is false. Then each run of it is bounded, because some models would
generate white space without end.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.api.schema.body_parts import Body, Listed, described
from coordinator.api.schema.gbnf import as_lark
from coordinator.api.schema.unserved_parameters import NEUTRAL_STRUCTURED_OUTPUTS
from coordinator.intake.json_size import check_json_size, check_schema_sizes
from outrider.errors import InvalidRequest
from outrider.sampling_params import GrammarKind, GrammarSpec

_ANY_OBJECT = '{"type": "object"}'
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchemaFormat(Body):
    """A named JSON schema. The output always follows it, whatever `strict` is."""

    name: str = Field(description="accepted and not used")
    description: str | None = Field(default=None, description="accepted and not used")
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")
    strict: bool | None = Field(default=None, description="accepted and not used")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = Field(description="form of the output")
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="required for the type `json_schema`, and only there"
    )

    def to_grammar(self) -> GrammarSpec | None:
        """Returns the grammar; None: unconstrained. Raises InvalidRequest for a missing or superfluous schema."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format.json_schema",
                "response_format needs json_schema for its type json_schema only",
            )
        if self.json_schema is not None:
            check_schema_sizes("response_format", self.json_schema.schema_)
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _dumped(self.json_schema.schema_))
        return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(Body):
    """A constraint of the output: exactly one of the first five fields is set."""

    neutral = NEUTRAL_STRUCTURED_OUTPUTS

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, description="a regular expression in Rust's syntax")
    choice: Annotated[Listed[Annotated[str, described(minLength=1)]], described(minItems=1)] | None = Field(
        default=None, description="the output is one of these strings"
    )
    grammar: str | None = Field(default=None, description="a grammar in Lark, in llguidance's variant, or in GBNF")
    json_object: Literal[True] | None = Field(default=None, description="the output is any JSON object")
    disable_any_whitespace: bool = Field(
        default=True,
        description="false: JSON may contain other white space than behind commas and colons, in bounded runs",
    )

    def to_grammar(self) -> GrammarSpec:
        """Returns the grammar. Raises InvalidRequest unless exactly one kind is set and valid."""
        given = [kind for kind in _KINDS if getattr(self, "json_" if kind == "json" else kind) is not None]
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
            check_schema_sizes("structured_outputs", self.grammar)
            return GrammarSpec(GrammarKind.LARK, as_lark(self.grammar))
        if self.json_object:
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, any_whitespace)
        return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema_text(self.json_), any_whitespace)


def _schema_text(schema: dict[str, Any] | str | None) -> str:
    check_schema_sizes("structured_outputs", schema)
    if not isinstance(schema, str):
        return _dumped(schema)
    check_json_size(schema.encode(), "structured_outputs.json", "structured_outputs.json")
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("structured_outputs.json", f"structured_outputs.json is not JSON: {error}") from error
    return schema


def _alternation(choices: list[str]) -> str:
    if not choices or not all(choices):
        raise InvalidRequest(
            "structured_outputs.choice",
            "structured_outputs.choice needs at least one string, none of them empty",
        )
    return "start: " + " | ".join(_dumped(choice) for choice in choices)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
