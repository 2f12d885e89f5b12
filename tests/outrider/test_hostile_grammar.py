"""A grammar may be any text: it compiles or is refused as a bad one, soon."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarViolation
from outrider.grammar import compiler as compiler_module
from outrider.grammar.source import MAX_INTERSECTED_PATTERNS, to_llguidance
from outrider.sampling_params import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from tests import grammars
from tests.hostile import EFFORTS, try_out
from tests.outrider.test_grammar import COMPILER, EOS, PERSON, TOKENIZER, TOKENIZER_JSON, VOCAB_SIZE
from tests.schemas.walk import walk_to_the_end

SOON_S = 8.0  # of processor time; what is not meant takes minutes
FRAGMENTS = [
    *("start: ", "\nA: ", "a", "A", " | ", " & ", "~", "(", ")", "[", "]", "{", "}", "{1,9}", "*", "+", "?", "\n"),
    *('"', '"a"', '"&"i', "/", "/a&/", '/"/', "/(?s:.*)b/", "\\", '\\"', "//", "# ", "<", ">", '<">', "<[1]>"),
    *("%json ", "%regex ", "%lark ", "%ignore ", "%import ", "%llguidance ", '{"type":', '"object"', '"multipleOf":'),
    *("NaN", "1e400", "0", "-1", "1e-320", "9" * 400, "null", '"$ref":"#"', '"allOf":[', '"pattern":"("', '"enum":[]'),
    *('"x-guidance":{}', "\0", "\ufffe", "é", "\U0010ffff", "@a", "->", "..", "start", "a{99999}", "(a|b)*a(a|b){40}"),
]  # fmt: skip


def check(spec: GrammarSpec) -> None:
    began = time.process_time()
    with suppress(InvalidRequest):
        grammars.check(COMPILER, spec)
    assert time.process_time() - began < SOON_S, spec.text[:200]


@EFFORTS
@pytest.mark.parametrize("kind", GrammarKind)
@pytest.mark.thorough
def test_any_text_compiles_or_is_refused(kind: GrammarKind, effort: int) -> None:
    texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text(max_size=30)
    try_out(lambda text: check(GrammarSpec(kind, text)), effort, 100, text=texts)


@pytest.mark.parametrize(
    "unit",
    ['\\"', '"', "/", "\\/", '"/', '/"', "<", '<"', "#", "%json ", '%json "', "%json [", '%json {"a":', '"%json ', "&"],
)  # fmt: skip
def test_the_longest_text_takes_no_longer_than_its_length(unit: str) -> None:
    text = 'start: "a"\n' + unit * ((MAX_GRAMMAR_BYTES - 20) // len(unit))
    check(GrammarSpec(GrammarKind.LARK, text))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
def test_numbers_that_json_does_not_have_are_refused(value: str) -> None:
    schema = f'{{"type": "number", "multipleOf": {value}}}'
    for spec in (
        GrammarSpec(GrammarKind.JSON_SCHEMA, schema),
        GrammarSpec(GrammarKind.LARK, f"start: %json {schema}"),
    ):
        with pytest.raises(InvalidRequest):
            grammars.check(COMPILER, spec)


PIECES = st.sampled_from(
    [
        ('"&"', 0), ('"\\"&"', 0), ('"/"', 0), ('"//"', 0), ("/&/", 0), ('/"/', 0), ("/\\/&/", 0), ('/"&"/i', 0),
        ("<&>", 0), ('<">', 0), ("// & \"\n", 0), ("# & /\n", 0), ("&", 1), (" & ", 1), ("&&", 2), ("A", 0), ("\n", 0),
    ]
)  # fmt: skip


@EFFORTS
def test_intersections_cannot_hide_behind_what_looks_like_a_string(effort: int) -> None:
    def one(pieces: list[tuple[str, int]]) -> None:
        text, count = " ".join(piece for piece, _ in pieces), sum(count for _, count in pieces)
        refusal = ""
        try:
            to_llguidance(GrammarSpec(GrammarKind.LARK, text))
        except InvalidRequest as error:
            refusal = error.message
        assert (f"has {count} &" in refusal) == (count >= MAX_INTERSECTED_PATTERNS), text

    try_out(one, effort, 300, pieces=st.lists(PIECES, max_size=60))


def test_many_intersections_between_two_quotes_are_refused_before_they_are_compiled() -> None:
    patterns = " & ".join(f"/(.*)a(.{{{length}}})b(.*)/" for length in range(2, 24))
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="&"):
        grammars.check(COMPILER, GrammarSpec(GrammarKind.LARK, f'start: A\nA: /"/ & {patterns} & /"/'))
    assert time.process_time() - began < SOON_S


def test_a_schema_of_ten_thousand_properties_is_refused_with_its_number_before_it_is_compiled() -> None:
    schema = json.dumps({"type": "object", "properties": {f"p{index}": {} for index in range(10_000)}})
    began = time.process_time()
    for spec in (
        GrammarSpec(GrammarKind.JSON_SCHEMA, schema),
        GrammarSpec(GrammarKind.LARK, f"start: %json {schema}"),
    ):
        with pytest.raises(InvalidRequest, match="10000 properties; permitted: 2000"):
            to_llguidance(spec)
    assert time.process_time() - began < SOON_S


def test_properties_are_counted_over_all_schemas_of_a_grammar() -> None:
    schema = json.dumps({"type": "object", "properties": {f"p{index}": {} for index in range(700)}})
    two, three = (
        "start: " + " | ".join(f"s{index}" for index in range(number)) + "\n"
        + "".join(f"s{index}: %json {schema}\n" for index in range(number))
        for number in (2, 3)
    )  # fmt: skip
    to_llguidance(GrammarSpec(GrammarKind.LARK, two))
    with pytest.raises(InvalidRequest, match="2100 properties"):
        to_llguidance(GrammarSpec(GrammarKind.LARK, three))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{index}": {} for index in range(1000)}},
        {"allOf": [
            {"anyOf": [{"type": "object", "properties": {f"{name}{index}": {}}} for index in range(60)]}
            for name in "ab"
        ]},
    ],
    ids=["optional", "product"],
)  # fmt: skip
def test_what_no_text_could_follow_is_refused_at_once(schema: dict[str, object]) -> None:
    """The parser's limits would end every sequence at its first token."""
    with pytest.raises(InvalidRequest, match="does not compile"):
        grammars.check(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_many_character_classes_are_refused_with_their_number() -> None:
    with pytest.raises(InvalidRequest, match="has 60000 character classes"):
        to_llguidance(GrammarSpec(GrammarKind.REGEX, r"[\w\d]\p{L}+" * 20_000))


@pytest.mark.thorough
def test_an_ambiguous_grammar_reaches_its_limit_before_a_mask_takes_long() -> None:
    state = grammars.compiled(COMPILER, GrammarSpec(GrammarKind.LARK, "start: e\ne: e e | /[a-z ]/"))
    token_ids = list(range(3, 4096))
    worst_s = 0.0
    for _ in range(300):
        began = time.thread_time()
        try:
            mask = state.masks([[]])[0]
            state.advance([next(token_id for token_id in token_ids if mask[token_id])])
        except GrammarViolation:
            break
        finally:
            worst_s = max(worst_s, time.thread_time() - began)
    assert worst_s < 0.5  # 0.09 s, and 0.75 s with llguidance's own limits


def test_forks_in_many_threads_answer_as_one_alone() -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))

    def walk(compiler: GrammarCompiler, seed: int) -> list[int]:
        return walk_to_the_end(grammars.compiled(compiler, spec), seed, EOS, num_tokens_max=600)

    def fresh() -> GrammarCompiler:
        return GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))

    alone = [walk(fresh(), seed) for seed in range(4)]
    shared = fresh()
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(lambda seed: walk(shared, seed % 4), range(16))) == alone * 4


def test_one_grammar_is_compiled_once_for_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    compiled: list[str] = []

    def matcher(tokenizer: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        compiled.append(grammar)
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr(compiler_module, "LLMatcher", matcher)
    with ThreadPoolExecutor(8) as executor:
        states = list(
            executor.map(lambda _: grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "a|b")), range(8))
        )
    assert len(compiled) == 1
    states[0].advance(list(TOKENIZER.encode("a").ids))
    assert states[0].is_complete
    assert not any(state.is_complete for state in states[1:])
    assert not grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, "a|b")).is_complete


def test_a_lexer_that_reached_its_limit_is_not_handed_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.grammar.lexemes.MAX_ITEMS", 1000)
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    spec = GrammarSpec(GrammarKind.LARK, "start: e\ne: e e | /[a-z]/")
    state = grammars.compiled(compiler, spec)
    letters = list(TOKENIZER.encode("a").ids) * 200
    with pytest.raises(GrammarViolation, match="Too many items"):
        state.masks([letters[:length] for length in range(len(letters))])
    assert state.has_failed
    assert not grammars.compiled(compiler, spec).has_failed
