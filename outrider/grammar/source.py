"""Converts a request's grammar to llguidance's format, and refuses what it would ignore or could not compile in bounds.

llguidance refuses what it does not know and bounds its own effort, except where this module does so for it: its effort
doubles with every pattern that a string must match at once, and grows with the common multiple of `multipleOf`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

from llguidance import LLMatcher

from outrider.errors import InvalidRequest
from outrider.grammar import calendar
from outrider.grammar.effort import forced_text_refusal
from outrider.grammar.lexemes import MAX_LEXEME_BYTES, UNKNOWN_LEN, lark_len, regex_len, schema_len
from outrider.sampling_params import GrammarKind, GrammarSpec

MAX_INTERSECTED_PATTERNS: Final = 16  # 40 ms and 40 MB; 22 would take 10 s and 1 GB
MAX_COMMON_MULTIPLE: Final = 20_000  # 0.1 s; the effort is proportional
MAX_PROPERTIES: Final = 2000  # 0.1 s where all are required; hardly more than 500 of one object may be optional
MAX_CHARACTER_CLASSES: Final = 4096  # \w and the like: 0.1 s and 40 MB, for each stands for hundreds of ranges
MAX_EMBEDDED_SCHEMAS: Final = 1024  # 0.1 s: for each unreadable one Python counts the lines before it
MAX_LINE_FEEDS: Final = 2
MAX_INDENTATION: Final = 128  # blanks or tabs behind a line feed: 32 levels of 4, 64 of 2
MAX_BLANKS: Final = 8  # on one line
WHITESPACE: Final = (
    rf"[ \t]{{1,{MAX_BLANKS}}}|[ \t]{{0,{MAX_BLANKS}}}(\r?\n){{1,{MAX_LINE_FEEDS}}}[ \t]{{0,{MAX_INDENTATION}}}"
)
"""White space between two parts of JSON, where it is free: a model that likes line feeds would never end otherwise."""

# Literals of llguidance's Lark, whose strings are JSON's: comments, strings, regular expressions, special tokens. An
# unclosed one ends where nothing more could belong to it, so that reading takes time in proportion to the text.
_LITERAL: Final = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\])*+/?|<[^<>\s]+>')
_REGEX_TEXT: Final = re.compile(r"(?:[^\\\[\](){}|*+?.^$]|\\.)++", re.DOTALL)
"""Text of a regular expression that has no operators."""
_CHARACTER_CLASS: Final = re.compile(r"\\[pPwWdDsS]")
_PATTERNS: Final = frozenset({"pattern", "format"})
_APPLICATORS: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
_CONSTRAINTS: Final = frozenset({
    "pattern", "format", "properties", "patternProperties", "additionalProperties", "items", "prefixItems",
})  # fmt: skip


def to_llguidance(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own notation; raises InvalidRequest for what it must not be given."""
    text = checked_text(spec)
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if spec.kind is GrammarKind.LARK:
        # Not the bare text: one that starts with a brace would be read as llguidance's own notation.
        return json.dumps({"grammars": [{"lark_grammar": text}]})
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_whitespace(spec))
    except ValueError as error:
        raise InvalidRequest("grammar", f"the JSON schema is not a JSON object: {error}") from error


def checked_text(spec: GrammarSpec, *, tells_whitespace: bool = False) -> str:
    """The grammar as it may be compiled, in its own language. Raises InvalidRequest.

    tells_whitespace: a JSON schema has llguidance's options of whitespace in it, for whom they are not given otherwise.
    """
    num_classes = len(_CHARACTER_CLASS.findall(spec.text))
    if num_classes > MAX_CHARACTER_CLASSES:
        raise InvalidRequest(
            "grammar",
            f"the grammar has {num_classes} character classes like \\w and \\p{{L}}; permitted: "
            f"{MAX_CHARACTER_CLASSES}",
        )
    if spec.kind is GrammarKind.REGEX:
        _check_pattern(spec.text)
        return spec.text
    if spec.kind is GrammarKind.LARK:
        return _checked_lark(spec)
    try:
        schema = json.loads(spec.text)
        _check_schema(schema)
        is_changed = calendar.replace_formats(schema)
        if tells_whitespace and isinstance(schema, dict):
            schema["x-guidance"], is_changed = _whitespace(spec), True
        return json.dumps(schema) if is_changed else spec.text
    except RecursionError as error:
        raise InvalidRequest("grammar", "the JSON schema is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest("grammar", f"the JSON schema is not a JSON object: {error}") from error


def _whitespace(spec: GrammarSpec) -> Any:
    if not spec.any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {"whitespace_pattern": WHITESPACE, "item_separator": ",", "key_separator": ":"}


def _checked_lark(spec: GrammarSpec) -> str:
    """The Lark text with its JSON schemas checked and their whitespace options set."""
    text = spec.text
    num_intersections = _LITERAL.sub("", text).count("&")
    if num_intersections >= MAX_INTERSECTED_PATTERNS:
        raise InvalidRequest(
            "grammar", f"the grammar has {num_intersections} &; permitted: {MAX_INTERSECTED_PATTERNS - 1}"
        )
    if text.count("%json") > MAX_EMBEDDED_SCHEMAS:
        raise InvalidRequest("grammar", f"the grammar has more than {MAX_EMBEDDED_SCHEMAS} %json")
    parts, outside, end, num_properties = [], list[str](), 0, 0
    for schema_begin, schema_end, schema in _embedded(text):
        try:
            num_properties += _check_schema(schema)
            _check_num_properties(num_properties)  # of all of them together
            calendar.replace_formats(schema)
            told = json.dumps({**schema, "x-guidance": _whitespace(spec)})
        except (ValueError, RecursionError):
            continue  # llguidance will report the fault
        outside.append(text[end:schema_begin])
        parts += [outside[-1], told]
        end = schema_end
    _check_literals("".join([*outside, text[end:]]))
    return "".join([*parts, text[end:]])


def _embedded(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON schemas in a text of Lark, with where they begin and end."""
    end = 0
    for match in re.finditer(r"%json\s*", text):
        if match.start() < end:
            continue  # within the text of a schema
        try:
            schema, schema_end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue  # llguidance will report the fault, if this is a schema at all
        schema = {} if schema is True else schema  # which has no place for options
        if isinstance(schema, dict):
            yield match.end(), schema_end, schema
            end = schema_end


def longest_lexeme(spec: GrammarSpec) -> int:
    """A bound of the bytes of text without a choice within one lexeme of a grammar that was checked."""
    if spec.kind is GrammarKind.REGEX:
        return 0  # all of it is one
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return schema_len(json.loads(spec.text))
    outside, lengths, end = list[str](), [0], 0
    for schema_begin, schema_end, schema in _embedded(spec.text):
        outside.append(spec.text[end:schema_begin])
        lengths.append(schema_len(schema))
        end = schema_end
    return max(*lengths, lark_len("".join([*outside, spec.text[end:]])))


def _check_literals(text: str) -> None:
    """Refuses literals of Lark outside of JSON schemas that are too long."""
    for literal in _LITERAL.findall(text):
        if literal[0] == '"':
            _check_forced(literal[1:-1])
        elif literal[0] == "/" and literal[:2] != "//":  # no comment
            _check_pattern(literal)


def _check_pattern(pattern: str) -> None:
    """Refuses a regular expression with text in a row that is too long. What many parts together make so long is found
    by `Position`, and that of Lark's terminals has `max_items`."""
    num_bytes = regex_len(pattern)
    if MAX_LEXEME_BYTES < num_bytes < UNKNOWN_LEN:  # else llguidance will report the fault
        raise InvalidRequest(
            "grammar", f"a regular expression matches {num_bytes} bytes and more; permitted: {MAX_LEXEME_BYTES}"
        )
    for text in _REGEX_TEXT.findall(pattern):
        _check_forced(text.replace("\\", ""))  # which escape


def _check_forced(text: str) -> None:
    if refusal := forced_text_refusal(len(text.encode(errors="replace"))):
        raise InvalidRequest("grammar", refusal)


def _check_schema(schema: Any) -> int:
    """Checks a JSON schema; returns its number of properties."""
    if isinstance(schema, dict) and "x-guidance" in schema:
        # Its options could make llguidance ignore unknown keywords.
        raise InvalidRequest("grammar", "x-guidance in a JSON schema is not supported")
    num_patterns, num_properties, has_intersections, multiples = 0, 0, False, set()
    for node in _objects(schema):
        properties = node.get("properties")
        if isinstance(properties, dict):
            num_properties += len(properties)
            for name in properties:
                _check_forced(name)
        alternatives = node.get("enum")
        for value in (node.get("const"), *(alternatives if isinstance(alternatives, list) else ())):
            if isinstance(value, str):
                _check_forced(value)
        if isinstance(pattern := node.get("pattern"), str):
            _check_pattern(pattern)
        num_patterns += sum(isinstance(node.get(name), str) for name in _PATTERNS)
        # It may be the name of a property, with any value.
        by_pattern = node.get("patternProperties")
        num_patterns += len(by_pattern) if isinstance(by_pattern, dict) else 0
        all_of = node.get("allOf")
        has_intersections |= isinstance(all_of, list) and len(all_of) > 1
        has_intersections |= len(_APPLICATORS & node.keys()) > 1
        has_intersections |= bool(_APPLICATORS & node.keys()) and bool(_CONSTRAINTS & node.keys())
        multiple = node.get("multipleOf")
        is_number = isinstance(multiple, int | float) and not isinstance(multiple, bool)
        if is_number and multiple and str(multiple) not in ("nan", "inf", "-inf"):  # which Python's JSON has
            multiples.add(abs(Fraction(str(multiple))))
    _check_num_properties(num_properties)
    if has_intersections and num_patterns > MAX_INTERSECTED_PATTERNS:
        raise InvalidRequest(
            "grammar",
            f"the JSON schema combines schemas and has {num_patterns} patterns and formats; permitted: "
            f"{MAX_INTERSECTED_PATTERNS}",
        )
    scale = math.lcm(*(multiple.denominator for multiple in multiples))
    common = math.lcm(*(int(multiple * scale) for multiple in multiples))
    if common > MAX_COMMON_MULTIPLE:
        raise InvalidRequest(
            "grammar",
            f"the multipleOf of the JSON schema have {min(common, 10**300):.4g} as their common multiple, counted in "
            f"their last decimal; permitted: {MAX_COMMON_MULTIPLE}",
        )
    return num_properties


def _check_num_properties(num_properties: int) -> None:
    if num_properties > MAX_PROPERTIES:
        raise InvalidRequest("grammar", f"the JSON schema has {num_properties} properties; permitted: {MAX_PROPERTIES}")


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in a schema, the schema included."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += node.values()
        elif isinstance(node, list):
            pending += node
