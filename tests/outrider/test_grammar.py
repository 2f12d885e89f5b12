"""Tests of grammars: the tokens permitted after any output, and that queries about guesses change no answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from tokenizers import decoders, models, pre_tokenizers

from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarState, GrammarViolation
from outrider.grammar.effort import Effort
from outrider.grammar.position import Position
from outrider.grammar.source import MAX_INTERSECTED_PATTERNS
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.schemas.catalog import DIGIT, SCHEMAS, WORD, array, record
from tests.schemas.validity import check
from tests.schemas.walk import permitted_token_ids, walk_to_the_end

TOKENIZER_JSON = Path(__file__).parents[2] / "demo" / "target" / "tokenizer.json"
VOCAB_SIZE = 4096
EOS = 1
TOKENIZER = tokenizers.Tokenizer.from_file(str(TOKENIZER_JSON))
COMPILER = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))

PERSON = record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}, tags=array(WORD, 0, 2))
GRAMMARS = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON), any_whitespace=True),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": "forced from <|eos|> end to end"})),
    GrammarSpec(GrammarKind.REGEX, "(yes|no|maybe)( indeed){0,3}"),
    GrammarSpec(GrammarKind.LARK, 'start: expr\nexpr: NUM | "(" expr ("+" | "-") expr ")"\nNUM: /[0-9]{1,3}/'),
]
HOSTILE = [-1, -(2**70), VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**32 + 5, 2**70, 0, 2]

starts = [grammars.compiled(COMPILER, spec) for spec in GRAMMARS]
token_ids = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.just(EOS), st.sampled_from(HOSTILE))


def schema(value: Any, **options: bool) -> GrammarState:
    return grammars.compiled(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value), **options))


def regex(text: str) -> GrammarState:
    return grammars.compiled(COMPILER, GrammarSpec(GrammarKind.REGEX, text))


def lark(text: str) -> GrammarState:
    return grammars.compiled(COMPILER, GrammarSpec(GrammarKind.LARK, text))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


@st.composite
def places(draw: st.DrawFn) -> tuple[GrammarState, list[int]]:
    """A grammar some permitted tokens on, and a guess that mostly follows it and may leave it anywhere."""
    state = draw(st.sampled_from(starts)).fork()
    for _ in range(draw(st.integers(0, 12))):
        if not (permitted := permitted_token_ids(state)) or permitted == [EOS]:
            break
        state.advance([draw(st.sampled_from(permitted))])
    guess: list[int] = []
    walker = state.fork()
    for _ in range(draw(st.integers(0, 6))):
        permitted = permitted_token_ids(walker)
        if draw(st.integers(0, 9)) == 0 or not permitted:
            guess.append(draw(token_ids))
            break
        guess.append(draw(st.sampled_from(permitted)))
        walker.advance(guess[-1:])
    return state, guess + draw(st.lists(token_ids, max_size=2))


@settings(max_examples=150, deadline=None)
@given(places())
def test_num_valid_counts_what_the_masks_permit(place: tuple[GrammarState, list[int]]) -> None:
    state, guess = place
    masks = state.masks([guess[:length] for length in range(len(guess))])
    num_permitted = 0
    for token_id, mask in zip(guess, masks, strict=True):
        if not (0 <= token_id < VOCAB_SIZE and mask[token_id]):
            break
        num_permitted += 1
    assert state.num_valid(guess) == num_permitted
    assert not masks[num_permitted + 1 :].any()


@settings(max_examples=150, deadline=None)
@given(places())
def test_a_mask_after_a_guess_is_the_mask_after_committing_it(place: tuple[GrammarState, list[int]]) -> None:
    state, guess = place
    guess = guess[: state.num_valid(guess)]
    guessed = state.masks([guess])
    state.advance(guess)
    np.testing.assert_array_equal(guessed, state.masks([[]]))


@settings(max_examples=100, deadline=None)
@given(places(), st.lists(st.lists(token_ids, max_size=3), max_size=4))
def test_masks_of_a_tree_are_those_of_its_paths_in_any_order(
    place: tuple[GrammarState, list[int]], suffixes: list[list[int]]
) -> None:
    state, guess = place
    paths = [guess[: len(guess) // 2] + suffix for suffix in suffixes] + [guess, guess[:1], guess]
    together = state.masks(paths)
    assert together.shape == (len(paths), VOCAB_SIZE)
    for path, mask in zip(paths, together, strict=True):
        np.testing.assert_array_equal(mask, state.masks([path])[0])


@settings(max_examples=100, deadline=None)
@given(places(), st.lists(token_ids, max_size=8), st.integers(0, 8))
def test_queries_leave_the_state_unchanged(
    place: tuple[GrammarState, list[int]], nonsense: list[int], limit: int
) -> None:
    state, guess = place
    untouched = state.fork()
    for hint in (guess, nonsense, HOSTILE, [EOS, EOS], [*guess, EOS, 5]):
        assert 0 <= state.num_valid(hint) <= len(hint)
        state.masks([hint[:length] for length in range(len(hint) + 1)])
        assert len(state.forced_after(hint, limit)) <= limit
    assert state.is_complete == untouched.is_complete
    assert state.num_valid(guess) == untouched.num_valid(guess)
    assert state.forced_after([], 8) == untouched.forced_after([], 8)
    np.testing.assert_array_equal(state.masks([[], guess]), untouched.masks([[], guess]))


@settings(max_examples=100, deadline=None)
@given(places(), st.integers(0, 12))
def test_forced_tokens_are_the_only_ones_permitted(place: tuple[GrammarState, list[int]], limit: int) -> None:
    state, guess = place
    forced = state.forced_after(guess, limit)
    if state.num_valid(guess) < len(guess):
        assert forced == []
    masks = state.masks([[*guess, *forced[:length]] for length in range(len(forced))])
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[token_id] for token_id in forced]


@settings(max_examples=50, deadline=None)
@given(places())
def test_a_fork_goes_its_own_way(place: tuple[GrammarState, list[int]]) -> None:
    state, guess = place
    before = state.masks([[], guess])
    fork = state.fork()
    fork.advance(guess[: fork.num_valid(guess)])
    np.testing.assert_array_equal(before, state.masks([[], guess]))


@settings(max_examples=50, deadline=None)
@given(places(), token_ids)
def test_a_token_that_is_not_permitted_is_refused_and_changes_nothing(
    place: tuple[GrammarState, list[int]], token_id: int
) -> None:
    state, guess = place
    valid = guess[: state.num_valid(guess)]
    before = state.masks([[], guess])
    if state.num_valid([*valid, token_id]) == len(valid):
        with pytest.raises(GrammarViolation, match="does not permit"):
            state.advance([*valid, token_id])
        np.testing.assert_array_equal(before, state.masks([[], guess]))


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_permitted_walk_ends_in_text_that_the_schema_accepts(name: str) -> None:
    start = schema(SCHEMAS[name])
    for seed in range(4):
        text = decode(walk_to_the_end(start.fork(), seed, EOS, num_tokens_max=600))
        check(text, SCHEMAS[name])


def test_the_catalog_holds_fifty_schemas() -> None:
    assert len(SCHEMAS) == 50


def test_json_is_compact_unless_any_whitespace_is_asked_for() -> None:
    pair = record(a=DIGIT, b=array(DIGIT, 2, 2))
    compact = '{"a": 1, "b": [2, 3]}'
    spacious = '{ "a":1,\n"b" : [2,3]}'
    for text, options, is_permitted in (
        (compact, {}, True),
        (spacious, {}, False),
        (compact.replace(": ", ":"), {}, False),
        (compact, {"any_whitespace": True}, True),
        (spacious, {"any_whitespace": True}, True),
    ):
        assert _follows(schema(pair, **options), text) is is_permitted, (text, options)


def _follows(state: GrammarState, text: str) -> bool:
    """Whether some way to spell the text is permitted: at each place the longest permitted token that fits."""
    while text:
        fitting = [
            token_id for token_id in permitted_token_ids(state)
            if token_id != EOS and text.startswith(decode([token_id]))
        ]  # fmt: skip
        if not fitting:
            return False
        longest = max(fitting, key=lambda token_id: len(decode([token_id])))
        state.advance([longest])
        text = text[len(decode([longest])) :]
    return state.num_valid([EOS]) == 1


def test_a_complete_text_can_only_end() -> None:
    assert not regex("ok").is_complete
    state = regex("ok")
    state.advance(state.forced_after([], 1))
    assert state.is_complete
    assert permitted_token_ids(state) == [EOS]
    assert state.forced_after([], 4) == [EOS]
    state.advance([EOS])
    assert state.is_complete
    assert permitted_token_ids(state) == []
    assert state.num_valid([EOS]) == 0
    assert state.forced_after([], 4) == []


def test_a_text_that_may_go_on_is_not_complete() -> None:
    state = regex("[0-9]{1,3}")
    state.advance(encode("7"))
    assert not state.is_complete
    assert state.num_valid([EOS, EOS]) == 1
    assert state.masks([[], [EOS]]).sum(axis=1).tolist()[1] == 0


def test_the_empty_text_is_complete_at_once() -> None:
    state = regex("")
    assert state.is_complete
    assert permitted_token_ids(state) == [EOS]


def test_every_end_of_sequence_id_is_permitted_and_the_lowest_is_forced() -> None:
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([2, 1, 999_999]))
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "a?"))
    assert set(permitted_token_ids(state)) == {1, 2, *encode("a")}
    state.advance(encode("a"))
    assert permitted_token_ids(state) == [1, 2]
    assert state.forced_after([], 3) == [1]


def test_a_model_without_end_of_sequence_is_told_by_completeness_alone() -> None:
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "a"))
    state.advance(encode("a"))
    assert state.is_complete
    assert permitted_token_ids(state) == []
    assert state.forced_after([], 3) == []


def test_an_output_layer_may_be_wider_or_narrower_than_the_tokenizer() -> None:
    wide = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE + 64, eos_token_ids=frozenset([EOS]))
    mask = grammars.compiled(wide, GrammarSpec(GrammarKind.REGEX, "(?s:.*)")).masks([[]])[0]
    assert mask.shape == (VOCAB_SIZE + 64,)
    assert not mask[VOCAB_SIZE:].any()
    narrow = GrammarCompiler(TOKENIZER_JSON, vocab_size=300, eos_token_ids=frozenset([EOS]))
    mask_of_few = grammars.compiled(narrow, GrammarSpec(GrammarKind.REGEX, "(?s:.*)")).masks([[]])[0]
    np.testing.assert_array_equal(mask_of_few, mask[:300])


def test_the_text_of_a_control_token_is_spelled_out() -> None:
    state = schema({"const": "<|eos|>"})
    forced = state.forced_after([], 50)
    assert forced[-1] == EOS
    assert EOS not in forced[:-1]
    assert decode(forced) == '"<|eos|>"'


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "not a JSON object"),
        (GrammarKind.JSON_SCHEMA, "true", "not a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"a":' * 1000 + "1" + "}" * 1000, "nested too deeply"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "null"}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "idn-email"}', "idn-email"),
        (GrammarKind.JSON_SCHEMA, '{"oneOf": [{"type": "string"}, {"maxLength": 3}]}', "oneOf"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
            "NoExtension",
        ),
        (GrammarKind.JSON_SCHEMA, '{"enum": []}', "empty"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 9999991}', "multipleOf"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object", "patternProperties": 5}', "patternProperties"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": true}', "multipleOf"),
        (GrammarKind.JSON_SCHEMA, '{"anyOf": [{"multipleOf": 1e-300}, {"multipleOf": 1e300}]}', "multipleOf"),
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "(" * 100_000 + ")" * 100_000, "invalid regex"),
        (GrammarKind.LARK, "", "no start rule"),
        (GrammarKind.LARK, '{"grammars": []}', "expecting rule"),
        (GrammarKind.LARK, "start: " + "(" * 1000 + '"a"' + ")" * 1000, "nested"),
        (GrammarKind.LARK, 'start: "a" <|eos|>', "special token"),
        (GrammarKind.LARK, 'start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
        (GrammarKind.LARK, "start: A\nA: " + " & ".join(f"/a.*{i}.*c/" for i in range(30)), "&"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(
    kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        grammars.check(COMPILER, GrammarSpec(kind, text))
    assert refusal.value.parameter == "grammar"
    assert "<non-verbose" not in refusal.value.message


def test_properties_may_be_called_like_keywords() -> None:
    names = ("patternProperties", "multipleOf", "pattern", "allOf")
    state = schema({"type": "object", "properties": dict.fromkeys(names, True), "required": [*names]})
    assert state.num_valid(encode('{"patternProperties": 1, "multipleOf": 2, "pattern": 3, "allOf": 4}')) > 4


def test_patterns_that_a_string_must_match_all_at_once_are_bounded() -> None:
    def patterns(count: int) -> list[dict[str, str]]:
        return [{"type": "string", "pattern": f"^[a-z]*{letter}[a-z]*$"} for letter in "abcdefghijklmnopqrstu"[:count]]

    with pytest.raises(InvalidRequest, match="patterns and formats"):
        schema({"allOf": patterns(MAX_INTERSECTED_PATTERNS + 1)})
    schema(array({"anyOf": patterns(MAX_INTERSECTED_PATTERNS + 1)}, 0, 2))  # one of them at a time is cheap


def test_a_long_chain_of_references_does_not_overflow_the_stack() -> None:
    chain: dict[str, Any] = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(5000)}
    assert permitted_token_ids(schema({"$ref": "#/$defs/0", "$defs": chain | {"5000": {"type": "null"}}}))
    rules = "\n".join(f'r{index}: "a" r{index + 1}' for index in range(8000))
    assert permitted_token_ids(lark(f'start: r0\n{rules}\nr8000: "b"')) == lark('start: "aaaa"').forced_after([], 1)


def test_a_grammar_without_a_way_on_ends_the_sequence_cleanly() -> None:
    state = lark('start: "a" <[1]> "b"')  # an end of sequence in the middle can never be
    state.advance(encode("a"))
    for _ in range(2):
        with pytest.raises(GrammarViolation, match="no token"):
            state.masks([[]])


def test_a_guess_that_runs_into_a_limit_does_not_end_the_sequence() -> None:
    vocabulary = COMPILER._vocabulary()
    grammar = LLMatcher.grammar_from_lark('start: "x" "y"* | "a" many\nmany: one*\none: "b" | "b" "b" | one "c"')

    def start() -> Position:
        limits = LLParserLimits(verbose_errors=False, step_max_items=30)
        return Position(vocabulary, LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits))

    state = GrammarState(start(), start, Effort())
    guess = encode("a") + encode("b") * 20
    with pytest.raises(GrammarViolation, match="Too many items"):
        state.masks([guess[:length] for length in range(len(guess))])
    state.advance(encode("x"))
    assert set(permitted_token_ids(state)) >= {EOS, *encode("y")}


def test_one_compiler_serves_many_threads() -> None:
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))

    def walk(seed: int) -> str:
        state = grammars.compiled(compiler, GRAMMARS[0])
        return decode(walk_to_the_end(state, seed, EOS, num_tokens_max=600))

    with ThreadPoolExecutor(4) as executor:
        for text in executor.map(walk, range(12)):
            jsonschema.validate(json.loads(text), PERSON)


def _write_tokenizer(folder: Path, vocab: dict[str, int], control: list[tuple[int, str]]) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [
        {"id": token_id, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for token_id, text in control
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return folder / "tokenizer.json"


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    path = _write_tokenizer(tmp_path, alphabet | {"<end>": 300}, [(300, "<end>")])
    compiler = GrammarCompiler(path, vocab_size=320, eos_token_ids=frozenset([300]))
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "<end>"))
    forced = state.forced_after([], 20)
    assert forced == [*(alphabet[letter] for letter in "<end>"), 300]
    assert state.num_valid(forced) == len(forced)
    anything = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "(?s:.*)")).masks([[]])[0]
    assert not anything[256:300].any()
    assert not anything[301:].any()


def test_a_tokenizer_without_known_bytes_refuses_grammars_by_name(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=2, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequest, match="cannot follow grammars") as refusal:
        grammars.check(compiler, GRAMMARS[0])
    assert refusal.value.parameter == "grammar"


def test_json_within_a_lark_grammar_is_as_compact_as_json_alone() -> None:
    grammar = 'start: "<call>" arguments\narguments: %json {"type": "object", "properties": {"a": {"type": "null"}}, '
    grammar += '"required": ["a"], "additionalProperties": false}'
    whole = TOKENIZER.encode('<call>{"a": null}', add_special_tokens=False).ids
    spaced = TOKENIZER.encode('<call>{ "a": null}', add_special_tokens=False).ids
    assert lark(grammar).num_valid(whole) == len(whole)
    assert lark(grammar).num_valid(spaced) < len(spaced)
    free = grammars.compiled(COMPILER, GrammarSpec(GrammarKind.LARK, grammar, any_whitespace=True))
    assert free.num_valid(spaced) == len(spaced)
