"""The page of request parameters: bounds from the OpenAPI document, meanings and evidence from `meanings`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from coordinator.api.http.openapi import openapi_document
from coordinator.api.schema.unserved_parameters import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    SUCCESSORS,
    UNUSED_CHAT,
    UNUSED_COMPLETION,
)
from docs.generate.markdown import code, page, table
from docs.generate.meanings import DELIVERY, OUTPUT, TOGETHER
from docs.generate.schemas import Schema, words

_CALLS = {"CompletionBody": "completions", "ChatBody": "chat"}


def parameters_page() -> str:
    """The parameters of a request, in three tables."""
    return page(
        "Parameters",
        "A request to `/v1/completions` or `/v1/chat/completions` may have these fields. A field outside its bounds, "
        "or one that is not listed, is refused with status 400 and its name. What is accepted and not used is named in "
        "the response's header `x-outrider-ignored`. Over gRPC the same parameters are fields of "
        "[`SamplingParams`](grpc-api.md#samplingparams) and "
        "[`GenerationRequest`](grpc-api.md#generationrequest).",
        "## Parameters that decide the output\n\nMeaning and order of application are those of transformers' logits "
        "processors. Each applies at every position, with the hints before that position taken as generated, so all of "
        "them work with speculation. The last column names cases of `tests/exactness/test_every_parameter.py`, which "
        "runs each case in three decoding modes with four kinds of draft, or other tests.",
        table(["Parameter", "Permitted", "Meaning", "Shown by"], _output_rows()),
        f"All of these together: {TOGETHER}.",
        "## Parameters that decide how the answer is delivered",
        table(["Parameter", "Permitted", "Meaning"], _delivery_rows()),
        "## Parameters of other servers that are not served\n\nEach is accepted at the values that change nothing and "
        "refused at any other.",
        table(["Parameter", "Accepted values", "Call"], _unserved_rows()),
        "## Parameters that are ignored\n\nThey are about accounts, storage, caches and prices, or make an answer "
        "faster, and cannot change it. Any value is accepted. In messages and tools, fields that are not known are "
        "ignored as well, since clients send back what other servers gave them.",
        table(["Parameter", "Call"], _unused_rows()),
        "## Names of the past\n\nThese names are refused; the error says what replaced them.",
        table(["Name", "Use instead"], ((code(old), code(new)) for old, new in SUCCESSORS.items())),
    )


def fields() -> dict[str, tuple[Schema, list[str]]]:
    """Every served field of the two bodies: its schema and the calls that have it."""
    schemas = openapi_document()["components"]["schemas"]
    unserved = {
        "CompletionBody": {*NEUTRAL_COMPLETION, *UNUSED_COMPLETION},
        "ChatBody": {*NEUTRAL_CHAT, *UNUSED_CHAT},
    }
    found: dict[str, tuple[Schema, list[str]]] = {}
    for body, call in _CALLS.items():
        for name, schema in schemas[body]["properties"].items():
            if name not in unserved[body]:
                found.setdefault(name, (schema, []))[1].append(call)
    return found


def _permitted(name: str) -> str:
    schema, calls = fields()[name]
    text = words(schema)
    if isinstance(schema.get("default"), bool | str) and schema["default"] != "":
        text += f"; default {code(json.dumps(schema['default']))}"
    return text if len(calls) == 2 else f"{text}; {calls[0]} only"


def _output_rows() -> Iterator[tuple[str, str, str, str]]:
    for names, (meaning, evidence) in OUTPUT.items():
        permitted = "; ".join(dict.fromkeys(_permitted(name) for name in names))
        yield code(*names), permitted, meaning, evidence


def _delivery_rows() -> Iterator[tuple[str, str, str]]:
    for name, meaning in DELIVERY.items():
        yield code(name), _permitted(name), meaning


def _unserved_rows() -> Iterator[tuple[str, str, str]]:
    for call, neutral in (("completions", NEUTRAL_COMPLETION), ("chat", NEUTRAL_CHAT)):
        for name, values in neutral.items():
            accepted = [json.dumps(value) for value in values] or ["null"]
            yield code(name), code(*accepted), call


def _unused_rows() -> Iterator[tuple[str, str]]:
    for name in UNUSED_CHAT:
        yield code(name), "both" if name in UNUSED_COMPLETION else "chat"
