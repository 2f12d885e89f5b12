"""The page of the HTTP API, made from the OpenAPI document that a coordinator serves."""

from __future__ import annotations

import json
from typing import Any, Final

from coordinator.api.http.openapi import openapi_document
from docs.generate.markdown import code, literal, page, sentence, table
from docs.generate.schemas import Schema, words

_BODIES_ELSEWHERE: Final = ("CompletionBody", "ChatBody")


def http_page() -> str:
    """All paths, and every object of a request or an answer."""
    document = openapi_document()
    paths = document["paths"]
    overview = table(
        ["Path", "Method", "Meaning"],
        (
            (f"[`{path}`](#{anchor(path)})", method.upper(), sentence(operation["summary"]))
            for path, methods in paths.items()
            for method, operation in _operations(methods)
        ),
    )
    return page(
        "HTTP API",
        sentence(document["info"]["description"])
        + " A running coordinator serves the machine-readable form of this page at `/openapi.json`.",
        f"## Paths\n\n{overview}",
        *(_path(path, methods) for path, methods in paths.items()),
        "## Objects\n\nFields that are not listed are refused with status 400 and their name.",
        *(_schema(name, schema) for name, schema in document["components"]["schemas"].items()),
    )


def anchor(path: str) -> str:
    """The anchor of a path's heading, as Python-Markdown makes it."""
    kept = "".join(letter for letter in path.lower() if letter.isalnum() or letter in "_- ")
    return kept.strip()


def _operations(methods: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(method, operation) for method, operation in methods.items() if method in ("get", "post", "delete")]


def _path(path: str, methods: dict[str, Any]) -> str:
    parts = [f"### {path}"]
    for method, operation in _operations(methods):
        parts.append(f"`{method.upper()}`: {sentence(operation['summary'])}")
        if body := operation.get("requestBody"):
            (content,) = body["content"].values()
            parts.append(f"Body: {words(content['schema'])}.")
        given = [*operation["parameters"], *methods.get("parameters", [])]
        rows = (
            (code(each["name"]), each["in"], sentence(literal(each.get("description", "The model's name"))))
            for each in given
        )
        parts.append(table(["Parameter", "In", "Meaning"], rows))
        answers = sorted(operation["responses"].items())
        parts.append(table(["Status", "Answer", "Meaning"], (_response(*each) for each in answers)))
    return "\n\n".join(filter(None, parts))


def _response(status: str, response: Schema) -> tuple[str, str, str]:
    kinds = [
        words(content["schema"]) if "$ref" in content["schema"] else code(media_type)
        for media_type, content in response.get("content", {}).items()
    ]
    headers = [code(name) for name in response.get("headers", {})]
    told = f" Headers: {', '.join(headers)}." if headers else ""
    return status, ", ".join(kinds), sentence(literal(response["description"])) + told


def _schema(name: str, schema: Schema) -> str:
    parts = [f"### {name}", sentence(literal(schema.get("description", "")))]
    if name in _BODIES_ELSEWHERE:
        parts.append("Its fields are in [Parameters](parameters.md).")
        return "\n\n".join(filter(None, parts))
    required = schema.get("required", [])
    rows = (
        (
            code(field),
            _kind(own),
            _default(own, field in required),
            sentence(literal(own.get("description", ""))),
        )
        for field, own in schema.get("properties", {}).items()
    )
    parts.append(table(["Field", "Type and bounds", "Default", "Meaning"], rows))
    return "\n\n".join(filter(None, parts))


def _kind(schema: Schema) -> str:
    return words({name: value for name, value in schema.items() if name != "description"}) or code("null")


def _default(schema: Schema, is_required: bool) -> str:
    if schema.get("default") in (None, ""):
        return "required" if is_required else ""
    return code(json.dumps(schema["default"]))
