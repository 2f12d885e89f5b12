"""References by place lead to the same schemas after loosening, or are dropped and named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from coordinator.intake.loosening.loosened_schema import RISKY, loosened
from tests.coordinator.test_loosened_schema import LIST, OBJECT, STRING
from tests.hostile import EFFORTS, try_out
from tests.schemas.instances import instance, is_valid


def _pointers(schema: Any, pointer: str = "#") -> Iterator[str]:
    """Pointers to the schemas within a schema, by its lists, maps and keywords."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        here = f"{pointer}/{name}"
        if name in ("anyOf", "allOf", "oneOf", "prefixItems"):
            inner = [(f"{here}/{index}", each) for index, each in enumerate(value)]
        elif name in ("properties", "patternProperties"):
            inner = [(f"{here}/{key}", each) for key, each in value.items()]
        else:
            inner = [(here, value)] if name in ("items", "additionalProperties") else []
        for place, each in inner:
            yield place
            yield from _pointers(each, place)


_PARTS = st.sampled_from([
    {"not": {}}, STRING, {"type": "integer"}, {"type": "null"}, {"minimum": 1}, STRING | {"minLength": 2},
    OBJECT | {"properties": {"a": STRING}}, OBJECT | {"required": ["a"]}, LIST | {"uniqueItems": True},
])  # fmt: skip
_LISTS = st.lists(
    st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]), st.lists(_PARTS, min_size=1, max_size=3)),
    min_size=1, max_size=3, unique_by=lambda pair: pair[0],
).map(dict)  # fmt: skip
_MAPS = st.builds(
    lambda names, values: {"propertyNames": names, "additionalProperties": values},
    st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 1}]),
    _PARTS,
)


@EFFORTS
def test_a_reference_by_place_permits_what_it_permitted(effort: int) -> None:
    num_valid = 0

    def check(before: Any, root: Any, data: st.DataObject) -> None:
        nonlocal num_valid
        base = {**root, "properties": {"before": before}}
        pointer = data.draw(st.sampled_from(sorted(_pointers(base))))
        after = {"$ref": pointer}
        schema = {**root, "properties": {"before": before, "after": after}, "required": ["after"]}
        looser = [loosened(schema).schema, loosened(schema, RISKY).schema]
        for seed in range(12):
            chance = random.Random(seed)
            value = instance(schema, chance)
            if isinstance(value, dict) and seed % 3 == 0:
                value = {**value, "after": instance({**schema, **after}, chance)}
            if is_valid(value, schema):
                num_valid += 1
                assert all(is_valid(value, each) for each in looser), (value, schema, looser)

    roots = st.one_of(st.just({}), _LISTS)
    try_out(check, effort, 150, before=st.one_of(_LISTS, _MAPS), root=roots, data=st.data())
    assert num_valid > 50


_TREE: Any = {"type": "object", "properties": {"path": STRING}, "required": ["path"]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (  # the first alternative permits nothing
            {
                "properties": {
                    "x": {"anyOf": [{"not": {}}, _TREE, {"type": "null"}]},
                    "y": {"$ref": "#/properties/x/anyOf/1"},
                }
            },
            {"y": {"path": "a"}},
        ),
        (  # `oneOf` is written by `allOf`, which is there
            {
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
                "allOf": [{"properties": {"a": STRING}}],
                "properties": {"c": {"$ref": "#/allOf/0"}},
            },
            {"a": "x", "c": {}},
        ),
        (  # the names of a map are written by properties, and nothing else is permitted
            {
                "properties": {
                    "x": OBJECT | {"propertyNames": {"enum": ["a"]}, "additionalProperties": STRING},
                    "y": {"$ref": "#/properties/x/additionalProperties"},
                }
            },
            {"x": {"a": "a"}, "y": "a"},
        ),
    ],
    ids=["anyOf", "oneOf", "propertyNames"],
)  # fmt: skip
def test_references_by_place_lead_to_what_they_led_to(schema: Any, value: Any) -> None:
    assert is_valid(value, schema)
    assert is_valid(value, loosened(schema).schema)


def test_a_reference_that_would_lead_elsewhere_is_named_by_its_place() -> None:
    alternatives = [{"$ref": "#/oneOf/1/properties/a"}, _TREE | {"properties": {"a": STRING}}]
    made = loosened({"oneOf": alternatives, "properties": {"z": {"$ref": "#/oneOf/1"}}})
    assert set(made.dropped) == {"oneOf.0.$ref", "properties.z.$ref"}


def test_an_index_of_any_length_leads_nowhere() -> None:
    assert loosened({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}) == ({"anyOf": [{}]}, ("anyOf.0.$ref",))
