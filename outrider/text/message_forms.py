"""The forms in which chat templates expect messages. Pure.

OpenAI's format leaves three things open. Templates expect the arguments of a call as an object or as JSON text; a
content of parts as these parts or as text; and a content of null left out, as an empty text, or as null. transformers
hands on what it is given, except that it leaves out null. So what a template takes is found out by rendering: once for
each template with small conversations (`find_traits`), and for a conversation by taking the first form that does not
fail. The first form is the one that transformers documents.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

PARTS_SEPARATOR: Final = "\n"  # as vLLM joins them

SHORT_ID_LEN: Final = 9
"""Characters of a call's id in Mistral's templates."""

_Message = Mapping[str, Any]
_LONG_ID, _SHORT_ID = "call_" + "0a" * 16, "0a1b2c3d4"
_ARGUMENTS: Final = {"probekey": "probevalue"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probename",
        "description": "A function.",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "A text."}}},
    },
}
_CALLED: Final = "probecalled"
_WORDS: Final = ("probefirst", "probesecond")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Says what a chat template expects of messages."""

    takes_argument_text: bool = False  # of calls: JSON, rather than the object that it stands for
    takes_parts: bool = False  # of a content of several parts: these parts, rather than their text
    takes_only_parts: bool = False  # it does not show a content that is a text
    takes_only_short_call_ids: bool = False
    needs_null_beside_calls: bool = False  # it shows calls only where the content is null


class Render(Protocol):
    """Renders a conversation; None if the template fails or refuses."""

    def __call__(self, messages: Sequence[_Message], **variables: Any) -> str | None: ...


def find_traits(render: Render) -> TemplateTraits:
    """Finds what a template expects, by rendering small conversations. What it refuses in any form counts as not
    known."""
    parts = [{"type": "text", "text": word} for word in _WORDS]
    of_parts = render([{"role": "user", "content": parts}]) or ""
    of_text = render([{"role": "user", "content": _WORDS[0]}])
    # A template for text alone writes the list as Python or JSON would.
    takes_parts = all(word in of_parts and f"text': '{word}" not in of_parts for word in _WORDS) and (
        f'"text": "{_WORDS[0]}' not in of_parts
    )
    takes_text, takes_short, takes_long = False, False, False
    needs_null = False
    for call_id in (_LONG_ID, _SHORT_ID):
        of_object = render(_tool_turn(call_id, _ARGUMENTS), tools=[_TOOL])
        as_json = json.dumps(_ARGUMENTS)
        of_json = render(_tool_turn(call_id, as_json), tools=[_TOOL])
        if of_object is None and of_json is None:
            continue
        needs_null = not any(_CALLED in (text or "") for text in (of_object, of_json)) and any(
            _CALLED in (render(_tool_turn(call_id, given, None), tools=[_TOOL]) or "")
            for given in (_ARGUMENTS, as_json)
        )
        takes_long, takes_short = takes_long or call_id == _LONG_ID, True
        takes_text = as_json in (of_json or "") and (of_object is None or str(_ARGUMENTS) in of_object)
    return TemplateTraits(
        takes_argument_text=takes_text,
        takes_parts=takes_parts,
        takes_only_parts=takes_parts and of_text is not None and _WORDS[0] not in of_text,
        takes_only_short_call_ids=takes_short and not takes_long,
        needs_null_beside_calls=needs_null,
    )


def _tool_turn(call_id: str, arguments: Any, content: str | None = "") -> list[_Message]:
    """A conversation in which a function was called and has answered."""
    call = {"id": call_id, "type": "function", "function": {"name": _CALLED, "arguments": arguments}}
    return [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "Done."},
    ]


def forms_of(messages: Sequence[_Message], traits: TemplateTraits) -> Iterator[list[_Message]]:
    """Yields the forms of a conversation, the likeliest first: at most six, and one if nothing of it is open.

    A message has `content` (text, parts or None) and perhaps `tool_calls`, with `arguments` as JSON or as an object.
    """
    preferred = traits.takes_argument_text
    has_calls = any(message.get("tool_calls") for message in messages)
    has_null = any(message.get("content") is None for message in messages)
    nulls: list[Mapping[str, Any]] = [{}, {"content": ""}, {"content": None}]
    if traits.needs_null_beside_calls:
        nulls[1:] = nulls[:0:-1]
    for null, as_text in itertools.product(
        nulls if has_null else nulls[:1], [preferred, not preferred] if has_calls else [preferred]
    ):
        yield [_formed(message, traits, null, as_text=as_text) for message in messages]


def _formed(message: _Message, traits: TemplateTraits, null: Mapping[str, Any], *, as_text: bool) -> _Message:
    formed = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if content is None:
        formed |= null
        content = null.get("content")
    if isinstance(content, str):
        if traits.takes_only_parts:
            formed["content"] = [{"type": "text", "text": content}]
    elif content is not None and not traits.takes_parts:
        formed["content"] = text_of(content)
    if calls := message.get("tool_calls"):
        formed["tool_calls"] = [_formed_call(call, as_text=as_text) for call in calls]
    return formed


def _formed_call(call: Mapping[str, Any], *, as_text: bool) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what a model may have written instead of JSON stays as it is
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return PARTS_SEPARATOR.join(str(part["text"]) for part in content)
