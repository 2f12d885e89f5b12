"""Kinds of requests to the other paths, and requests that are wrong in their method, headers or body."""

from __future__ import annotations

from typing import Any

from tests.clients.compare.kinds import MESSAGES, MODEL, Kind, json_kind

_JSON = {"Content-Type": "application/json"}
_CORS = {"Origin": "http://example.com"}


def others() -> list[Kind]:
    """All of them."""
    return [*_reads(), *_tokens(), *_bodies(), *_headers()]


def _reads() -> list[Kind]:
    paths = {
        "models": "/v1/models",
        "models with a slash": "/v1/models/",
        "version": "/version",
        "health": "/health",
        "ping": "/ping",
        "load": "/load",
        "metrics": "/metrics",
        "unknown path": "/v1/unknown",
        "root": "/",
        "unknown response": "/v1/responses/resp_0",
    }
    kinds = [Kind(f"get/{name}", path, method="GET") for name, path in paths.items()]
    kinds += [Kind(f"head/{name}", paths[name], method="HEAD") for name in ("models", "health")]
    wrong = {"GET": "/v1/chat/completions", "PUT": "/v1/completions", "DELETE": "/v1/models", "PATCH": "/tokenize"}
    kinds += [Kind(f"method/{method} {path}", path, method=method) for method, path in wrong.items()]
    return [*kinds, Kind("method/POST /ping", "/ping", b""), Kind("method/POST /health", "/health", b"")]


def _tokens() -> list[Kind]:
    tokenize: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": "Hello you"},
        "no model": {"model": None, "prompt": "Hello you"},
        "unknown model": {"model": "unknown", "prompt": "Hello"},
        "empty": {"prompt": ""},
        "without special tokens": {"prompt": "Hello", "add_special_tokens": False},
        "strings": {"prompt": "Hello you", "return_token_strs": True},
        "messages": {"messages": MESSAGES},
        "messages strings": {"messages": MESSAGES, "return_token_strs": True},
        "messages unprompted": {"messages": MESSAGES, "add_generation_prompt": False},
        "messages continued": {
            "messages": [*MESSAGES, {"role": "assistant", "content": "Once"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "tools": {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a"}}]},
        "neither": {},
        "both": {"prompt": "Hello", "messages": MESSAGES},
        "list": {"prompt": ["Hello"]},
        "number": {"prompt": 3},
        "unknown field": {"prompt": "Hello", "x": 1},
    }
    detokenize: dict[str, dict[str, Any]] = {
        "tokens": {"tokens": [5, 6, 7]},
        "empty": {"tokens": []},
        "unknown model": {"model": "unknown", "tokens": [5]},
        "missing": {},
        "strings": {"tokens": ["a"]},
        "negative": {"tokens": [-1]},
        "out of vocabulary": {"tokens": [1000000]},
        "unknown field": {"tokens": [5], "x": 1},
    }
    kinds = [json_kind(f"tokenize/{name}", "/tokenize", {"model": MODEL} | body) for name, body in tokenize.items()]
    return kinds + [
        json_kind(f"detokenize/{name}", "/detokenize", {"model": MODEL} | body) for name, body in detokenize.items()
    ]


def _bodies() -> list[Kind]:
    bodies = {
        "malformed": b'{"model": ',
        "empty": b"",
        "list": b"[]",
        "string": b'"x"',
        "number": b"3",
        "null": b"null",
        "no object": b"hello",
        "not UTF-8": b'{"model": "\xff"}',
        "NaN": b'{"model": "target", "prompt": "a", "temperature": NaN, "max_tokens": 1}',
        "same key twice": b'{"model": "target", "prompt": "a", "prompt": "b", "max_tokens": 1, "temperature": 0}',
        "byte order mark": b'\xef\xbb\xbf{"model": "target", "prompt": "a", "max_tokens": 1, "temperature": 0}',
    }
    paths = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
    kinds = [
        Kind(f"body/{name} {what}", path, body, headers=_JSON)
        for name, body in bodies.items()
        for what, path in paths.items()
    ]
    good = b'{"model": "target", "prompt": "a", "max_tokens": 2, "temperature": 0}'
    types = ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8", "application/xml")
    kinds += [Kind(f"content type/{kind}", "/v1/completions", good, headers={"Content-Type": kind}) for kind in types]
    return [*kinds, Kind("content type/none", "/v1/completions", good)]


def _headers() -> list[Kind]:
    good = b'{"model": "target", "prompt": "a", "max_tokens": 2, "temperature": 0}'
    path = "/v1/completions"
    asked = _CORS | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    return [
        Kind("header/request id", path, good, headers=_JSON | {"X-Request-Id": "a-name"}),
        Kind("header/authorization", path, good, headers=_JSON | {"Authorization": "Bearer x"}),
        Kind("header/accept", path, good, headers=_JSON | {"Accept": "text/event-stream"}),
        Kind("header/origin", path, good, headers=_JSON | _CORS),
        Kind("header/organization", path, good, headers=_JSON | {"OpenAI-Organization": "x"}),
        Kind("header/preflight", path, None, "OPTIONS", asked),
        Kind("header/preflight of models", "/v1/models", None, "OPTIONS", asked),
        Kind("header/options", path, None, "OPTIONS"),
        Kind("header/origin of models", "/v1/models", None, "GET", _CORS),
        Kind("http 1.0/completion", path, good, headers=_JSON, version="HTTP/1.0"),
        Kind("http 1.0/stream", path, good[:-1] + b', "stream": true}', headers=_JSON, version="HTTP/1.0"),
        Kind("http 1.0/models", "/v1/models", None, "GET", version="HTTP/1.0"),
    ]
