"""The form of one kind of request that both servers are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MODEL: Final = "target"
"""Served name of the model at both servers."""
PROMPT: Final = "Once upon a time there was a little"
MESSAGES: Final = [{"role": "user", "content": "Tell me a story about a dog."}]


@dataclass(frozen=True)
class Kind:
    """A request as it goes over the wire, named for the keys of its differences."""

    name: str
    path: str
    body: bytes | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = "HTTP/1.1"
    compares_text: bool = True


def json_kind(name: str, path: str, body: Any, *, compares_text: bool = True, **headers: str) -> Kind:
    """A POST of this JSON."""
    content = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
    return Kind(name, path, json.dumps(body).encode(), headers=content, compares_text=compares_text)


def completion(name: str, *, compares_text: bool = True, **fields: Any) -> Kind:
    """A greedy completion of eight tokens with these fields; OMITTED leaves a field out."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | fields
    return json_kind(f"completion/{name}", "/v1/completions", _given(body), compares_text=compares_text)


def chat(name: str, *, compares_text: bool = True, **fields: Any) -> Kind:
    """A greedy chat answer of eight tokens with these fields; OMITTED leaves a field out."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0} | fields
    return json_kind(f"chat/{name}", "/v1/chat/completions", _given(body), compares_text=compares_text)


OMITTED: Final = object()
"""Value of a field that a request leaves out."""


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not OMITTED}
