"""JSON schemas whose objects have the declared properties only. Pure.

JSON Schema permits any further property where a schema does not say `additionalProperties`. A model that is free to add
some may never end. As the default grammars of vLLM do, objects that declare properties get no others unless their
schema permits these; every output still follows the schema as it was sent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from outrider.sampling_params import GrammarKind, GrammarSpec

_OPEN: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties")
# Keywords that evaluate the same object by several schemas: a closed one would refuse the properties of the others.
_COMBINED: Final = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
_SCHEMAS: Final = ("items", "additionalProperties", "contains", "additionalItems", "unevaluatedItems")
_SCHEMA_LISTS: Final = ("anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


def closed(schema: Any) -> Any:
    """Returns a copy of a JSON schema in which objects have the declared properties only, where it does not say more.

    Schemas that describe a part of an object stay as they are: below `allOf`, in alternatives beside `properties`, and
    below `$defs` if anything of the whole may use them so.
    """
    return _closed(schema, closes_definitions=not _combines(schema))


def closed_grammar(grammar: GrammarSpec) -> GrammarSpec:
    """Returns the grammar with a closed schema if it is a JSON schema that can be read; else the grammar itself."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return grammar
    try:
        text = json.dumps(closed(json.loads(grammar.text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return grammar  # refused when it is compiled
    return dataclasses.replace(grammar, text=text)


def _closed(schema: Any, *, closes_definitions: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in _SCHEMAS:
        if isinstance(made.get(name), Mapping):
            made[name] = _closed(made[name], closes_definitions=closes_definitions)
    for name in _SCHEMA_LISTS:
        describes_parts = "properties" in made and name != "prefixItems"
        if isinstance(made.get(name), list) and not describes_parts:
            made[name] = [_closed(each, closes_definitions=closes_definitions) for each in made[name]]
    for name in _SCHEMA_MAPS:
        is_kept = name in ("$defs", "definitions") and not closes_definitions
        if isinstance(made.get(name), Mapping) and not is_kept:
            made[name] = {key: _closed(each, closes_definitions=closes_definitions) for key, each in made[name].items()}
    says_more = any(name in made for name in (*_OPEN, *_COMBINED))
    if isinstance(made.get("properties"), Mapping) and not says_more:
        made["additionalProperties"] = False
    return made


def _combines(schema: Any) -> bool:
    """Whether some object is described by several schemas together."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            if "allOf" in value or ("properties" in value and not value.keys().isdisjoint(_COMBINED)):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False
