"""How long the shortest texts of a grammar's lexemes may be. Pure.

llguidance reads forced text in one call, which keeps the interpreter's lock, and nothing but its number of items bounds
that: some 4,000 lexemes, each however long. `"start: A{4000}\\nA: B{20000}\\nB: /abc/"` is 240 MB. So the items of a
grammar with longer lexemes are fewer (`max_items`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

MAX_ITEMS: Final = 10_000  # of the parser for one mask: 90 ms for the most ambiguous grammar; 50,000 took 700
MIN_ITEMS: Final = 20
ITEM_BYTES: Final = 10 * 2**20  # of forced text, times 2.5 items for each lexeme: 4 MiB, 0.1 s and 100 MB
UNKNOWN_LEN: Final = 2**40
MAX_LEXEME_BYTES: Final = 50_000  # the lexer has a state for each: 50 ms and 50 MB
_VALUES: Final = frozenset({"const", "enum"})

# Atoms of a regular expression: escapes, classes, flags, groups, repetitions. Whatever it does not know counts as a
# byte, but for a brace: there may be a repetition behind it.
_REGEX_ATOM: Final = re.compile(
    r"(?P<close>\))|\(\?[a-zA-Z-]+\)|(?P<open>\((?:\?P?<\w+>|\?[a-zA-Z-]*:)?)|\{(?P<least>[\d\s]*)(?:,[\d\s]*)?\}"
    r"|(?P<unclear>\{)|(?P<either>\|)|[*+?^$]"
    r"|\\(?:[pPxuU]\{[^{}]*\}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8}|.)"
    r"|\[(?:\\.|\[[^\[\]]*\]|[^\[\]\\])*\]|.",
    re.DOTALL,
)
_VERBOSE: Final = re.compile(r"\(\?[a-zA-Z]*x")
# Of llguidance's Lark, split as it does that: comments, imports, special tokens and numbers are nothing.
_LARK_ATOM: Final = re.compile(
    r"(?:#|//)[^\n]*|%import(?P<imported>[^\n#/]*)|%[a-z]+\s*\{?|<[^<>\s]+>|\s+"
    r"|(?P<text>\"(?:\\.|[^\"\\\n])*+\"?)|/(?P<regex>(?:\\.|[^/\\])*+)/?(?P<flags>[imslux]*)"
    r"|(?P<name>_?[A-Z][A-Z0-9_-]*+|[!]?[_?]?[a-z][a-z0-9_-]*+)"
    r"(?P<defined>[ \t]*+(?:\.[ \t]*+[+-]?\d++)?[ \t]*+"
    r"(?:\[(?P<attributes>(?:\"(?:\\.|[^\"\\\n])*+\"|/(?:\\.|[^/\\\n])*+/|[^\[\]\"/])*+)\])?[ \t]*+:)?"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?:\{|~)[ \t]*+\+?(?P<least>\d+)|(?P<unclear>\{(?![ \t]*+,))"
    r"|\d[\w.]*+|(?P<either>\|)|.",
    re.DOTALL,
)


def max_items(lexeme_len: int) -> int:
    """Items for which the parser gives up, of a grammar whose longest lexeme has so many bytes."""
    return max(MIN_ITEMS, min(MAX_ITEMS, ITEM_BYTES // max(lexeme_len, 1)))


def regex_len(pattern: str, *, is_verbose: bool = False) -> int:
    """A bound of the bytes that a text must have which matches, whichever alternative it takes. UNKNOWN_LEN where
    that is not clear. is_verbose: blanks and comments do not count, as with the flag x."""

    def atom_len(atom: re.Match[str]) -> int:
        if atom[0][0] in "[*+?^$(":  # a class is one character
            return (1 if atom[0].isascii() and "\\" not in atom[0] else 4) if atom[0][0] == "[" else 0
        return len(atom[0].encode(errors="replace"))

    if "#" in pattern and (is_verbose or _VERBOSE.search(pattern)):
        return MAX_LEXEME_BYTES  # what stands in comments is not part of it, and where they are is not clear
    return _len_of(_REGEX_ATOM.finditer(pattern), atom_len)


def lark_len(text: str) -> int:
    """A bound of the bytes of the longest lexeme in a text of Lark, whichever alternatives are taken."""
    lexemes: dict[str, list[re.Match[str]]] = {}  # terminals, and rules with attributes, each of which is one, too
    imported = set[str]()
    known: dict[str, int] = {}
    rules: list[re.Match[str]] = []
    current = rules
    for atom in _LARK_ATOM.finditer(text):
        if atom["imported"]:
            imported.update(re.findall(r"[\w-]+", atom["imported"]))
        elif atom["defined"]:
            attributes = atom["attributes"]
            current = lexemes.setdefault(atom["name"], []) if atom["name"].isupper() or attributes else rules
            current += _LARK_ATOM.finditer(attributes or "")  # text that ends it belongs to it
        else:
            current.append(atom)

    def atom_len(atom: re.Match[str]) -> int:
        if atom["name"]:
            return lexeme_len(atom["name"]) if atom["name"].isupper() else 0
        if atom["regex"]:
            return regex_len(atom["regex"], is_verbose="x" in atom["flags"])
        return UNKNOWN_LEN if atom["unclear"] else len((atom["text"] or "").encode(errors="replace"))

    def lexeme_len(name: str) -> int:
        if name not in known:
            known[name] = 0  # as long as it is not known: one that is defined by itself is refused
            unknown_len = 0 if name in imported else UNKNOWN_LEN
            known[name] = _len_of(lexemes[name], atom_len) if name in lexemes else unknown_len
        return known[name]

    try:
        return max([0, *map(lexeme_len, lexemes), *map(atom_len, rules)])
    except RecursionError:
        return UNKNOWN_LEN


def schema_len(schema: Any) -> int:
    """A bound of the bytes of the longest lexeme of a JSON schema."""
    longest, least, has_pattern = 0, 0, False
    pending = [(schema, False)]  # with whether it is a value of the output
    while pending:
        node, is_value = pending.pop()
        if isinstance(node, dict):
            pending += [(each, is_value or name in _VALUES) for name, each in node.items()]
            longest = max([longest, *(len(name.encode(errors="replace")) for name in node)])
            for pattern in (node.get("pattern"), *_keys(node.get("patternProperties"))):
                if isinstance(pattern, str):
                    longest, has_pattern = max(longest, regex_len(pattern)), True
            if isinstance(node.get("minLength"), int | float):
                least = max(least, int(min(node["minLength"], UNKNOWN_LEN)))
        elif isinstance(node, list):
            pending += [(each, is_value) for each in node]
        elif isinstance(node, str) and is_value:
            longest = max(longest, len(node.encode(errors="replace")))
    return max(longest, least) if has_pattern else longest


def _keys(value: Any) -> Iterable[str]:
    return value if isinstance(value, dict) else ()


def _len_of(atoms: Iterable[re.Match[str]], len_of: Callable[[re.Match[str]], int]) -> int:
    """The sum over all atoms of the longest alternatives, each atom as often as it is repeated at least."""
    open_groups, last = [[0]], 0  # lengths of the alternatives of each
    for atom in atoms:
        if atom["open"]:
            open_groups.append([0])
            last = 0
        elif atom["close"]:
            last = max(open_groups.pop()) if len(open_groups) > 1 else 0
            open_groups[-1][-1] += last
        elif atom["unclear"]:
            return UNKNOWN_LEN
        elif atom["least"] is not None:
            digits = "".join(atom["least"].split()).lstrip("0")
            least = max(int(digits[:12] or 0), 1)
            open_groups[-1][-1] += last * (least - 1)
            last *= least
        elif atom["either"]:
            open_groups[-1].append(0)
            last = 0
        elif (own := len_of(atom)) > 0:
            open_groups[-1][-1] += own
            last = own
    return min(sum(map(max, open_groups)), UNKNOWN_LEN - 1)
