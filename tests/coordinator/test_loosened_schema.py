"""Schemas are loosened to what a grammar holds: nothing that they permit is lost, and what is dropped is named."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from coordinator.intake.closed_schema import closed
from coordinator.intake.loosening.disjoint_schemas import DisjointSchemas
from coordinator.intake.loosening.loosened_pattern import loosened_pattern
from coordinator.intake.loosening.loosened_schema import FORMATS, NOT_HELD, RISKY, loosened, outline
from coordinator.intake.loosening.schema_references import References
from outrider.errors import InvalidRequest
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.docs.pages import DOCS
from tests.hostile import EFFORTS, try_out
from tests.outrider.test_grammar import COMPILER, EOS, decode
from tests.schemas.instances import instance, is_valid
from tests.schemas.tools import TOOLS
from tests.schemas.walk import walk_briefly

NO_SCHEMAS = {"crawl", "relate", "impossible"}  # of which no validator can tell what they permit
STRING: dict[str, Any] = {"type": "string"}
LIST: dict[str, Any] = {"type": "array"}
OBJECT: dict[str, Any] = {"type": "object"}
OPTIONAL: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}}}
EXAMPLES: dict[str, Any] = {
    "$dynamicRef": {"$dynamicRef": "#a"}, "$recursiveRef": {"$recursiveRef": "#"},
    "contains": LIST | {"contains": STRING}, "minContains": LIST | {"minContains": 2},
    "maxContains": LIST | {"maxContains": 2}, "dependencies": OBJECT | {"dependencies": {"a": ["b"]}},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"a": {}}},
    "if": {"if": STRING}, "then": {"then": STRING}, "else": {"else": STRING}, "not": {"not": STRING},
    "propertyNames": OBJECT | {"propertyNames": {"maxLength": 3}},
    "unevaluatedItems": LIST | {"unevaluatedItems": False},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "uniqueItems": LIST | {"uniqueItems": True}, "$ref": {"$ref": "#/$defs/a"},
    "$schema": {"$schema": "https://example.com/own"} | STRING, "format": STRING | {"format": "regex"},
    "maxProperties": OPTIONAL | {"maxProperties": 2}, "minProperties": OPTIONAL | {"minProperties": 1},
    "multipleOf": {"type": "integer", "multipleOf": 20_001},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "pattern": STRING | {"pattern": "^(?!a)"},
    "patternProperties": OBJECT | {"patternProperties": {"a": {}, "b": {}}}, "type": {"type": "any"},
}  # fmt: skip
HELD = (
    *("$anchor", "$comment", "$defs", "$id", "$vocabulary", "additionalProperties", "allOf", "anyOf", "const"),
    *("contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description", "enum"),
    *("examples", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maxLength", "maximum", "minItems"),
    *("minLength", "minimum", "prefixItems", "properties", "readOnly", "required", "title", "writeOnly"),
)


def refusal(schema: Any) -> str:
    """Returns the reason for which the compiler of grammars refuses a schema; empty if it does not."""
    try:
        grammars.check(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except InvalidRequest as error:
        return error.message
    return ""


def held(schema: Any) -> Any:
    """The schema as a tool's is held: as little looser as it takes."""
    for candidate in (schema, loosened(schema).schema, loosened(schema, RISKY).schema, outline(schema)):
        if isinstance(candidate, dict) and not refusal(candidate):
            return candidate
    raise AssertionError("nothing is held")


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_the_list_names_is_refused_and_can_be_loosened(name: str) -> None:
    assert refusal(EXAMPLES[name])
    made = loosened(EXAMPLES[name])
    if refusal(made.schema):  # a bound that the keyword's value does not show
        assert name in RISKY
        made = loosened(EXAMPLES[name], RISKY)
    assert not refusal(made.schema)
    assert made.dropped == (name,)


def test_the_page_lists_what_is_not_held() -> None:
    page = (DOCS / "guides" / "tool-calls.md").read_text(encoding="utf-8")
    section = page.split("\n## Schemas\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)
    told = {name: where for names, where in rows for name in re.findall(r"`([^`]+)`", names)}
    assert told == dict(NOT_HELD)
    (formats,) = re.findall(r"formats: (.*)\.", section)
    assert set(re.findall(r"`([^`]+)`", formats)) == FORMATS


def test_every_keyword_of_json_schema_is_held_or_in_the_list() -> None:
    vocabulary = {"$dynamicAnchor", *HELD, *NOT_HELD} - {"$recursiveRef", "dependencies"}
    metaschemas = [
        schema for name, schema in _metaschemas().items() if name.startswith("https://json-schema.org/draft/2020-12/meta")
    ]  # fmt: skip
    assert len(metaschemas) >= 7
    assert {name for schema in metaschemas for name in schema["properties"]} == vocabulary


def _metaschemas() -> dict[str, Any]:
    return {uri: REGISTRY.contents(uri) for uri in REGISTRY}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_of_the_list_is_held(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert not refusal(schema)
    assert loosened(schema) == (schema, ())


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_held_and_keeps_what_could_be_held(name: str) -> None:
    schema = closed(TOOLS[name])
    before = json.dumps(schema)
    made = loosened(schema)
    assert json.dumps(schema) == before
    assert not refusal(held(schema))
    if not refusal(schema):
        assert made.dropped == ()
    if name not in ("by_extension", "steps", "impossible"):  # beyond a bound, or nothing is valid
        assert not refusal(made.schema)
    for place in made.dropped:
        node: Any = schema
        for part in place.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]


def test_most_of_the_tools_were_refused() -> None:
    refused = [name for name in TOOLS if refusal(closed(TOOLS[name]))]
    assert len(TOOLS) >= 50
    assert len(refused) >= 30


@pytest.mark.parametrize("name", [name for name in TOOLS if name not in NO_SCHEMAS])
def test_everything_that_a_tool_permits_is_permitted_still(name: str) -> None:
    schema = TOOLS[name]
    looser = [loosened(schema).schema, loosened(schema, RISKY).schema]
    num_valid = 0
    for seed in range(150):
        value = instance(schema, random.Random(seed))
        if not is_valid(value, schema):
            continue
        num_valid += 1
        for each in [*looser, *([outline(schema)] if isinstance(value, dict) else [])]:
            assert is_valid(value, each), (value, each)
    assert num_valid >= 10


@pytest.mark.parametrize("name", TOOLS)
def test_what_the_grammar_of_a_tool_permits_is_valid(name: str) -> None:
    schema = held(closed(TOOLS[name]))
    start = grammars.compiled(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for seed in range(3):
        text = decode(walk_briefly(start.fork(), seed, EOS, decode, num_tokens_max=1500))
        assert is_valid(json.loads(text), schema), text


_NAMES = st.sampled_from(["a", "b", "x_a"])
_LEAVES = st.sampled_from(
    [
        {}, True, STRING, {"type": "integer"}, {"type": ["string", "null"]}, {"const": "a"}, {"enum": ["a", 1, None]},
        STRING | {"pattern": "^(?!b)[a-z]+$"}, STRING | {"pattern": r"\ba"}, STRING | {"format": "regex"},
        STRING | {"minLength": 2.0}, {"type": "number", "multipleOf": 0.5, "minimum": 0}, {"not": {}},
        {"not": STRING}, LIST | {"uniqueItems": True}, {"$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}, {"minimum": 1},
    ]
)  # fmt: skip


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps = st.dictionaries(_NAMES, inner, max_size=3)
    keywords = {
        "properties": maps, "required": st.lists(_NAMES, max_size=2, unique=True), "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^x", "^(?!a)", "b"]), inner, max_size=2),
        "propertyNames": st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a", "b"]}, {"maxLength": 1}, STRING]),
        "items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2), "contains": inner,
        "anyOf": st.lists(inner, min_size=1, max_size=3), "oneOf": st.lists(inner, min_size=1, max_size=3),
        "allOf": st.lists(inner, min_size=1, max_size=2), "not": inner, "if": inner, "then": inner, "else": inner,
        "dependentRequired": st.just({"a": ["b"]}), "unevaluatedProperties": inner, "unevaluatedItems": inner,
        "minProperties": st.integers(0, 2), "maxProperties": st.integers(1, 2), "maxItems": st.integers(0, 2),
        "type": st.sampled_from(["object", "array", ["object", "string"]]), "uniqueItems": st.booleans(),
    }  # fmt: skip
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.builds(
    lambda schema, definition: schema | {"$defs": {"a": definition}},
    _more(st.recursive(_LEAVES, _more, max_leaves=6)),
    _LEAVES.filter(lambda schema: schema != {"$ref": "#/$defs/a"}),
)


@EFFORTS
def test_any_schema_permits_after_loosening_what_it_permitted(effort: int) -> None:
    num_valid = 0

    def check(schema: dict[str, Any], seed: int) -> None:
        nonlocal num_valid
        looser = [loosened(schema).schema, loosened(schema, RISKY).schema]
        for each in range(10):
            value = instance(schema, random.Random(seed + each))
            try:
                is_followed = is_valid(value, schema)
            except Exception:  # a reference to nowhere
                return
            if is_followed:
                num_valid += 1
                assert all(is_valid(value, each) for each in looser), (value, looser)

    try_out(check, effort, 40, schema=SCHEMAS, seed=st.integers(0, 1000))
    assert num_valid > 50


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[a-z]+$", "^[a-z]+$"), (r"^(?=.*\d)(?=.*[a-z])[a-z\d]{6,}$", r"^[a-z\d]{6,}$"), ("(?<!a)b(?<=b)", "b"),
        (r"\bfoo\b", "foo"), ("(?=[)])d", "d"), (r"(?=\))d", "d"), ("(?=(a(b)))c", "c"), ("[(?=]a", "[(?=]a"),
        (r"(?<n>a)\w", r"(?<n>a)\w"), (r"(a)\1", None), ("(?P<y>a)(?P=y)", None), ("(?>a)", None), ("(?=a", None),
        ("(?=a)*b", None), (r"\cA", None), (r"[\b]", None), ("[[:alpha:]]", None),
    ],
)  # fmt: skip
def test_a_pattern_loses_its_assertions_or_is_not_held(pattern: str, expected: str | None) -> None:
    assert loosened_pattern(pattern) == expected


_SHAPES: Any = {"$defs": {"a": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}}}
_B: Any = {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schemas", "expected"),
    [
        ([STRING, {"type": ["integer", "null"]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"enum": [2, "a"]}], True),
        ([{"enum": [1, 2]}, {"enum": [2]}], False),
        ([{"$ref": "#/$defs/a"}, _B], True),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
        ([_B, _B | {"required": []}], False),
        ([OPTIONAL | {"required": ["a"]}, OBJECT | {"additionalProperties": False}], True),
        ([OPTIONAL | {"required": ["a"]}, OPTIONAL | {"required": ["b"]}], False),
        ([{}, STRING], False),
        ([{"type": 5}, {"type": [6]}], False),
        ([{"const": index} for index in range(65)], False),
    ],
)
def test_schemas_exclude_each_other_where_that_is_certain(schemas: list[Any], expected: bool) -> None:
    assert DisjointSchemas(References(_SHAPES)).exclude_each_other(schemas) is expected


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#nowhere"}] * 8000},
        {"$defs": {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(5000)}},
        {"oneOf": [{"const": index} for index in range(9000)]},
        *({"pattern": unit * (200_000 // len(unit))} for unit in ("[", "(?=a", "(?=a)", "(?", "(?a", "\\", "{", "[\\")),
    ],
    ids=lambda schema: next(iter(schema)) + str(next(iter(schema.values())))[:8],
)  # fmt: skip
def test_the_effort_grows_with_the_length_of_a_schema(schema: Any) -> None:
    began = time.process_time()
    loosened(schema)
    assert time.process_time() - began < 4.0  # what is not meant takes minutes
