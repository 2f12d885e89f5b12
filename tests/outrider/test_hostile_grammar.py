"""A grammar may be any text: it compiles or is refused as a bad one, soon."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.grammar.source import MAX_INTERSECTED_PATTERNS, to_llguidance
from outrider.sampling_params import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from tests.hostile import EFFORTS, try_out
from tests.outrider.test_grammar import COMPILER

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
        COMPILER.check(spec)
    assert time.process_time() - began < SOON_S, spec.text[:200]


@EFFORTS
@pytest.mark.parametrize("kind", GrammarKind)
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
            COMPILER.check(spec)


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
        COMPILER.check(GrammarSpec(GrammarKind.LARK, f'start: A\nA: /"/ & {patterns} & /"/'))
    assert time.process_time() - began < SOON_S
