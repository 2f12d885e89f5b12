"""Follows references within a JSON schema. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

_STEPS_MAX: Final = 16
_INDEX_DIGITS_MAX: Final = 9


class References:
    """The references within one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}  # by reference: many may pass the same long one

    def resolved(self, schema: Any) -> Any | None:
        """Returns the schema that a schema's references lead to, itself if it has none.

        None if one leads nowhere, to another document, or in a circle.
        """
        for _ in range(_STEPS_MAX):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"])
        return None

    def target(self, reference: Any) -> Any | None:
        """Returns the schema that a reference leads to, which may have one itself; None if it leads to none here."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._found(reference)
        return self._targets[reference]

    def _found(self, reference: str) -> Any | None:
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchored.get(pointer)
        node = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and _is_index(key) and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node if isinstance(node, Mapping | bool) else None

    @cached_property
    def _anchored(self) -> dict[str, Mapping[str, Any]]:
        """The schemas with an `$anchor`, by it."""
        nodes = ((node.get("$anchor"), node) for node in _objects(self._root))
        return {anchor: node for anchor, node in nodes if isinstance(anchor, str)}


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) <= _INDEX_DIGITS_MAX


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            yield node
            pending += node.values()
        elif isinstance(node, list):
            pending += node
