"""Runs of white space end, wherever a grammar leaves them free, and no JSON that people write needs longer ones.

A model that likes line feeds would fill its answer with them otherwise, since each is permitted after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from coordinator.formats.answer_parts import AnswerRules, ToolMode
from outrider.grammar import GrammarState
from outrider.grammar.source import MAX_BLANKS, MAX_INDENTATION, MAX_LINE_FEEDS
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.coordinator.test_formats import FORMATS, Model, Use, model
from tests.schemas.walk import permitted_token_ids

FREE_MAX: Final = 2 * MAX_BLANKS + 2 * MAX_LINE_FEEDS + MAX_INDENTATION
FIXED_MAX: Final = 3  # of a format's own marks, and behind commas and colons
ANY: Final = '{"type": "object"}'
LISTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": ["number", "null"]}}},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["rows", "tree"],
    "$defs": {
        "tree": {"anyOf": [{"type": "boolean"}, {"type": "object", "additionalProperties": {"$ref": "#/$defs/tree"}}]}
    },
}
SPECS: Final = {
    "json_object": GrammarSpec(GrammarKind.JSON_SCHEMA, ANY),
    "json_schema": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(LISTS)),
    "a schema in Lark": GrammarSpec(GrammarKind.LARK, f'start: "<" j ">" j\nj: %json {json.dumps(LISTS)}'),
    "any value in Lark": GrammarSpec(GrammarKind.LARK, "start: %json true"),
    "Lark in Lark": GrammarSpec(GrammarKind.LARK, "start: %lark {\nstart: %json true\n}"),
}
FUNCTIONS: Final[tuple[tuple[str, Any], ...]] = (("weather", LISTS), ("now", None), ("anything", {}))


@functools.cache
def structured(name: str, *, is_free: bool) -> GrammarState:
    return grammars.compiled(model(has_marks=True).compiler, dataclasses.replace(SPECS[name], any_whitespace=is_free))


@functools.cache
def calling(name: str, mode: ToolMode, *, is_free: bool) -> GrammarState:
    structure = dataclasses.replace(SPECS["json_object"], any_whitespace=is_free)
    grammar = FORMATS[name].grammar(AnswerRules(Use(FUNCTIONS, mode, True), structure), added_token_ids())
    assert grammar is not None
    return grammars.compiled(model(has_marks=True).compiler, grammar)


def added_token_ids() -> Any:
    return model(has_marks=True).tokenizer.added_token_ids


@functools.cache
def texts(known: Model) -> list[str]:
    """The text of each token."""
    return [
        known.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(known.tokenizer.vocab_size)
    ]


def is_in_string(text: str) -> bool:
    is_open, place = False, 0
    while place < len(text):
        place += text[place] == "\\" and is_open
        is_open ^= place < len(text) and text[place] == '"'
        place += 1
    return is_open


def is_in_message(text: str) -> bool:
    """Whether gpt-oss's free text to the user or to itself goes on, which may be anything."""
    channel = text.rpartition("<|channel|>")[2]
    return channel.startswith(("analysis", "commentary<|message|>")) and "<|end|>" not in channel


def longest_run(state: GrammarState, seed: int, num_tokens: int) -> int:
    """The longest white space outside of strings that a model which likes it could write on one way."""
    known, chance = model(has_marks=True), random.Random(seed)
    written, liked = "", chance.choice(["\n", " ", "\t", "\r", "\n\r \t"])
    longest = 0
    for _ in range(num_tokens):
        permitted = permitted_token_ids(state)
        if not permitted or permitted == [min(known.tokenizer.eos_token_ids)]:
            break
        blank: list[int] = []
        if not is_in_string(written) and not is_in_message(written):
            run = len(written) - len(written.rstrip(" \t\r\n"))
            for token_id in permitted:
                text = texts(known)[token_id]
                longest = max(longest, run + len(text) - len(text.lstrip(" \t\r\n")))
                if text and not text.strip(liked):
                    blank.append(token_id)
        endings = [
            token_id for token_id in permitted if texts(known)[token_id][:1] in ('"', "}", "]", ",", ":", "{", "[")
        ]
        token_id = chance.choice(blank or (endings if endings and chance.random() < 0.7 else permitted))
        written += texts(known)[token_id]
        state.advance([token_id])
    return longest


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("is_free", "run_max"), [(False, FIXED_MAX), (True, FREE_MAX)])
def test_white_space_of_structured_output_is_bounded(name: str, is_free: bool, run_max: int) -> None:
    longest = max(longest_run(structured(name, is_free=is_free).fork(), seed, 250) for seed in range(6))
    assert longest <= run_max
    assert longest >= (MAX_INDENTATION if is_free else 1)  # it was sought where it may stand


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ToolMode)
@pytest.mark.parametrize(("is_free", "run_max"), [(False, FIXED_MAX), (True, FREE_MAX)])
def test_white_space_of_calls_is_bounded(name: str, mode: ToolMode, is_free: bool, run_max: int) -> None:
    longest = max(longest_run(calling(name, mode, is_free=is_free).fork(), seed, 150) for seed in range(4))
    assert longest <= run_max


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]} if depth % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "write",
    [
        lambda: json.dumps(nested(32), indent=4),
        lambda: json.dumps(nested(64), indent=2),
        lambda: json.dumps(nested(100), indent="\t"),
        lambda: json.dumps({"a": [1, {"b": []}], "c": "x\n\n\n\ny"}, indent=2).replace("\n", "\r\n"),
        lambda: json.dumps({"a": [1, 2]}, separators=(",", ":")),
        lambda: '{ "a" : [ 1 , 2 ],   "b": { }\n}',
        lambda: '{ \n\n  "a": 1, \n\n  "b": 2\n\n}',
    ],
    ids=["four blanks", "two blanks", "tabs", "carriage returns", "compact", "blanks", "empty lines"],
)
def test_json_as_people_indent_it_is_permitted(write: Callable[[], str]) -> None:
    known = model(has_marks=True)
    token_ids = [*known.tokenizer.encode(write(), add_special_tokens=False), min(known.tokenizer.eos_token_ids)]
    state = structured("json_object", is_free=True).fork()
    for token_id in token_ids:
        if state.num_valid([token_id]) == 0:  # forced text has one spelling
            break
        state.advance([token_id])
    assert state.num_committed == len(token_ids), known.tokenizer.decode(token_ids[: state.num_committed])[-80:]


def test_a_model_that_writes_line_feeds_alone_comes_to_an_end() -> None:
    """The likeliest token is always a line feed, where it is permitted, and then what ends the value."""
    known = model(has_marks=True)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), any_whitespace=True)
    state = grammars.compiled(known.compiler, spec)
    written = ""
    while not state.is_complete:
        assert state.num_committed < 200
        ranked = sorted(permitted_token_ids(state), key=lambda token_id: not texts(known)[token_id].startswith("\n"))
        state.advance(ranked[:1])
        written += texts(known)[ranked[0]]
    assert json.loads(written).keys() == {"a", "b"}
