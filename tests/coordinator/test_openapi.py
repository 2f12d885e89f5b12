"""The OpenAPI document is true: of every route, of what is refused, and of what is answered."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coordinator.api.anthropic.message_body import CountTokensBody, MessageBody
from coordinator.api.http.openapi import openapi_document, openapi_json
from coordinator.api.responses.response_body import ResponseBody
from coordinator.api.schema.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.held import held, routes
from tests.hostile import EFFORTS, LATE_MS, try_out

OPERATIONS = [
    (method.upper(), path)
    for path, operations in openapi_document()["paths"].items()
    for method in operations
    if method != "parameters"
]
CHECKS = [
    status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance,
]  # fmt: skip


async def test_every_route_is_in_the_document_and_nothing_else(clusters: ClusterFactory) -> None:
    async with clusters.open([]) as cluster:
        assert set(OPERATIONS) == routes(cluster)
        assert (await cluster.client.get("/openapi.json")).json() == openapi_document()


def test_it_is_made_once() -> None:
    assert openapi_json() is openapi_json()


def test_its_schemas_are_schemas_and_name_every_field() -> None:
    schemas = openapi_document()["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    bodies = (CompletionBody, ChatBody, ResponseBody, MessageBody, CountTokensBody, TokenizeBody, DetokenizeBody)
    for model in bodies:
        named = {field.alias or name for name, field in model.model_fields.items()}
        assert named | set(model.neutral) | set(model.unused) == set(schemas[model.__name__]["properties"])


@EFFORTS
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_documented(
    clusters: ClusterFactory, method: str, path: str, mode: GenerationMode, effort: int
) -> None:
    operation = schemathesis.openapi.from_dict(openapi_document())[path][method]
    body = openapi_document()["paths"][path][method.lower()].get("requestBody")
    if mode is GenerationMode.NEGATIVE and body is None:
        pytest.skip("there is nothing to get wrong")
    if body is not None and "multipart/form-data" in body["content"]:
        pytest.skip("schemathesis reads no streamed request; tests/coordinator/batches has wrong forms")
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
    with held(clusters) as cluster:

        def check(case: Any) -> None:
            request: dict[str, Any] = case.as_transport_kwargs("http://coordinator")
            request.pop("cookies", None)
            if "data" in request:  # bytes, by the name that requests has for them
                request["content"] = request.pop("data")
            answer = cluster.send(request.pop("method"), request.pop("url"), **request)
            # The check of wrong bodies does not count a body that is too long as refused.
            chosen = CHECKS if answer.status_code == 413 else checks
            is_late = answer.status_code == 504 and case.body.get("deadline_ms", LATE_MS) < LATE_MS
            case.validate_response(answer, checks=chosen if is_late else [*chosen, not_a_server_error])

        num_examples = 60 if method == "POST" else 3
        try_out(check, effort, num_examples, case=operation.as_strategy(mode))
