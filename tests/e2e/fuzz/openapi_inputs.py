"""Requests that schemathesis makes from the published OpenAPI document: such as keep to it, and such as do not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import schemathesis
from schemathesis import GenerationMode
from urllib3.filepost import encode_multipart_formdata

from tests.e2e.fuzz.http_inputs import own_deadline, request
from tests.e2e.fuzz.inputs import HttpInput, drawn

MAX_TOKENS = 8


def from_document(document: dict[str, Any], mode: GenerationMode, count: int, seed: int) -> list[HttpInput]:
    """For every operation, those with a body far more often."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [
        (method, path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method != "parameters" and (mode is GenerationMode.POSITIVE or "requestBody" in operation)
    ]
    weights = {operation: 8 if operation[0] == "post" else 1 for operation in operations}
    total, before, found = sum(weights.values()), 0, list[HttpInput]()
    for number, (method, path) in enumerate(operations):
        after = before + weights[method, path]
        share, before = max(round(count * after / total) - round(count * before / total), 1), after
        described = schema[path][method.upper()]
        found += [_input(case, mode) for case in drawn(described.as_strategy(mode), share, seed * 100 + number)]
    return found[:count]


def _input(case: Any, mode: GenerationMode) -> HttpInput:
    made = _as_bytes(case.as_transport_kwargs("http://coordinator"))
    path = made["url"].removeprefix("http://coordinator") or "/"
    if query := made.get("params"):
        path += "?" + "&".join(f"{name}={value}" for name, value in query.items())
    body = _body(made, mode)
    text = "" if body is None else body.decode("utf-8", "replace")
    headers = tuple(
        (str(name), str(value))
        for name, value in (made.get("headers") or {}).items()
        if name.lower()
        not in (
            "x-schemathesis-testcaseid",
            "authorization",
            "content-length",
            "connection",
            "host",
            "user-agent",
            "accept-encoding",
        )
    )
    is_plain = all(name.isascii() and value.isprintable() and value.isascii() for name, value in headers)
    way = "as documented" if mode is GenerationMode.POSITIVE else "not as documented"
    return HttpInput(
        kind=f"HTTP: {way} (schemathesis)",
        what=f"{made['method']} {path[:60]}: {text[:160]}",
        raw=request(made["method"], "".join(path.split()), body, headers),
        allows=own_deadline(text.replace(" ", "")),
        may_hang_up=not is_plain or not path.isascii(),
    )


def _as_bytes(made: dict[str, Any]) -> dict[str, Any]:
    """With a form of several parts written out."""
    if not made.get("files"):
        return made
    parts = [
        (name, (filename, value if isinstance(value, str | bytes) else json.dumps(value)))
        for name, (filename, value) in made["files"]
    ]
    # The boundary is drawn from the content, not at random: the same seed gives the same bytes.
    boundary = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    form, content_type = encode_multipart_formdata(parts, boundary)
    return {**made, "data": form, "headers": {**(made.get("headers") or {}), "Content-Type": content_type}}


def _body(made: dict[str, Any], mode: GenerationMode) -> bytes | None:
    if "json" in made:
        body = made["json"]
        if mode is GenerationMode.POSITIVE and isinstance(body, dict) and ("prompt" in body or "messages" in body):
            body = _bounded(body)
        return json.dumps(body).encode()
    data = made.get("data")
    return data.encode() if isinstance(data, str) else data


def _bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Without an answer of thousands of tokens: ten thousand requests are to be answered."""
    return {
        name: min(value, MAX_TOKENS)
        if name in ("max_tokens", "max_completion_tokens") and isinstance(value, int)
        else value
        for name, value in body.items()
    }
