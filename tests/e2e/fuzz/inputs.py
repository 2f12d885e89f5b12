"""Inputs of the fuzzer: bytes over a wire, recorded so that they can be sent again. Pure.

`{KEY}`, `{OTHER_KEY}` and `{RUN}` in them stand for values that a run of the system makes up: the keys of two tenants,
and a word that no run shares with another, so that ids do not match those of an earlier run.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from hypothesis.strategies import SearchStrategy

ROUNDS_MAX = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input that is invalid, or nearly so, and that no well-behaved client would send."""

    transport: ClassVar[str]

    kind: str  # a row of the table
    what: str  # what is odd about it
    allows: tuple[str, ...] = ()  # answers that are right here and nowhere else, "504" or "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpInput(Input):
    """A request as it goes over a connection of its own, head and all."""

    transport = "http"

    raw: bytes
    may_hang_up: bool = False  # it is no request, so that a server may end the connection instead of answering
    ends: bool = False  # nothing follows: the client waits a moment for an answer, and leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcInput(Input):
    """A call as it goes over HTTP/2, frames and all."""

    transport = "grpc"

    to: str = "coordinator"  # or target-0, draft-0, their health ports as target-0/health
    headers: tuple[tuple[bytes, bytes], ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInput(Input):
    """A stream that is cut after so many events, and what its client sends when it comes back."""

    transport = "stream"

    body: str  # JSON of a completion, without what makes it a stream
    cut_after: int
    mutation: str  # by name: see `tests.e2e.fuzz.stream_inputs`
    chance: int  # what the mutation draws from


KINDS: dict[str, type[Input]] = {each.transport: each for each in (HttpInput, GrpcInput, StreamInput)}


def to_json(each: Input) -> dict[str, Any]:
    """As `from_json` reads it."""
    fields = {field.name: _written(getattr(each, field.name)) for field in dataclasses.fields(each)}
    return {"transport": each.transport, **fields}


def from_json(content: Mapping[str, Any]) -> Input:
    """Raises ValueError for what is no input."""
    kind = KINDS.get(content.get("transport", ""))
    if kind is None:
        raise ValueError(f"an input has one of the transports {', '.join(KINDS)}")
    given = {name: _read(value) for name, value in content.items() if name != "transport"}
    if unknown := given.keys() - {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"unknown fields of a {kind.transport} input: {', '.join(sorted(unknown))}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _written(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return [_written(each) for each in value] if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return base64.b64decode(value["base64"], validate=True)
    return tuple(map(_read, value)) if isinstance(value, list) else value


def drawn(strategy: SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """So many examples, the same for the same seed and the same version of hypothesis."""
    found: list[Any] = []
    for round_ in range(ROUNDS_MAX):
        missing = count - len(found)
        if missing <= 0:
            return found

        @with_seed(seed * ROUNDS_MAX + round_)
        @settings(
            max_examples=missing,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def take(example: Any) -> None:
            found.append(example)

        take()
    if not found:
        raise ValueError(f"{strategy} has no examples")
    return [found[index % len(found)] for index in range(count)]
