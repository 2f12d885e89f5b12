"""The pages of the documentation as tests read them. Pure but for reading files."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
OUTSIDE: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "k8s/README.md")
"""Pages that are read in the repository and are no part of the site."""

_FENCE: Final = re.compile(
    r"(?:^ *<!-- (?P<marker>(?:not )?run: .*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<content>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block, and what the comment right before it says of who runs it."""

    language: str
    content: str
    marker: str


def site_pages() -> list[Path]:
    """The pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def all_pages() -> list[Path]:
    """The pages of the site and those beside it."""
    return [*(ROOT / name for name in OUTSIDE), *site_pages()]


def read(name: str) -> str:
    """A page by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def everything() -> str:
    """All pages, one after the other."""
    return "\n".join(page.read_text(encoding="utf-8") for page in all_pages())


def fences(markdown: str) -> list[Fence]:
    """The fenced blocks of a page, also those inside lists."""
    return [
        Fence(found["language"], textwrap.dedent(found["content"]), found["marker"] or "")
        for found in _FENCE.finditer(markdown)
    ]


def section(name: str, title: str) -> str:
    """The text below a heading of the second level of a page."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", read(name), re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no section {title!r}"
    return found[1]


def blocks(name: str, title: str) -> list[tuple[str, str]]:
    """Fenced blocks of a section: language and content."""
    return [(fence.language, fence.content) for fence in fences(section(name, title))]


def code(markdown: str) -> list[str]:
    """Fenced blocks and inline code."""
    inline = re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return [fence.content for fence in fences(markdown)] + re.findall(r"`([^`\n]+)`", inline)
