"""Every field of every body with values that no client means: never a fault of ours, and the field is named."""

from __future__ import annotations

import pytest

from outrider.errors import MESSAGE_BYTES_MAX
from protos.outrider.v1 import generation_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.held import held
from tests.coordinator.test_hostile_http import BODIES, error_of

HUGE = "1" + "0" * 400
VALUES = (
    *(HUGE, f"-{HUGE}", "9" * 5000, "1e308", "-1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity"),
    *("-0.0", "-1", "1e-320", str(2**64), str(2**32), str(2**53 + 1), '"\\ud800"', '"\\u0000"', "[]", "{}"),
    *("null", "true", '{"a": 1}', "[1]", '["x"]', "[[1]]", "[" * 300 + "]" * 300, f"[{HUGE}]", f'{{"1": {HUGE}}}'),
    f'"{"x" * 100_000}"',
)  # fmt: skip
NEEDFUL = {"prompt": '"x"', "tokens": "[1]", "messages": '[{"role": "user", "content": "x"}]'}


@pytest.mark.thorough
@pytest.mark.parametrize("path", BODIES)
def test_no_value_of_any_field_is_a_fault_of_ours(clusters: ClusterFactory, path: str) -> None:
    fields = BODIES[path].model_fields
    needful = next(f'"{name}": {value}, ' for name, value in NEEDFUL.items() if name in fields)
    with held(clusters) as cluster:
        for name, field in fields.items():
            for value in VALUES:
                body = f'{{{needful}"{field.alias or name}": {value}}}'
                answer = cluster.send("POST", path, content=body.encode())
                late = {504} if name == "deadline_ms" else set()
                assert answer.status_code in {200, 400, 404} | late, (name, value[:40], answer.text[:300])


INTEGERS = (
    *("max_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "priority", "deadline_ms", "logprobs"),
    "prompt_logprobs",
)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}"], ids=["huge", "negative"])
def test_an_integer_of_400_digits_is_refused_by_the_name_of_its_field(
    clusters: ClusterFactory, name: str, value: str
) -> None:
    with held(clusters) as cluster:
        answer = cluster.send("POST", "/v1/completions", content=f'{{"prompt": "x", "{name}": {value}}}'.encode())
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == name
        assert len(error["message"].encode()) <= MESSAGE_BYTES_MAX


@pytest.mark.parametrize("header", ["Last-Event-ID", "X-Request-Id", "X-Canary-Key", "traceparent", "Content-Length"])
@pytest.mark.parametrize("value", ["9" * 400, "-1", "1e400", "\u00b2", "0x10", "+1", ""])
def test_no_number_in_a_header_is_a_fault_of_ours(clusters: ClusterFactory, header: str, value: str) -> None:
    with held(clusters) as cluster:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = '{"prompt": "x", "stream": true}' if path == "/v1/completions" else (
                '{"messages": [{"role": "user", "content": "x"}], "stream": true}'
            )  # fmt: skip
            answer = cluster.send("POST", path, content=body, headers={header: value.encode("latin-1")})
            assert answer.status_code in (200, 400, 404, 413), answer.text[:300]


@pytest.mark.parametrize("deadline_ms", [1, 2**32 - 1, 2**63, 2**64 - 1])
def test_no_deadline_over_grpc_is_a_fault_of_ours(deadline_ms: int) -> None:
    from coordinator.api.grpc.grpc_api import read_request

    field = generation_pb2.GenerationRequest.DESCRIPTOR.fields_by_name["deadline_ms"]
    try:
        asked = generation_pb2.GenerationRequest(prompt="x", deadline_ms=deadline_ms)
    except ValueError:
        assert field.type == field.TYPE_UINT32, "what does not fit cannot be sent"
        return
    assert read_request(asked).deadline_s == pytest.approx(deadline_ms / 1000)
