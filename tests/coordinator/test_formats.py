"""Formats of reasoning and tool calls: grammars permit what parsers read, however the output is split into pieces."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from coordinator.formats import harmony
from coordinator.formats.answer_parts import AnswerRules, ParsedText, ReasoningStart, ToolMode, ToolUse
from coordinator.formats.call_syntax import CALL_SYNTAXES
from coordinator.formats.json_scanner import JsonScanner
from coordinator.formats.lark import LarkWriter
from coordinator.formats.names import ReasoningParserName, ToolCallParserName
from coordinator.formats.output_format import HarmonyFormat, MarkedFormat, OutputFormat, choose_format
from coordinator.formats.reasoning import REASONING_SYNTAXES
from outrider.grammar import GrammarCompiler, GrammarState
from outrider.sampling_params import GrammarKind, GrammarSpec
from outrider.text.tokenizer import Tokenizer
from tests import grammars
from tests.coordinator.tiny_model import write_model_dir

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "$defs": {"days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = (("weather", PARAMETERS), ("now", None), ("nowhere", None))
STRUCTURE = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"name": {"type": "string"}}}')
HARMONY = HarmonyFormat()
FORMATS: dict[str, OutputFormat] = {
    **{f"{name}": MarkedFormat(name, ReasoningParserName.NONE) for name in CALL_SYNTAXES},
    "hermes-think": MarkedFormat(ToolCallParserName.HERMES, ReasoningParserName.QWEN3),
    "llama3_json-think": MarkedFormat(ToolCallParserName.LLAMA3_JSON, ReasoningParserName.DEEPSEEK_R1),
    "deepseek_v3-think": MarkedFormat(ToolCallParserName.DEEPSEEK_V3, ReasoningParserName.DEEPSEEK_R1),
    "mistral-mistral": MarkedFormat(ToolCallParserName.MISTRAL_V11, ReasoningParserName.MISTRAL),
    "harmony": HARMONY,
}


@dataclass(frozen=True)
class Model:
    """A tokenizer and its grammar compiler."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler

    @property
    def eos_token_id(self) -> int:
        return min(self.tokenizer.eos_token_ids)


@functools.cache
def model(*, has_marks: bool) -> Model:
    """A tokenizer that has the marks of all formats as special tokens, or none of them."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model_dir(Path(folder), eos_token="<|eos|>")
        path = directory / "tokenizer.json"
        path.write_text(path.read_text().replace("<|end|>", "<|eos|>"))
        if has_marks:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
            marks = sorted({mark for form in FORMATS.values() for mark in form.marks})
            tokenizer.add_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
            tokenizer.save(str(path))
        made = Tokenizer(directory)
        compiler = GrammarCompiler(path, vocab_size=made.vocab_size, eos_token_ids=made.eos_token_ids)
        grammars.check(compiler, STRUCTURE)  # reads the file
        return Model(made, compiler)


@functools.cache
def start_of(name: str, rules: AnswerRules, has_marks: bool) -> GrammarState:
    known = model(has_marks=has_marks)
    grammar = FORMATS[name].grammar(rules, known.tokenizer.added_token_ids)
    assert grammar is not None
    return grammars.compiled(known.compiler, grammar)


def is_permitted(name: str, rules: AnswerRules, text: str, *, has_marks: bool) -> bool:
    known = model(has_marks=has_marks)
    token_ids = [*known.tokenizer.encode(text), known.eos_token_id]
    return start_of(name, rules, has_marks).num_valid(token_ids) == len(token_ids)


class Use(ToolUse):
    """Compared by identity, which caches need; its schemas are not hashable."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


USES = {(mode, is_parallel): Use(FUNCTIONS, mode, is_parallel) for mode in ToolMode for is_parallel in (False, True)}


def split(form: OutputFormat, rules: AnswerRules, pieces: list[str]) -> tuple[ParsedText, int]:
    """The parts of an answer that comes in pieces, and how many calls are complete."""
    parser = form.parser(rules)
    if parser is None:
        return ParsedText("".join(pieces)), 0
    found = [*map(parser.push, pieces), parser.finish()]
    for each in found:
        assert len({call.index for call in each.calls}) == len(each.calls), "one delta for each call in a piece"
    return functools.reduce(ParsedText.__add__, found), parser.num_complete_calls


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def written_calls(name: str, calls: list[tuple[str, str]], opening: int = 0) -> str:
    """Calls as a model writes them."""
    form = FORMATS[name]
    if isinstance(form, HarmonyFormat):
        ((function, arguments),) = calls
        header = (
            f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>",
            f" to=functions.{function}<|channel|>commentary json<|message|>",
        )[opening % 2]
        return header + arguments
    assert isinstance(form, MarkedFormat)
    syntax = CALL_SYNTAXES[form.calls_name]
    opening_text = syntax.openings[opening % len(syntax.openings)]
    written = [
        syntax.next_header(function) + (in_elements(arguments) if syntax.is_xml else arguments) + syntax.closing
        for function, arguments in calls
    ]
    return opening_text + syntax.separator.join(written) + syntax.ending


def in_elements(arguments: str) -> str:
    """Arguments as Qwen3-Coder writes them."""
    elements = json.loads(arguments).items()
    values = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in elements]
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)


def written_text(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if FORMATS[name] is HARMONY else text


def written_reasoning(name: str, text: str, start: ReasoningStart) -> str:
    form = FORMATS[name]
    if isinstance(form, HarmonyFormat):
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    assert isinstance(form, MarkedFormat)
    syntax = REASONING_SYNTAXES[form.reasoning_name]
    return f"{syntax.opening if start is ReasoningStart.POSSIBLE else ''}\n{text}\n{syntax.closing}\n\n"


def starts_of(name: str) -> list[ReasoningStart]:
    form = FORMATS[name]
    if isinstance(form, HarmonyFormat):
        return [ReasoningStart.POSSIBLE]
    assert isinstance(form, MarkedFormat)
    return [*ReasoningStart] if form.reasoning_name is not ReasoningParserName.NONE else [ReasoningStart.ABSENT]


@functools.cache
def rules_of(start: ReasoningStart, mode: ToolMode, is_parallel: bool, has_structure: bool) -> AnswerRules:
    return AnswerRules(USES[mode, is_parallel], STRUCTURE if has_structure else None, start)


# What a JSON string may hold that resembles the ends of calls.
CITIES = st.text(st.sampled_from('ab"\\}{]\n`;,. <>/é中'), max_size=8)
CALLS = st.one_of(
    st.builds(lambda city: ("weather", json.dumps({"city": city}, ensure_ascii=False)), CITIES),
    st.builds(
        lambda city, days: ("weather", json.dumps({"city": city, "days": days}, ensure_ascii=False)),
        CITIES,
        st.integers(-9, 99),
    ),
    st.sampled_from([("now", "{}"), ("nowhere", "{}")]),
)
WORDS = st.text(st.sampled_from("ab .,<>{}[]|\n"), max_size=12)
CUTS = st.lists(st.integers(0, 300), max_size=6)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_answers_are_permitted_and_split_into_their_parts(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    mode = data.draw(st.sampled_from(ToolMode), "mode")
    has_marks = data.draw(st.booleans(), "the marks are tokens")
    is_parallel = data.draw(st.booleans(), "is parallel")
    start = data.draw(st.sampled_from(starts_of(name)), "start")
    has_structure = data.draw(st.booleans(), "has a structure")
    rules = rules_of(start, mode, is_parallel, has_structure)
    calls: list[tuple[str, str]] = data.draw(
        st.lists(
            CALLS,
            min_size=mode is ToolMode.REQUIRED,
            max_size=3 if is_parallel and form is not HARMONY else 1,
        ),
        "calls",
    )
    reasons = start is ReasoningStart.OPEN or (start is ReasoningStart.POSSIBLE and data.draw(st.booleans(), "reasons"))
    thought = data.draw(WORDS, "thought").strip() if reasons else ""
    text = written_reasoning(name, thought, start) if reasons else ""
    content = ""
    if not calls:
        content = '{"name": "x}"}' if has_structure else data.draw(WORDS, "content").lstrip("\n")
        text += written_text(name, content)
    elif may_have_text_before_calls(form) and not has_structure and mode is ToolMode.AUTO:
        content = data.draw(WORDS, "content").strip()
        text += content + data.draw(st.sampled_from(["", "\n", " "]))
    if calls:
        text += written_calls(name, calls, data.draw(st.integers(0, 1), "opening"))
    assert is_permitted(name, rules, text, has_marks=has_marks), text
    parts, num_complete = split(form, rules, cut(text, data.draw(CUTS, "cuts")))
    assert parts.content == content
    assert parts.reasoning == thought
    assert [(call.name, call.arguments) for call in parts.calls] == calls
    assert num_complete == len(calls)


def may_have_text_before_calls(form: OutputFormat) -> bool:
    return isinstance(form, MarkedFormat) and bool(CALL_SYNTAXES[form.calls_name].trigger)


def fragments_of(name: str) -> list[str]:
    form = FORMATS[name]
    whole = [written_calls(name, [call], opening) for call in (("now", "{}"), ("nowhere", "{}")) for opening in (0, 1)]
    found = [*form.marks, *whole, *(each[: len(each) // 2] for each in whole), " ", "\n", "text", "{", '"}', "}", "[]"]
    if isinstance(form, HarmonyFormat):
        found += ["<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"]
    else:
        assert isinstance(form, MarkedFormat)
        syntax = CALL_SYNTAXES[form.calls_name]
        found += [*syntax.beginnings, syntax.closing, syntax.separator, syntax.ending, syntax.trigger, '{"name": "x"}']
    return [each for each in dict.fromkeys(found) if each]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_everything_that_the_grammar_permits_is_read_however_it_is_cut(name: str, data: st.DataObject) -> None:
    """Parts of calls in any order: what the grammar permits has no broken call, and none in the content."""
    form = FORMATS[name]
    mode = data.draw(st.sampled_from(ToolMode), "mode")
    start = data.draw(st.sampled_from(starts_of(name)), "start")
    rules = rules_of(start, mode, data.draw(st.booleans()), data.draw(st.booleans()))
    text = "".join(data.draw(st.lists(st.sampled_from(fragments_of(name)), max_size=7), "text"))
    whole, num_complete = split(form, rules, [text])
    assert split(form, rules, cut(text, data.draw(CUTS, "cuts"))) == (whole, num_complete)
    assert split(form, rules, list(text)) == (whole, num_complete)
    if not is_permitted(name, rules, text, has_marks=False):
        return
    assert num_complete == len(whole.calls)
    assert all(call.name in dict(FUNCTIONS) and json.loads(call.arguments) == {} for call in whole.calls)
    if mode is ToolMode.REQUIRED:
        assert whole.calls
        assert not whole.content
    elif isinstance(form, MarkedFormat) and rules.structure is None:
        syntax = CALL_SYNTAXES[form.calls_name]
        assert not syntax.trigger or syntax.trigger not in whole.content
        assert syntax.trigger or not whole.content.lstrip("\n").startswith(syntax.beginnings)
    if rules.structure is not None and not whole.calls:
        assert isinstance(json.loads(whole.content), dict)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ToolMode)
def test_the_grammar_permits_well_formed_calls_only(name: str, mode: ToolMode) -> None:
    start = ReasoningStart.ABSENT if FORMATS[name] is not HARMONY else ReasoningStart.POSSIBLE
    rules = rules_of(start, mode, False, False)
    right = written_calls(name, [("weather", '{"city": "Rome", "days": 2}')])
    now = written_calls(name, [("now", "{}")])
    assert is_permitted(name, rules, right, has_marks=False)
    for wrong in (
        written_calls(name, [("then", "{}")]),
        written_calls(name, [("now", '{"x": 1}')]),
        written_calls(name, [("weather", '{"days": 2}')]),
        written_calls(name, [("weather", '{"town": "Rome"}')]),
        written_calls(name, [("weather", '{"city": "Rome", "days": "two"}')]),
        now[:-1],
        now + " and so on",
        now + now,
    ):
        assert not is_permitted(name, rules, wrong, has_marks=False), wrong
    plain = written_text(name, "Just text.\n")
    assert is_permitted(name, rules, plain, has_marks=False) == (mode is ToolMode.AUTO)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_several_calls_need_permission(name: str) -> None:
    text = written_calls(name, [("now", "{}"), ("weather", '{"city": "Rome"}')])
    for is_parallel in (False, True):
        rules = rules_of(ReasoningStart.ABSENT, ToolMode.AUTO, is_parallel, False)
        assert is_permitted(name, rules, text, has_marks=True) == is_parallel


STRUCTURES = {
    "regex": (GrammarSpec(GrammarKind.REGEX, "a/b|c\\/d"), ("a/b", "c/d"), "a/c"),
    "lark": (GrammarSpec(GrammarKind.LARK, 'start: "x" calls | thought\ncalls: "y"\nthought: "z"'), ("xy", "z"), "x"),
    "white space": (
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"properties": {"a": {}}, "additionalProperties": false}', True),
        ('{"a": 1}', '{"a" :\n1}'),
        '{"b": 1}',
    ),
}


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_or_a_structure_of_any_kind(name: str, kind: str) -> None:
    structure, right, wrong = STRUCTURES[kind]
    for start in starts_of(name):
        rules = AnswerRules(USES[ToolMode.AUTO, True], structure, start)
        before = written_reasoning(name, "a", start) if start is not ReasoningStart.ABSENT else ""
        for text in right:
            assert is_permitted(name, rules, before + written_text(name, text), has_marks=False)
            assert split(FORMATS[name], rules, list(before + written_text(name, text)))[0].content == text
        assert not is_permitted(name, rules, before + written_text(name, wrong), has_marks=False)
        call = before + written_calls(name, [("weather", '{"city": "Rome"}')])
        assert is_permitted(name, rules, call, has_marks=False)
        alone = AnswerRules(None, structure, start)
        assert is_permitted(name, alone, before + written_text(name, right[0]), has_marks=False)
        assert not is_permitted(name, alone, call, has_marks=False)


@pytest.mark.parametrize(
    ("name", "start", "text", "reasoning", "content"),
    [
        ("hermes-think", ReasoningStart.POSSIBLE, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("hermes-think", ReasoningStart.POSSIBLE, "\n<think></think>Yes.", "", "Yes."),
        ("hermes-think", ReasoningStart.POSSIBLE, "Yes. <think>", "", "Yes. <think>"),
        ("hermes-think", ReasoningStart.POSSIBLE, "<thin", "", "<thin"),
        ("hermes-think", ReasoningStart.POSSIBLE, "<think>\nhm </thi", "hm </thi", ""),
        ("hermes-think", ReasoningStart.OPEN, "hm\n\nso\n</think>\n\nYes.\n", "hm\n\nso", "Yes.\n"),
        ("hermes-think", ReasoningStart.OPEN, "<think>\nhm</think>", "hm", ""),
        ("hermes-think", ReasoningStart.OPEN, "\n<th", "<th", ""),
        ("hermes-think", ReasoningStart.OPEN, "hm </think> is </think>", "hm", " is </think>"),
        ("hermes-think", ReasoningStart.ABSENT, "<think>hm</think>Yes.", "", "<think>hm</think>Yes."),
        ("mistral-mistral", ReasoningStart.POSSIBLE, "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
        ("harmony", ReasoningStart.POSSIBLE, "<|channel|>analysis<|message|>hm", "hm", ""),
        ("harmony", ReasoningStart.POSSIBLE, "<|channel|>analysis<|message|>hm<|e", "hm<|e", ""),
        ("harmony", ReasoningStart.POSSIBLE, "<|channel|>final<|message|>Yes.", "", "Yes."),
        ("harmony", ReasoningStart.POSSIBLE, "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("harmony", ReasoningStart.POSSIBLE, "<|chan", "", "<|chan"),
        ("harmony", ReasoningStart.POSSIBLE, "<|channel|>ana", "", ""),
        ("harmony", ReasoningStart.POSSIBLE, "No message.<|message|>", "", "No message.<|message|>"),
        ("harmony", ReasoningStart.POSSIBLE, f"<|start|>{'x' * 300}", "", f"<|start|>{'x' * 300}"),
        (
            "harmony",
            ReasoningStart.POSSIBLE,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary to=browser.search<|message|>c<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>d<|end|><|start|>assistant<|channel|>final<|message|>e",
            "a\nb\nc",
            "d\ne",
        ),
    ],
)
def test_answers_without_a_grammar_are_split_however_they_are_cut(
    name: str, start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    form, rules = FORMATS[name], AnswerRules(reasoning=start)
    expected = ParsedText(content, (), reasoning), 0
    assert split(form, rules, [text]) == expected
    assert split(form, rules, list(text)) == expected
    for place in range(len(text)):
        assert split(form, rules, [text[:place], text[place:]]) == expected


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "}\\n</tool_call>", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "}\\n</tool_call>", "days": 2}'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_complete"),
    [
        ("just text < with <tool", "just text < with <tool", [], 0),
        ("text \n", "text \n", [], 0),
        ("Let me see.\n" + CALL, "Let me see.", [("weather", ARGUMENTS)], 1),
        (f"{CALL}\n{NOW}", "", [("weather", ARGUMENTS), ("now", "{}")], 2),
        (f"{NOW}\n\n", "", [("now", "{}")], 1),
        (CALL[:-5], "", [("weather", ARGUMENTS)], 0),
        (f"{NOW}\n{CALL[:30]}", "", [("now", "{}")], 1),
        (CALL[:60], "", [("weather", '{"city": "}\\n</')], 0),
        ('a <tool_call>\n{"name": "other', 'a <tool_call>\n{"name": "other', [], 0),
        ("a <tool_call> is a mark " + NOW, "a <tool_call> is a mark", [("now", "{}")], 1),
        ("<tool_call><tool_call>\n", "<tool_call><tool_call>\n", [], 0),
    ],
)
def test_what_is_cut_off_or_only_resembles_a_call_is_kept(
    text: str, content: str, calls: list[tuple[str, str]], num_complete: int
) -> None:
    form, rules = FORMATS["hermes"], rules_of(ReasoningStart.ABSENT, ToolMode.AUTO, True, False)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        parts, complete = split(form, rules, [text[:first], text[first:second], text[second:]])
        assert parts.content == content
        assert [(call.name, call.arguments) for call in parts.calls] == calls
        assert complete == num_complete


def test_arguments_come_while_the_call_goes_on() -> None:
    parser = FORMATS["hermes"].parser(rules_of(ReasoningStart.ABSENT, ToolMode.AUTO, True, False))
    assert parser is not None
    parser.push('<tool_call>\n{"name": "now", "arguments": ')
    (delta,) = parser.push('{"a": 1').calls
    assert delta.arguments == '{"a": 1'


ELEMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "kind": {"type": "string", "const": "air"},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": "string"},
        "anything": {},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "required": ["unit"],
}


@pytest.mark.parametrize(
    ("elements", "arguments"),
    [
        ({"unit": "C"}, '{"unit": "C"}'),
        ({"unit": "K"}, None),
        ({"unit": "F", "kind": "air"}, '{"unit": "F", "kind": "air"}'),
        ({"unit": "F", "kind": "sea"}, None),
        ({"unit": "F", "place": '{"x": 1.5}'}, '{"unit": "F", "place": {"x": 1.5}}'),
        ({"unit": "F", "place": '{"y": 1.5}'}, None),
        ({"unit": "F", "note": '"so"\n</parameter> \\'}, '{"unit": "F", "note": "\\"so\\"\\n</parameter> \\\\"}'),
        ({"unit": "F", "note": ""}, '{"unit": "F", "note": ""}'),
        ({"unit": "F", "anything": '"a"'}, '{"unit": "F", "anything": "a"}'),
        ({"unit": "F", "anything": "a"}, None),
        ({"note": "x"}, None),
    ],
)
def test_arguments_in_elements_follow_the_schema_and_become_json(
    elements: dict[str, str], arguments: str | None
) -> None:
    form = MarkedFormat(ToolCallParserName.QWEN3_CODER, ReasoningParserName.NONE)
    rules = AnswerRules(ToolUse((("tell", ELEMENTS),), ToolMode.REQUIRED, False))
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in elements.items())
    text = f"<tool_call>\n<function=tell>\n{body}</function>\n</tool_call>"
    known = model(has_marks=False)
    grammar = form.grammar(rules, {})
    assert grammar is not None
    token_ids = [*known.tokenizer.encode(text), known.eos_token_id]
    is_valid = grammars.compiled(known.compiler, grammar).num_valid(token_ids) == len(token_ids)
    assert is_valid == (arguments is not None)
    if arguments is not None:
        for place in range(len(text)):
            parts, num_complete = split(form, rules, [text[:place], text[place:]])
            assert [call.arguments for call in parts.calls] == [arguments]
            assert num_complete == 1


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    after=st.sampled_from(["}", "\n```", "<x>", "[T]", ", {"]),
    is_ascii=st.booleans(),
    cuts=CUTS,
)
def test_the_end_of_a_json_value_is_found(value: Any, after: str, is_ascii: bool, cuts: list[int]) -> None:
    written = json.dumps(value, ensure_ascii=is_ascii)
    scanner, read = JsonScanner(), ""
    for piece in cut(written + after, cuts):
        end = scanner.push(piece)
        read += piece if end is None else piece[:end]
        if end is not None:
            break
    assert read == written


@given(
    prefixes=st.lists(st.text("ab/{\n", min_size=1, max_size=4).filter(lambda each: each[0] != "\n"), max_size=4),
    text=st.text("ab/{\n", max_size=6),
)
def test_free_text_begins_with_none_of_the_forbidden_texts(prefixes: list[str], text: str) -> None:
    lark = LarkWriter((), {})
    lark.text("text", prefixes)
    found = re.fullmatch(r"TEXT: /(.*)/\n", lark.grammar().text)
    assert found is not None
    permits = re.fullmatch(found[1].replace("\\/", "/"), text) is not None
    assert permits == (not text.lstrip("\n").startswith(tuple(prefixes)))


# The marks of families' templates, in templates of a line.
TEMPLATES = {
    "{{ '<tool_call>\\n' }}": ("hermes", "none"),
    "{{ '<tool_call>\\n<function=' + n }}": ("qwen3_coder", "none"),
    "{% if '</think>' in c %}{% endif %}{{ '<tool_call>\\n' }}": ("hermes", "deepseek_r1"),
    "{{ '<|im_start|><tool_call>' }}{# on Llama 3: <|start_header_id|> <|python_tag|> #}": ("hermes", "none"),
    "{{ '<|python_tag|>' }}": ("llama3_json", "none"),
    '{{ \'<|start_header_id|>{"name": NAME, "parameters": {}}\' }}': ("llama3_json", "none"),
    "{{ '<|start_header_id|>' }}": ("hermes", "none"),
    "{{ '[TOOL_CALLS][' + c }}": ("mistral", "none"),
    "{{ '[THINK]' + t + '[/THINK][TOOL_CALLS]' + n + '[ARGS]' + a }}": ("mistral_v11", "mistral"),
    "{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>```json' }}{{ '<think>' }}{{ c.split('</think>') }}": (
        "deepseek_v3",
        "deepseek_r1",
    ),
    "{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}": ("deepseek_v31", "none"),
    "{{ m.content }}": ("hermes", "none"),
}


@pytest.mark.parametrize(("template", "names"), TEMPLATES.items())
def test_the_chat_template_tells_the_format(template: str, names: tuple[str, str]) -> None:
    assert choose_format(template) == MarkedFormat(ToolCallParserName(names[0]), ReasoningParserName(names[1]))


def test_settings_come_before_the_chat_template() -> None:
    template = "<|start|>assistant<|channel|>analysis<|message|>"
    assert choose_format(template) == HARMONY
    named = MarkedFormat(ToolCallParserName.MISTRAL, ReasoningParserName.NONE)
    assert choose_format(template, ToolCallParserName.MISTRAL) == named
    assert choose_format("", None, ReasoningParserName.OPENAI_GPTOSS) == HARMONY
    assert choose_format("</think>", None, ReasoningParserName.NONE) == choose_format("")
    assert choose_format("", ToolCallParserName.OPENAI, ReasoningParserName.OPENAI_GPTOSS) == HARMONY
    with pytest.raises(ValueError, match="--reasoning-parser openai_gptoss cannot be combined"):
        choose_format(template, ToolCallParserName.HERMES, ReasoningParserName.OPENAI_GPTOSS)


@pytest.mark.parametrize(
    ("prompt_end", "start"),
    [
        ("<|im_start|>assistant\n", ReasoningStart.POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", ReasoningStart.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningStart.ABSENT),
        ("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", ReasoningStart.POSSIBLE),
    ],
)
def test_the_end_of_the_prompt_tells_where_reasoning_begins(prompt_end: str, start: ReasoningStart) -> None:
    assert FORMATS["hermes-think"].reasoning_after(prompt_end) is start
    assert FORMATS["hermes"].reasoning_after(prompt_end) is ReasoningStart.ABSENT


def test_every_name_of_a_flag_has_a_format() -> None:
    assert {*CALL_SYNTAXES, ToolCallParserName.OPENAI} == {*ToolCallParserName}
    assert {*REASONING_SYNTAXES, ReasoningParserName.OPENAI_GPTOSS, ReasoningParserName.NONE} == {*ReasoningParserName}
    assert HARMONY.marks == harmony.MARKS
