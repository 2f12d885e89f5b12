"""Arguments as Qwen3-Coder writes them: an element for each, with a string as it is or any other value as JSON. Pure.

The arguments {"city": "Rome", "days": 2} are

    <parameter=city>
    Rome
    </parameter>
    <parameter=days>
    2
    </parameter>

They come in the order of the schema's properties, as in JSON. What a schema says of a string besides its `enum` and
`const`, and of the object besides `properties` and `required`, is not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from coordinator.formats.lark import LarkWriter, without_possible_mark

OPENING: Final = "<parameter="
_AFTER_NAME: Final = ">\n"
_CLOSING: Final = "\n</parameter>\n"
_DEFINITIONS: Final = ("$defs", "definitions")


def write_xml_arguments(lark: LarkWriter, name: str, parameters: Mapping[str, Any] | None) -> str:
    """Adds the rule of a function's arguments; returns its name."""
    schema = parameters or {}
    required = schema.get("required") or ()
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    parts = []
    for index, (key, value) in enumerate(_properties(parameters).items()):
        header = lark.literal(OPENING + key + _AFTER_NAME)
        choices = _choices(value)
        if not _is_string(value):
            body = f"{lark.rule(f'{name}_{index}', f'%json {json.dumps({**definitions, **value})}')}"
            body += f" {lark.literal(_CLOSING)}"
        elif choices is not None:
            body = f"({' | '.join(lark.literal(choice + _CLOSING) for choice in choices)})"
        else:
            body = lark.until(f"{name}_{index}", lark.text(f"{name}_{index}_text"), _CLOSING)
        parts.append(f"({header} {body})" + ("" if key in required else "?"))
    return lark.rule(name, " ".join(parts))


class XmlArguments:
    """Reads the arguments of one call in pieces, and writes them as JSON."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self._headers = {
            OPENING + key + _AFTER_NAME: (key, _is_string(value)) for key, value in _properties(parameters).items()
        }
        self._held = ""
        self._num_read = 0
        self._is_in_value = False
        self._is_in_string = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the JSON that the text completes, and the text behind the arguments; None while they may go on."""
        self._held += text
        written: list[str] = []
        while True:
            if self._is_in_value:
                if not self._read_value(written):
                    return "".join(written), None
                continue
            header = next((each for each in self._headers if self._held.startswith(each)), None)
            if header is None:
                break
            key, self._is_in_string = self._headers[header]
            self._held = self._held.removeprefix(header)
            written.append(f"{', ' if self._num_read else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            written.append('"' if self._is_in_string else "")
            self._num_read += 1
            self._is_in_value = True
        if any(header.startswith(self._held) for header in (*self._headers, OPENING)):
            return "".join(written), None
        rest, self._held = self._held, ""
        return "".join([*written, "}" if self._num_read else "{}"]), rest

    def _read_value(self, written: list[str]) -> bool:
        """Reads the held text as far as it is unambiguous. True at the end of the value."""
        end = self._held.find(_CLOSING)
        shown = self._held[:end] if end >= 0 else without_possible_mark(self._held, _CLOSING)
        written.append(json.dumps(shown, ensure_ascii=False)[1:-1] if self._is_in_string else shown)
        self._held = self._held[len(shown) :]
        if end < 0:
            return False
        self._held = self._held.removeprefix(_CLOSING)
        written.append('"' if self._is_in_string else "")
        self._is_in_value = False
        return True


def _properties(parameters: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    properties = (parameters or {}).get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {key: value if isinstance(value, dict) else {} for key, value in known.items()}


def _is_string(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The strings of a schema that lists them."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else None
