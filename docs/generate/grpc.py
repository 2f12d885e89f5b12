"""The page of the gRPC API, read from the comments of the `.proto` files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from docs.generate.markdown import code, literal, page, sentence, table

PROTOS: Final = Path(__file__).resolve().parents[2] / "protos" / "outrider" / "v1"
FILES: Final = {
    "generation": ("Generation", "Clients call this service at a coordinator's gRPC port."),
    "target": ("Target", "Coordinators call this service at a target worker."),
    "draft": ("Draft", "Coordinators call this service at a draft worker."),
    "hints": ("Hints", "Draft workers call this service at a target worker."),
    "common": ("Common messages", "More than one service uses these messages."),
}
_OPENING: Final = re.compile(r"^(service|message|enum) (\w+) \{(\})?$")
_FIELD: Final = re.compile(
    r"^ +(?P<type>(?:repeated |optional )?(?:map<[^>]+>|[\w.]+) )?(?P<name>\w+) = (?P<number>\d+)[^;]*;"
    r"\s*(?:// ?(?P<text>.*))?$"
)
_RPC: Final = re.compile(r"^ +rpc (\w+)\((.+?)\) returns \((.+?)\);$")


@dataclass
class Row:
    """One field, value or call, with the words of its comment."""

    name: str
    type: str
    number: str
    text: list[str]


@dataclass
class Block:
    """A service, a message or an enumeration."""

    kind: str
    name: str
    text: list[str]
    rows: list[Row] = field(default_factory=list)


def grpc_page() -> str:
    """All services and messages of the package `outrider.v1`."""
    return page(
        "gRPC API",
        "The package is `outrider.v1`; its sources are in `protos/outrider/v1/`. Only the service `Generation` is for "
        "clients. Fields are only ever added, so processes of neighbouring versions understand each other. A field "
        "that is `optional` has the default that its meaning names where it is unset; another unset field is 0, empty "
        "or false. A coordinator's port also serves [health](../operations/observability.md#health) and "
        "[reflection](../guides/clients.md#grpc).",
        *(_file(name, *words) for name, words in FILES.items()),
    )


def blocks(text: str) -> Iterator[Block]:
    """The top-level blocks of a `.proto` file with the comments before and beside their rows."""
    before: list[str] = []
    block: Block | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if opening := _OPENING.match(line):
            block = Block(opening[1], opening[2], before)
            before = []
            if opening[3]:
                yield block
                block = None
        elif block is not None and line == "}":
            yield block
            block, before = None, []
        elif stripped.startswith("//"):
            words = stripped.removeprefix("//").strip()
            is_continued = block is not None and block.rows and len(line) - len(line.lstrip()) > 8
            (block.rows[-1].text if block is not None and is_continued else before).append(words)
        elif block is not None and (call := _RPC.match(line)):
            block.rows.append(Row(call[1], f"{call[2]} → {call[3]}", "", before))
            before = []
        elif block is not None and (found := _FIELD.match(line)):
            own = [found["text"]] if found["text"] else []
            block.rows.append(Row(found["name"], (found["type"] or "").strip(), found["number"], [*before, *own]))
            before = []
        elif not stripped:
            before = []


def _file(name: str, title: str, introduction: str) -> str:
    source = (PROTOS / f"{name}.proto").read_text(encoding="utf-8")
    return "\n\n".join([f"## {title}", introduction, *(_block(each) for each in blocks(source))])


def _block(block: Block) -> str:
    parts = [f"### {block.name}", sentence(literal(" ".join(block.text)))]
    if block.kind == "service":
        parts = [f"### Service {block.name}", *parts[1:]]
        rows = [(code(row.name), code(row.type), _words(row)) for row in block.rows]
        parts.append(table(["Call", "Request → response", "Meaning"], rows))
    elif block.kind == "enum":
        parts.append(table(["Value", "Meaning"], [(code(row.name), _words(row)) for row in block.rows]))
    else:
        fields = [(code(row.name), code(row.type), row.number, _words(row)) for row in block.rows]
        parts.append(table(["Field", "Type", "Number", "Meaning"], fields))
    return "\n\n".join(filter(None, parts))


def _words(row: Row) -> str:
    return sentence(literal(" ".join(row.text)))
