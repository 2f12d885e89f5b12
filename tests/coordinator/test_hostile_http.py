"""Whatever is sent over HTTP: an answer or OpenAI's error body, soon, and the next client is served as ever."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from coordinator.api.schema.openai_schema import (
    DEPTH_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from outrider.errors import MESSAGE_BYTES_MAX
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.held import HeldCluster, held
from tests.coordinator.tiny_model import write_model_dir
from tests.hostile import EFFORTS, try_out

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, Any] = {
    COMPLETIONS: CompletionBody,
    CHATS: ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
MESSAGES = '"messages": [{"role": "user", "content": "x"}]'
SOON_S = 8.0  # of processor time; what is meant takes a fifth of it, what is not half a minute
# One that writes everything that a client may put into it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}"
    "{% endfor %}{{ tools | tojson if tools }}{{ value | tojson if value }}{{ 'x' * times if times }}"
    "{% for _ in range(loops or 0) %}{% endfor %}"
)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's error body, checked."""
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"].encode()) <= MESSAGE_BYTES_MAX
    assert error["param"] is None or isinstance(error["param"], str)
    return dict(error)


def check(cluster: HeldCluster, path: str, content: bytes, **headers: str) -> None:
    answer = cluster.send("POST", path, content=content, headers=headers)
    # One that gives itself a millisecond may find it over.
    late = {504} if b"deadline_ms" in content else set()
    assert answer.status_code in {200, 400, 404} | late, answer.text[:500]
    if answer.status_code != 200:
        error_of(answer)


# JSON as text, so that it can be what no encoder writes.

SCALARS = st.sampled_from(
    [
        *("null", "true", "false", "0", "-1", "1.0", "-0.0", "0.5", "1e-320", "1e400", "-1e400", "NaN", "Infinity"),
        *("-Infinity", "9" * 400, "9" * 5000, str(2**64), str(2**32), '""', '"x"', '"0"', '"auto"', '"required"'),
        *('"\\ud800"', '"\\udfff\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x00"', '"\\"', '"' + "é" * 300 + '"'),
        *("[]", "{}", "[[]]", "{" * 40, "[" * 2000 + "]" * 2000, nested(300), '{"type":"object"}', '{"regex":"("}'),
        *('[{"role":"user","content":"x"}]', '[{"role":"tool"}]', '{"$ref":"#"}', '{"grammar":"start: start"}'),
        *('{"type":"json_schema","json_schema":{"name":"","schema":{"multipleOf":NaN}}}', '{"json":{"enum":[]}}'),
    ]
) | st.integers().map(str) | st.floats().map(json.dumps) | st.text(max_size=8).map(json.dumps)  # fmt: skip


def values(names: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4).map(lambda each: f"[{','.join(each)}]") | objects(names, inner),
        max_leaves=6,
    )


def objects(names: SearchStrategy[str], value: SearchStrategy[str]) -> SearchStrategy[str]:
    """Names may come twice."""
    return st.lists(st.tuples(names, value), max_size=6).map(
        lambda pairs: "{" + ",".join(f"{json.dumps(name)}:{each}" for name, each in pairs) + "}"
    )


def body_texts(path: str) -> SearchStrategy[str]:
    kind = BODIES[path]
    names = st.sampled_from([*kind.model_fields, *kind.neutral]) | st.text(max_size=4)
    good = {"prompt": '"x"', "tokens": "[1]", "messages": '[{"role":"user","content":"x"}]'}
    first = [f'"{name}":{value}' for name, value in good.items() if name in kind.model_fields][:1]

    def with_the_needful(text: str) -> str:
        return text if text == "{}" else "{" + ",".join([*first, text[1:]])

    return objects(names, values(names)).map(with_the_needful)


@EFFORTS
@pytest.mark.parametrize("path", BODIES)
def test_any_json_is_answered(clusters: ClusterFactory, path: str, effort: int) -> None:
    with held(clusters) as cluster:

        def one(text: str) -> None:
            # Text that is no UTF-8 is sent as what it would be, were it allowed.
            check(cluster, path, text.encode(errors="surrogatepass"))

        try_out(one, effort, 120, text=body_texts(path))


@EFFORTS
@pytest.mark.parametrize("path", BODIES)
def test_any_bytes_under_any_headers_are_answered(clusters: ClusterFactory, path: str, effort: int) -> None:
    encodings = st.sampled_from(["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig", "utf-7", "latin-1", "cp037"])
    encoded = st.builds(lambda text, encoding: text.encode(encoding, errors="replace"), body_texts(path), encodings)
    header = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80)
    kinds = st.sampled_from(
        [
            "",
            "text/plain",
            "application/xml",
            "multipart/form-data",
            "application/json; charset=utf-16",
            "\t;",
        ]
    )
    with held(clusters) as cluster:

        def one(content: bytes, request_id: str, kind: str, accept: str) -> None:
            headers = {"X-Request-Id": request_id, "Content-Type": kind, "Accept": accept}
            check(cluster, path, content, **headers)

        content = st.binary(max_size=60) | encoded
        try_out(one, effort, 60, content=content, request_id=header, kind=kinds, accept=header)


@EFFORTS
def test_any_path_and_method_are_answered(clusters: ClusterFactory, effort: int) -> None:
    with held(clusters) as cluster:

        def one(method: str, path: str) -> None:
            answer = cluster.send(method, "/" + quote(path))
            assert answer.status_code in (200, 400, 404, 405)

        paths = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        known = st.sampled_from([*(path[1:] for path in BODIES), "v1/models", "health", "openapi.json"])
        try_out(
            one,
            effort,
            60,
            method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "DELETE", "TRACE", "PATCH", "QUERY"]),
            path=paths | known | st.builds(lambda start, end: f"{start}/{end}", known, paths),
        )


def test_what_is_refused_by_its_path_has_a_message_of_a_bounded_length(clusters: ClusterFactory) -> None:
    with held(clusters) as cluster:
        answer = cluster.send("DELETE", "/v1/models/" + "x" * 5000)
        assert answer.status_code == 405
        assert error_of(answer)["message"].startswith("DELETE /v1/models/x")


def many(value: str, count: int) -> str:
    return ",".join([value] * count)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, '{"prompt": [' + many("null", 1_500_000) + "]}"),
        (COMPLETIONS, '{"prompt": [' + many("[]", 2_000_000) + "]}"),
        (COMPLETIONS, '{"prompt": [' + many("7", 3_000_000) + "]}"),
        (COMPLETIONS, '{"prompt": "x", "bad_words": [' + many("7", 3_000_000) + "]}"),
        (COMPLETIONS, '{"prompt": "x",' + ",".join(f'"{i}":1' for i in range(700_000)) + "}"),
        (COMPLETIONS, '{"prompt": "x", "speculation": {' + ",".join(f'"{i}":1' for i in range(700_000)) + "}}"),
        (COMPLETIONS, '{"prompt": "x", "logit_bias": {' + ",".join(f'"x{i}":""' for i in range(500_000)) + "}}"),
        (COMPLETIONS, '{"prompt": "x", "model": "' + "x" * 7_000_000 + '"}'),
        (COMPLETIONS, '{"prompt": "x", "stop": "' + "x" * 7_000_000 + '"}'),
        (COMPLETIONS, '{"prompt": "' + "ab " * 2_500_000 + '"}'),
        (CHATS, '{"messages": [' + many("{}", 2_000_000) + "]}"),
        (CHATS, '{"messages": [' + many('{"role":"user","content":"x"}', 250_000) + "]}"),
        (CHATS, '{"messages": [{"role": "user", "content": [' + many("{}", 2_000_000) + "]}]}"),
        (CHATS, '{"messages": [{"role": "user", "content": "' + "ab " * 2_500_000 + '"}]}'),
        (CHATS, "{" + MESSAGES + ', "tools": [' + many("{}", 2_000_000) + "]}"),
        ("/tokenize", '{"prompt": "' + "ab " * 2_500_000 + '"}'),
        ("/detokenize", '{"tokens": [' + many("7", 3_000_000) + "]}"),
        ("/detokenize", '{"tokens": [' + many('"7"', 2_000_000) + "]}"),
    ],
    ids=lambda word: word[:50],
)  # fmt: skip
def test_a_body_as_large_as_may_be_is_refused_soon(clusters: ClusterFactory, path: str, body: str) -> None:
    with held(clusters) as cluster:
        began = time.process_time()
        answer = cluster.send("POST", path, content=body)
        assert answer.status_code in (400, 404)
        assert error_of(answer)["message"]
        assert time.process_time() - began < SOON_S


def test_a_body_nested_deeper_than_everything_can_follow_is_refused_as_such(tmp_path: Path) -> None:
    template = write_model_dir(tmp_path, chat_template=CHAT_TEMPLATE)
    with held(ClusterFactory(template)) as cluster:
        # Somewhere below 1000 what can be read cannot be written again.
        for depth in (DEPTH_MAX + 1, *range(900, 1000, 2), 100_000):
            deep = nested(depth)
            for field in (
                f'"chat_template_kwargs": {{"value": {deep}}}',
                f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]',
                f'"structured_outputs": {{"json": {deep}}}',
            ):
                body = f"{{{MESSAGES}, {field}}}"
                answer = cluster.send("POST", CHATS, content=body)
                assert answer.status_code == 400
                assert "JSON" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "variables",
    [{"loops": 10**6}, {"loops": 10**30}, {"times": 10**14}, {"times": 10**30}, {"times": 10**7}, {"loops": "x"}],
    ids=str,
)  # fmt: skip
def test_what_a_chat_template_makes_of_a_clients_variables_is_the_clients_error(
    tmp_path: Path, variables: dict[str, Any]
) -> None:
    template = write_model_dir(tmp_path, chat_template=CHAT_TEMPLATE)
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": variables}
    with held(ClusterFactory(template)) as cluster:
        for path in (CHATS, "/tokenize"):
            answer = cluster.send("POST", path, json=body)
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "messages"


@pytest.mark.parametrize("arguments", ['"\\ud800"', nested(950), nested(100_000), "NaN", "{", "9" * 5000])
def test_arguments_of_a_call_are_json_within_json_and_as_hostile(tmp_path: Path, arguments: str) -> None:
    template = write_model_dir(tmp_path, chat_template=CHAT_TEMPLATE)
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    with held(ClusterFactory(template)) as cluster:
        check(cluster, CHATS, json.dumps({"messages": [message]}).encode())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32"])
def test_json_in_other_encodings_cannot_bring_half_a_pair_in(clusters: ClusterFactory, encoding: str) -> None:
    with held(clusters) as cluster:
        for text in ('{"prompt": "\\ud800"}', '{"prompt": "\ud800"}'):
            answer = cluster.send("POST", COMPLETIONS, content=text.encode(encoding, errors="surrogatepass"))
            assert answer.status_code == 400
            assert "JSON" in error_of(answer)["message"]


@pytest.mark.parametrize("body", [{"priority": False}, {"use_beam_search": 0}, {"echo": 0}, {"length_penalty": True}])
def test_a_value_that_only_python_takes_for_a_neutral_one_is_refused(
    clusters: ClusterFactory, body: dict[str, Any]
) -> None:
    with held(clusters) as cluster:
        answer = cluster.send("POST", COMPLETIONS, json={"prompt": "x"} | body)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == next(iter(body))
