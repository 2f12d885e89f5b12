"""Docstrings and messages use standard words: each docstring opens with a sentence, and private terms stay out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FOLDERS = (
    "benchmarks", "command_line", "coordinator", "demo", "docs", "draft_worker", "k8s", "outrider", "protos",
    "target_worker",
)  # fmt: skip
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")

BAD_OPENING = re.compile(r"(?:Of|At|What|Who|Whose|Where|Likewise)\b")
# Private terms that users must not meet in `--help`, errors, logs and documents. The field's word follows each.
PRIVATE_WORDS = {
    r"\bcompany\b": "batch composition",
    r"\bcut texts?\b": "tokenize",
    r"\bcut between\b": "shard over",
    r"\b(?:speaks?|spoken|speaking)\b": "generate",
    r"\b(?:made|makes?) no sense\b": "invalid",
    r"\btold (?:not )?to\b": "requested, disabled",
    r"\bhints? (?:that |which )?(?:hold|held)\b": "accepted hints",
    r"\blisten(?:s|ed|ing)? to (?:hints?|draft|target)|\bdo not listen\b": "accept hints",
    r"\bfor a place\b": "for a slot",
    r"\ba (?:hundredth|tenth|fifth|third)\b(?! (?:party|time))": "a percentage",
    r"\bpatience\b": "timeout, retry policy",
}
LOG_METHODS = {"debug", "info", "warning", "error", "critical", "exception"}


def sources(folder: str) -> Iterator[Path]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            yield path


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that stand alone as statements: docstrings, and descriptions below constants and fields."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value


def messages(tree: ast.AST) -> Iterator[ast.Constant]:
    """String constants of exceptions that are raised, of log calls and of `help` arguments."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            found = [node.exc]
        elif isinstance(node, ast.Call):
            found = [each.value for each in node.keywords if each.arg in ("help", "description", "epilog")]
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
                found += node.args
        for each in (inner for root in found for inner in ast.walk(root)):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each


def private_words(text: str) -> list[str]:
    """Descriptions of the private terms in a text; empty where there are none."""
    found = ((re.search(pattern, text, re.IGNORECASE), word) for pattern, word in PRIVATE_WORDS.items())
    return [f"{match[0]!r} ({word})" for match, word in found if match is not None]


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_docstrings_open_with_a_sentence(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{each.lineno}: {str(each.value).strip().splitlines()[0]}"
        for path in sources(folder)
        for each in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if BAD_OPENING.match(str(each.value).strip())
    ]
    assert not wrong


@pytest.mark.parametrize("folder", [*FOLDERS, *PAGES])
def test_messages_use_the_words_of_the_field(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{each.lineno}: {', '.join(words)}"
        for path in sources(folder)
        for each in messages(ast.parse(path.read_text(encoding="utf-8")))
        if (words := private_words(str(each.value)))
    ]
    pages = [ROOT / folder] if folder.endswith(".md") else sorted((ROOT / folder).rglob("*.md"))
    for page in pages:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            wrong += [f"{page.relative_to(ROOT)}:{number}: {each}" for each in private_words(line)]
    assert not wrong


def test_every_folder_of_the_product_is_checked() -> None:
    """A folder that is added later is checked as well."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(FOLDERS)


@pytest.mark.parametrize(
    ("source", "num_openings", "num_messages"),
    [
        ('"""Of one session."""', 1, 0),
        ('"""Offers blocks to others."""', 0, 0),
        ('x = 1\n"""What bounds it."""', 1, 0),
        ('raise ValueError(f"{x} texts change with their company")', 0, 1),
        ('log.info("draft and target must cut texts alike")', 0, 1),
        ('parser.add_argument("--x", help="about a fifth of them")', 0, 1),
        ('parser.add_argument("--x", help="third-party hints are accepted")', 0, 0),
    ],
)
def test_the_words_are_found(source: str, num_openings: int, num_messages: int) -> None:
    tree = ast.parse(source)
    assert sum(bool(BAD_OPENING.match(str(each.value))) for each in docstrings(tree)) == num_openings
    assert sum(bool(private_words(str(each.value))) for each in messages(tree)) == num_messages
