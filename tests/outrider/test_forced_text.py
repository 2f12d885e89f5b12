"""Text without a choice: tokenized once, token by token as the tokenizer splits it, and never more of it in a step than
fits there."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import InvalidRequest
from outrider.grammar import GrammarCompiler, GrammarState, GrammarViolation
from outrider.grammar import compiler as compiler_module
from outrider.grammar.effort import MAX_FORCED_BYTES
from outrider.grammar.lexemes import MAX_ITEMS, lark_len, max_items
from outrider.grammar.position import Position
from outrider.grammar.source import longest_lexeme, to_llguidance
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.outrider.test_grammar import COMPILER, EOS, GRAMMARS, TOKENIZER_JSON, VOCAB_SIZE, encode
from tests.schemas.catalog import SCHEMAS
from tests.schemas.walk import permitted_token_ids

PROSE = "It is 1234567 o'clock; don't   say \"later\", say 'now' -- naïve façade ☃, tabs\tand\r\nline feeds. " * 8


class CountedMatcher:
    """A matcher whose calls are counted, and how much text they tokenized."""

    def __init__(self, matcher: LLMatcher, counts: Counter[str]) -> None:
        self._matcher = matcher
        self._counts = counts

    def deep_copy(self) -> CountedMatcher:
        return CountedMatcher(self._matcher.deep_copy(), self._counts)

    def compute_ff_tokens(self) -> list[int]:
        self._counts["tokenized bytes"] += len(self._matcher.compute_ff_bytes())
        return list(self._matcher.compute_ff_tokens())

    def compute_bitmask(self) -> bytes:
        # It tokenizes forced text, too, unless that was asked for here before.
        self._counts["tokenized bytes"] += len(self._matcher.compute_ff_bytes())
        return bytes(self._matcher.compute_bitmask())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[GrammarCompiler, Counter[str]]:
    """A compiler of counted matchers, and the counts."""
    counts = Counter[str]()

    def matcher(tokenizer: LLTokenizer, grammar: str, **options: Any) -> CountedMatcher:
        return CountedMatcher(LLMatcher(tokenizer, grammar, **options), counts)

    monkeypatch.setattr(compiler_module, "LLMatcher", matcher)
    return GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS])), counts


def commit_each(state: GrammarState, token_ids: list[int]) -> None:
    for token_id in token_ids:
        state.advance([token_id])


QUERIES: dict[str, Callable[[GrammarState, list[int]], object]] = {
    "forced tokens": lambda state, text: state.forced_after([], len(text)),
    "hints": lambda state, text: state.num_valid(text),
    "masks": lambda state, text: state.masks([text[:length] for length in range(0, len(text), 50)]),
    "commits": lambda state, text: commit_each(state, text),
    "commits at once": lambda state, text: state.advance(text),
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_tokenizes_forced_text_once(query: str, counted: tuple[GrammarCompiler, Counter[str]]) -> None:
    compiler, counts = counted
    text = "It is said with plain words, which JSON writes in one way only. " * 60
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": text})))
    told = grammars.compiled(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": text})))
    token_ids = told.forced_after([], 5000)[:-1]
    assert len(token_ids) > 500
    counts.clear()
    QUERIES[query](state, token_ids)
    assert counts["tokenized bytes"] < 2 * len(text.encode())


# A reference: the matcher alone, asked anew for what is forced at each token.


class Reference:
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.token_ids: list[int] = []

    def forced(self) -> int | None:
        return next(iter(self.matcher.compute_ff_tokens()), None)

    def mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        is_accepting = self.matcher.is_accepting()
        if not self.matcher.is_stopped():
            bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
            mask[:] = np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little")
        mask[EOS] = is_accepting
        return mask


LITERALS = [
    PROSE, "x" * 300, " " * 65 + "x", "1" * 40, "'s 't're" * 9, "<|eos|>" * 5, "\t\n \r\n" * 7 + "end", "☃é" * 20,
    "https://example.org/a-b_c?d=e&f=%20", "fooBarBAZ_quux--__..", "\\\"\\n{}[]:,", "a b  c   d    e     ",
]  # fmt: skip
MANY = [
    *GRAMMARS,
    *(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": text})) for text in LITERALS),
    *(
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [text + end for end in ("", "a", "ab", "1")]}))
        for text in LITERALS
    ),
    *(
        GrammarSpec(GrammarKind.LARK, f"start: /[a-z0-9 '<]{{0,3}}/ {json.dumps(text)} /[a-z ]{{1,4}}/")
        for text in LITERALS
        if "☃" not in text and "ï" not in text
    ),
    *(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMAS[name])) for name in list(SCHEMAS)[::5]),
    GrammarSpec(GrammarKind.REGEX, "(abc){40}d?"),
    GrammarSpec(GrammarKind.LARK, 'start: "ab"* "c" tail{3,5}\ntail: "tail " /[0-9]{2}/ " of the tail"'),
]


@pytest.mark.parametrize("number", range(len(MANY)))
def test_what_is_permitted_is_what_the_matcher_says_asked_anew_at_each_token(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LLMatcher] = []

    def matcher(tokenizer: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        made.append(LLMatcher(tokenizer, grammar, **options))
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr(compiler_module, "LLMatcher", matcher)
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    state = grammars.compiled(compiler, MANY[number])
    for seed in range(2):
        choice, walker, reference = random.Random(seed), state.fork(), Reference(made[0].deep_copy())
        for _ in range(200):
            mask = walker.masks([[]])[0]
            np.testing.assert_array_equal(mask, reference.mask())
            forced, permitted = reference.forced(), np.flatnonzero(mask).tolist()
            if forced is not None:
                assert permitted == [forced] == walker.forced_after([], 1)
            token_id = choice.choice(permitted)
            if token_id == EOS:
                break
            walker.advance([token_id])
            assert reference.matcher.try_consume_tokens([token_id]) == 1


def test_forced_tokens_at_once_are_those_found_one_by_one() -> None:
    for spec in MANY:
        state = grammars.compiled(COMPILER, spec)
        for _ in range(8):
            at_once, walker, one_by_one = state.forced_after([], 60), state.fork(), list[int]()
            while len(one_by_one) < 60 and (forced := walker.forced_after([], 1)):
                one_by_one += forced
                walker.advance(forced)
            assert at_once == one_by_one, spec
            permitted = [token_id for token_id in permitted_token_ids(state) if token_id != EOS]
            if not permitted:
                break
            state.advance(permitted[len(permitted) // 2 :][:1])


LONG = "ab" * (MAX_FORCED_BYTES // 2 + 1)
REFUSED = {
    "regex": GrammarSpec(GrammarKind.REGEX, f"x?{LONG}"),
    "a choice": GrammarSpec(GrammarKind.REGEX, f"({LONG}|c)"),
    "const": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": LONG})),
    "enum": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["a", LONG]})),
    "name of a property": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"properties": {LONG: {}}})),
    "pattern": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": f"^x?{LONG}$"})),
    "lark": GrammarSpec(GrammarKind.LARK, f'start: "x"? "{LONG}"'),
    "regex in lark": GrammarSpec(GrammarKind.LARK, f"start: /x?{LONG}/"),
    "schema in lark": GrammarSpec(GrammarKind.LARK, f"start: %json {json.dumps({'enum': ['a', LONG]})}"),
    "repeated": GrammarSpec(GrammarKind.REGEX, f"(ab){{{len(LONG)}}}"),
    "many parts": GrammarSpec(GrammarKind.REGEX, "(?:ab)" * len(LONG)),
    "rules by the thousand": GrammarSpec(GrammarKind.LARK, 'start: A{4000}\nA: "abcd"'),
    "many rules": GrammarSpec(GrammarKind.LARK, f'start: {"A " * 60}\nA: "{LONG[:200]}"'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_long_text_without_a_choice_is_refused_with_the_limit(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"in a row without a choice; permitted: {MAX_FORCED_BYTES}") as refusal:
        grammars.check(COMPILER, REFUSED[name])
    assert refusal.value.parameter == "grammar"


def test_a_regular_expression_of_more_bytes_than_the_lexer_has_states_is_refused() -> None:
    for pattern in ("(abc){100000}", "(?:a{1000}){1000}", "[a-z]{60000}", "x?(ab{300}){300}"):
        for spec in (
            GrammarSpec(GrammarKind.REGEX, pattern),
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern})),
            GrammarSpec(GrammarKind.LARK, f"start: /{pattern}/"),
        ):
            with pytest.raises(InvalidRequest, match="and more; permitted: 50000"):
                grammars.check(COMPILER, spec)


def test_long_text_behind_a_choice_ends_its_sequence_before_it_is_tokenized(
    counted: tuple[GrammarCompiler, Counter[str]],
) -> None:
    compiler, counts = counted
    state = grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, f"[xy](ab){{{len(LONG)}}}"))
    counts.clear()
    for query in (lambda: state.advance(encode("x")), lambda: state.masks([encode("x")])):
        try:
            query()
            state.masks([[]])
        except GrammarViolation:
            pass
    assert state.refusal is not None
    assert f"permitted: {MAX_FORCED_BYTES}" in state.refusal
    assert counts["tokenized bytes"] < 100


def test_prose_in_descriptions_and_comments_is_no_text_of_the_output() -> None:
    described = {"type": "integer", "description": LONG, "default": LONG, "examples": [LONG]}
    for spec in (
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(described)),
        GrammarSpec(GrammarKind.LARK, f"// {LONG}\nstart: %json {json.dumps(described)}"),
    ):
        grammars.check(COMPILER, spec)


def test_copies_of_a_position_go_their_own_ways_through_forced_text() -> None:
    state = grammars.compiled(COMPILER, GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"const": PROSE})))
    position: Position = state._position
    ahead = position.copy()
    text = list(ahead.forced_token_ids(1000))
    assert ahead.consume_all(text[:40]) == 40
    behind = position.copy()
    assert list(behind.forced_token_ids(1000)) == text
    assert list(ahead.forced_token_ids(1000)) == text[40:]
    assert not behind.consume(text[1])
    assert behind.consume(text[0])


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('start: A{4000}\nA: B{20000}\nB: "abc"', 60_000),
        ("start: T9 T9\n" + "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 10)) + 'T0: "abcdefgh"', 4096),
        ('start: A~9\nA.2[stop="]:"]: ("ab" | "c"){100} /x{50}(y{4}|z)/ <|eos|> // B: "text"{1000}', 250),
        ('start: a{1000}\na: B\nB: /[x]{100}/', 100),
        ("start: A\n%ignore B", 2**40),  # nobody knows what they are
        ("start: A{{3}}", 2**40),
    ],
)  # fmt: skip
def test_the_longest_lexeme_is_found_however_it_is_put_together(text: str, length: int) -> None:
    assert length <= lark_len(text) <= 2 * length


SPELT = {
    "a name with a dash": 'A: "x"\nr: "z"\nA-1: B{%d}\nstart: "y"? A-1{4000}',
    "names without a blank": 'r: "z"\nA : B{%d}\nstart: "y"? rA{4000}',
    "blanks in a repetition": "A: B{ %d }",
    "a sign in a repetition": "A: B{+%d}",
    "a sign behind a tilde": "A: B~+%d",
    "leading zeros": "A: B{00000000000000%d}",
    "a comment behind an import": "%%import common.INT // A\nA: B{%d}",
    "a lazy rule": 'a[lazy]: B{%d}\nstart: "y"? a{4000}',
    "a rule with an end": 'a[suffix="!"]: B{%d}\nstart: "y"? a{4000}',
    "blanks in a regular expression": "A: /(abcdefghij){ %d }/",
    "leading zeros in a regular expression": "A: /(abcdefghij){00000000000000%d}/",
    "flags in a group": "A: /(abcdefghij(?i)){%d}/",
    "a named group": "A: /(?P<n>abcdefghij){%d}/",
    "a comment in a regular expression": "A: /(abcdefghij#(\n){%d}/x",
    "characters by number": "A: /[\\u{1F600}]{%d0}/",
}


@pytest.mark.parametrize("name", SPELT)
def test_the_longest_lexeme_is_found_however_it_is_spelt(name: str) -> None:
    text = SPELT[name] % 60 + '\nB: "abcdefghij"'
    text += "" if "start:" in text else '\nstart: "y"? A{4000}'
    spec = GrammarSpec(GrammarKind.LARK, text)
    matcher = LLMatcher(COMPILER._vocabulary().tokenizer, to_llguidance(spec), log_level=0)
    assert matcher.try_consume_tokens(encode("y"))
    num_bytes = len(matcher.compute_ff_bytes())
    assert num_bytes >= 60 * 4000 * 10, "llguidance reads it so"
    assert longest_lexeme(spec) >= num_bytes // 4000


@pytest.mark.parametrize("value", [["x" * 3000], {"name": "x" * 3000}, [{"name": ["x" * 3000]}]])
def test_text_within_fixed_values_of_a_schema_counts(value: Any) -> None:
    for fixed in ({"const": value}, {"enum": [1, value]}):
        schema = {"type": "array", "minItems": 4000, "items": fixed}
        assert longest_lexeme(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))) >= 3000


def test_ordinary_names_and_expressions_are_known() -> None:
    for lark in (
        'start: MY-TOK my-rule "."\nMY-TOK: /[a-z]+/\nmy-rule: "a"',
        "start: DATE\nDATE: /(?P<year>[0-9]{4})-(?P<month>[0-9]{2})/",
        '%import common (INT, WORD)\n%import common.CNAME -> NAME\n%llguidance {}\nstart: INT WORD NAME "x"{ , 3}',
        'start: a\na[capture="K", stop=END-OF-A, max_tokens=5]: TEXT~2..5 | /x/i\nTEXT: /[^\\n]*/\nEND-OF-A: "\\n"',
    ):
        assert max_items(longest_lexeme(GrammarSpec(GrammarKind.LARK, lark))) == MAX_ITEMS


def test_a_grammar_of_long_lexemes_forces_no_more_in_one_call_than_one_of_short_ones() -> None:
    """`A{4000}` of a lexeme of 8,000 bytes was 32 MB: 12 s and 3 GiB in one call."""
    for length in (10, 1000, 8000, 60_000):
        lark = f'start: A{{4000}}\nA: B{{{length // 10}}}\nB: "abcdefghij"'
        spec = GrammarSpec(GrammarKind.LARK, lark)
        limits = LLParserLimits(step_max_items=max_items(longest_lexeme(spec)), verbose_errors=False)
        matcher = LLMatcher(COMPILER._vocabulary().tokenizer, to_llguidance(spec), log_level=0, limits=limits)
        assert len(matcher.compute_ff_bytes()) <= 8 * 2**20
        with pytest.raises(InvalidRequest, match="does not compile"):
            grammars.check(COMPILER, spec)


def test_ordinary_schemas_have_all_items() -> None:
    for schema in SCHEMAS.values():
        for spec in (
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            GrammarSpec(GrammarKind.LARK, f"start: %json {json.dumps({**schema, 'description': LONG})}"),
        ):
            assert max_items(longest_lexeme(spec)) == MAX_ITEMS
