"""Differences between two servers' answers to one request. Pure: what was asked and answered is data.

A difference has a short key, `request: path: kind`, which stays the same from run to run: indexes of lists, values and
times are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Fields whose value is another one at every server or in every run. Their presence and type are compared.
_VOLATILE: Final = {
    *("id", "created", "request_id", "system_fingerprint", "version", "owned_by", "root", "permission", "server_load")
}
# Messages are for people. Clients read the type, the code and the parameter.
_WORDS: Final = {"message"}
# Texts and what follows from them; compared only where both servers must generate the same.
_GENERATED: Final = {
    *("text", "content", "arguments", "token_ids", "tokens", "token", "bytes", "logprob", "token_logprobs"),
    *("top_logprobs", "text_offset", "finish_reason", "stop_reason", "completion_tokens", "total_tokens"),
    *("prompt_logprobs", "reasoning"),
}
_LOGPROB_TOLERANCE: Final = 2e-3


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: its status, headers that clients read, and a JSON value, events or text."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    events: tuple[Any, ...] | None = None


@dataclass(frozen=True, order=True)
class Difference:
    """A difference by its key, and both values in short form."""

    key: str
    ours: str = field(compare=False)
    theirs: str = field(compare=False)


def differences(name: str, ours: Answer, theirs: Answer, *, compares_text: bool = True) -> list[Difference]:
    """Every difference between the answers to the request of this name, each key once."""
    found: dict[str, Difference] = {}
    for path, kind, left, right in _compare(ours, theirs, compares_text):
        key = f"{name}: {path}: {kind}"
        found.setdefault(key, Difference(key, _short(left), _short(right)))
    return sorted(found.values())


_Found = tuple[str, str, Any, Any]


def _compare(ours: Answer, theirs: Answer, compares_text: bool) -> Iterator[_Found]:
    if ours.status != theirs.status:
        # Answers of another status have nothing else in common.
        yield "status", f"{ours.status} instead of {theirs.status}", ours.body, theirs.body
        return
    for name in sorted(ours.headers.keys() | theirs.headers.keys()):
        left, right = ours.headers.get(name), theirs.headers.get(name)
        if left != right:
            yield f"header {name}", _presence(left, right), left, right
    if (ours.events is None) != (theirs.events is None):
        yield "body", "streamed differently", ours.body, theirs.body
    elif ours.events is not None and theirs.events is not None:
        yield from _compare_events(ours.events, theirs.events, compares_text)
    else:
        yield from _compare_values("body", ours.body, theirs.body, compares_text)


def _presence(left: Any, right: Any) -> str:
    if left is None:
        return "missing"
    return "extra" if right is None else "differs"


def _compare_values(path: str, left: Any, right: Any, compares_text: bool) -> Iterator[_Found]:
    name = path.rpartition(".")[2].removesuffix("[]")
    if isinstance(left, dict) and isinstance(right, dict):
        for key in _keys(path, left, right, compares_text):
            inner = f"{path}.{key}"
            if key not in left:
                yield inner, "missing" if right[key] is not None else "missing null", None, right[key]
            elif key not in right:
                yield inner, "extra" if left[key] is not None else "extra null", left[key], None
            else:
                yield from _compare_values(inner, left[key], right[key], compares_text)
    elif isinstance(left, list) and isinstance(right, list):
        if not compares_text and name in _GENERATED:
            return
        if len(left) != len(right):
            yield f"{path}[]", "length", left, right
        for one, other in zip(left, right, strict=False):
            yield from _compare_values(f"{path}[]", one, other, compares_text)
    elif _type(left) != _type(right):
        if compares_text or name not in _GENERATED:
            yield path, f"{_type(left)} instead of {_type(right)}", left, right
    elif not _is_equal(left, right) and name not in _VOLATILE | _WORDS and (compares_text or name not in _GENERATED):
        yield path, "differs", left, right


def _keys(path: str, left: Mapping[str, Any], right: Mapping[str, Any], compares_text: bool) -> list[str]:
    """Keys to compare; keys of log probabilities are tokens, which are generated."""
    if not compares_text and "logprobs" in path.rpartition(".")[2]:
        return []
    return sorted(left.keys() | right.keys())


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) or isinstance(right, float):
        return bool(abs(left - right) <= _LOGPROB_TOLERANCE)
    return bool(left == right)


def _compare_events(ours: Iterable[Any], theirs: Iterable[Any], compares_text: bool) -> Iterator[_Found]:
    """How many tokens an event carries is a server's own affair; their order, fields and joined texts are not."""
    left, right = list(ours), list(theirs)
    for index in sorted(_indexes(left) | _indexes(right)):
        orders = [event_order(events, index) for events in (left, right)]
        if orders[0] != orders[1]:
            yield "events", "order", orders[0], orders[1]
    for kind in sorted(_kinds(left) & _kinds(right)):
        yield from _compare_fields(kind, left, right)
    for path, one, other in _joined(left, right):
        if one != other and compares_text:
            yield f"events.{path}", "differs", one, other


def event_order(events: Iterable[Any], index: int) -> list[str]:
    """Kinds of one choice's events and of those without a choice; neighbours of one kind count once."""
    order: list[str] = []
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        if choices and all(choice.get("index", 0) != index for choice in choices):
            continue
        kind = event_kind(event)
        if not order or order[-1] != kind:
            order.append(kind)
    return order


def event_kind(event: Any) -> str:
    """Names the parts that an event carries."""
    if not isinstance(event, dict):
        return str(event)
    if "error" in event:
        return "error"
    choices = event.get("choices") or []
    if not choices:
        return "usage" if event.get("usage") else "empty"
    choice = choices[0]
    delta = choice.get("delta", choice)
    names = ("role", "content", "text", "tool_calls", "reasoning")
    carried = [name for name in names if delta.get(name)]
    return " and ".join([*carried, *(["finish"] if choice.get("finish_reason") else [])]) or "nothing"


def _kinds(events: Iterable[Any]) -> set[str]:
    return {event_kind(event) for event in events if isinstance(event, dict)}


def _index(event: Any) -> int:
    """The index of the event's first choice."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return int(choices[0].get("index", 0)) if choices else 0


def _indexes(events: Iterable[Any]) -> set[int]:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices") or []]
    return {choice.get("index", 0) for choice in choices} or {0}


def _compare_fields(kind: str, left: list[Any], right: list[Any]) -> Iterator[_Found]:
    """Fields of the first event of a kind, of the first choice that has one: the order of choices is open."""
    one, other = (min((each for each in events if event_kind(each) == kind), key=_index) for events in (left, right))
    yield from _compare_values(f"event {kind}", one, other, compares_text=False)


def _joined(left: list[Any], right: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    one, other = joined(left), joined(right)
    for path in sorted(one.keys() | other.keys()):
        yield path, one.get(path), other.get(path)


def joined(events: Iterable[Any]) -> dict[str, Any]:
    """Joins the texts of all events of a stream, with the reasons to end and the last usage."""
    total: dict[str, Any] = {}
    for event in events:
        if not isinstance(event, dict):
            continue
        for choice in event.get("choices") or []:
            delta = choice.get("delta", choice)
            for name in ("text", "content"):
                if isinstance(delta.get(name), str):
                    key = f"choices[{choice.get('index', 0)}].{name}"
                    total[key] = total.get(key, "") + delta[name]
            if choice.get("finish_reason"):
                total[f"choices[{choice.get('index', 0)}].finish_reason"] = choice["finish_reason"]
        if event.get("usage"):
            usage = {name: value for name, value in event["usage"].items() if isinstance(value, int)}
            total["usage"] = usage
    return total


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
