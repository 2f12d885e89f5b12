"""The site builds without a warning, every page is reached, and every link and anchor leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.docs.pages import DOCS, OUTSIDE, ROOT, site_pages
from tests.k8s.alerts import headings

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed (pip install -e '.[docs]')",
)


class _Loader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, whose one Python name is of no interest here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def configuration() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    return found


def named_pages(nav: object) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    match nav:
        case str():
            yield nav
        case list():
            for each in nav:
                yield from named_pages(each)
        case dict():
            for each in nav.values():
                yield from named_pages(each)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml", "--site-dir", str(site)],
        cwd=source, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if value and (tag, name) in {("a", "href"), ("img", "src")}:
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    """Links of a built site that lead to no file, or to no anchor of it."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            ids = pages[target].ids if target in pages else None
            if not target.is_file() or (anchor and ids is not None and anchor not in ids | {"__tabbed_1_1"}):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def test_every_page_is_reached_from_the_navigation_and_once() -> None:
    named = list(named_pages(configuration()["nav"]))
    assert sorted(named) == [path.relative_to(DOCS).as_posix() for path in site_pages()]


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_of_the_pages_beside_the_site_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250


@needs_mkdocs
@pytest.mark.timeout(300)
class TestBuild:
    @pytest.mark.thorough
    def test_it_is_built_without_a_warning_and_no_link_is_dead(self, tmp_path: Path) -> None:
        done = build(ROOT, tmp_path / "site")
        assert done.returncode == 0, done.stdout + done.stderr
        built = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*")}
        assert "operations/runbooks/index.html" in built
        assert not {name for name in built if name.endswith(".py")}
        assert dead_links(tmp_path / "site") == []

    def test_mistakes_fail_the_build(self, tmp_path: Path) -> None:
        settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
        (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md]\n", encoding="utf-8")
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "alone.md").write_text("# Alone\n")
        (tmp_path / "docs" / "index.md").write_text("# Home\n\n[x](nowhere.md) [y](#nothing-of-the-kind)\n")
        done = build(tmp_path, tmp_path / "site")
        assert done.returncode != 0
        assert all(each in done.stderr for each in ("nowhere.md", "nothing-of-the-kind", "alone.md")), done.stderr


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="b.html#x"></a><a href="#y"></a><a href="c.html"></a><p id="y">')
    (tmp_path / "b.html").write_text('<p id="z">')
    assert dead_links(tmp_path) == ["index.html: b.html#x", "index.html: c.html"]
