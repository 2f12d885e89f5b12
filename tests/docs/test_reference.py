"""The generated reference pages are what the code says today."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from coordinator.api.http.openapi import openapi_document
from docs.generate import grpc, parameters, settings
from docs.generate.__main__ import FOLDER, PAGES
from docs.generate.command_line import option_row
from docs.generate.meanings import DELIVERY, OUTPUT
from docs.generate.schemas import words
from tests.docs.pages import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_fresh(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m docs.generate`"


def test_every_reference_page_is_generated_or_the_output_of_a_command() -> None:
    others = {"models.md", "clients.md", "differences-from-vllm.md", "draft-heads.md"}
    assert {path.name for path in FOLDER.glob("*.md")} == PAGES.keys() | others


@pytest.mark.parametrize("package", settings.PROCESSES)
def test_every_flag_of_a_process_is_on_the_page(package: str) -> None:
    text = (FOLDER / "settings.md").read_text(encoding="utf-8")
    parser = settings.parser_of(package)
    assert isinstance(parser, argparse.ArgumentParser)
    flags = set(re.findall(r"--[a-z][a-z-]+", parser.format_usage())) - {"--help"}
    assert len(flags) > 20
    assert not {flag for flag in flags if f"`{flag}" not in text}


def test_every_variable_that_the_code_reads_is_on_the_page() -> None:
    read: set[str] = set()
    for package in ("outrider", "coordinator", "target_worker", "draft_worker", "command_line"):
        for path in (ROOT / package).rglob("*.py"):
            read |= set(re.findall(r"\bOUTRIDER_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    # Set by one process of ours for another.
    assert read - settings.ENVIRONMENT.keys() <= {"OUTRIDER_GRPC_LISTEN_HOST"}
    assert settings.ENVIRONMENT.keys() <= read


def test_every_parameter_has_a_meaning() -> None:
    named = [name for names in OUTPUT for name in names]
    assert sorted([*named, *DELIVERY]) == sorted(parameters.fields())


def test_every_path_and_object_of_the_http_api_is_on_the_page() -> None:
    text = (FOLDER / "http-api.md").read_text(encoding="utf-8")
    document = openapi_document()
    for path in document["paths"]:
        assert f"\n### {path}\n" in text
    for name in document["components"]["schemas"]:
        assert f"\n### {name}\n" in text


def test_every_message_and_field_of_the_protos_is_on_the_page() -> None:
    text = (FOLDER / "grpc-api.md").read_text(encoding="utf-8")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(grpc.PROTOS.glob("*.proto"))}
    assert sources.keys() == grpc.FILES.keys()
    for source in sources.values():
        for name in re.findall(r"^(?:message|enum|service) (\w+)", source, re.MULTILINE):
            assert re.search(rf"^### (Service )?{name}$", text, re.MULTILINE), name
        for name in re.findall(r"^ +(?:[\w.<>, ]+ )?(\w+) = \d+", source, re.MULTILINE):
            assert f"| `{name}` |" in text, name


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 32}, "integer, 0 to 32"),
        (
            {"anyOf": [{"type": "number", "exclusiveMinimum": 1e-45, "maximum": 1}, {"type": "null"}]},
            "number, above 0, at most 1",
        ),
        ({"enum": [0, 4, 5, 6, None]}, "0 or 4 to 6"),
        ({"enum": ["block", "token"]}, '`"block"` or `"token"`'),
        (
            {"type": "array", "maxItems": 16, "items": {"type": "string", "maxLength": 3}},
            "array, at most 16 items of string, at most 3 characters",
        ),
    ],
)
def test_bounds_are_put_into_words(schema: dict[str, object], expected: str) -> None:
    assert words(schema) == expected


def test_comments_of_a_proto_stay_with_their_fields() -> None:
    source = (
        "// A message.\nmessage M {\n  // Before.\n  uint32 a = 1;    // Beside,\n"
        "                   // and below.\n  repeated B b = 2 [packed = true];\n}\n"
    )
    (block,) = grpc.blocks(source)
    assert block.text == ["A message."]
    assert [(row.name, row.type, row.text) for row in block.rows] == [
        ("a", "uint32", ["Before.", "Beside,", "and below."]),
        ("b", "repeated B", []),
    ]


def test_no_page_names_this_machine() -> None:
    assert not [path.name for path in FOLDER.glob("*.md") if str(Path.cwd()) in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            ("--a", "Help.  [default: (none; 8 with --b); 0<=x<=3]"),
            ("`--a`", "Help. Default: none; 8 with --b; `0<=x<=3`"),
        ),
        (("-n, --num", "[default: 1; x>=1]"), ("`-n`, `--num`", "Default: `1`; `x>=1`")),
        (
            ("--key <str>", "Key.  [env var: OUTRIDER_API_KEY]"),
            ("`--key <str>`", "Key. Env var: `OUTRIDER_API_KEY`"),
        ),
        (("folder", "Model folder.  [required]"), ("`folder`", "Model folder. Required.")),
        (("--plain", "no brackets [here] at all"), ("`--plain`", "No brackets at all.")),
    ],
)
def test_defaults_and_bounds_are_told_from_the_help(record: tuple[str, str], expected: tuple[str, str]) -> None:
    assert option_row(*record) == expected
