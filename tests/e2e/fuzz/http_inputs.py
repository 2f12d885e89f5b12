"""Requests over HTTP: bodies near valid ones, and heads and framings that are none. Pure."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from coordinator.api.schema.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.e2e.fuzz.inputs import HttpInput, drawn
from tests.hostile import LATE_MS

KEY = "Bearer {KEY}"
COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
)
BODIES: dict[str, Any] = {
    COMPLETIONS: CompletionBody,
    CHATS: ChatBody,
    TOKENIZE: TokenizeBody,
    DETOKENIZE: DetokenizeBody,
}
PROMPTS = ("import", "def read_file(path):\n", "class Reader:\n    ", "# the\n")


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    *,
    key: str | None = KEY,
) -> bytes:
    """A request that is one as far as HTTP goes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: coordinator", "Connection: close"]
    lines += [] if key is None else [f"Authorization: {key}"]
    names = {name.lower() for name, _ in headers}
    if body is not None and not names & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(body)}")
    if body is not None and "content-type" not in names:
        lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + (body or b"")


# Bodies near valid ones: JSON as text, so that it can be what no encoder writes.


def nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","y"]}},"required":["a","b"]}'
GRAMMARS = st.sampled_from(
    [
        *('{"json":' + schema + "}" for schema in (SCHEMA, "{}", "true", "[]", '{"$ref":"#"}', '{"not":{}}')),
        *(
            '{"regex":' + json.dumps(regex) + "}"
            for regex in ("[ab]{3}", "(", "", "(a*)*b", r"\d{1,1000}", "(?=a)", "a{99999}")
        ),
        *(
            '{"grammar":' + json.dumps(text) + "}"
            for text in ('start: "a"', "start: start", "", "start: /(/", "%import x")
        ),
        *(
            '{"choice":' + texts + "}"
            for texts in ('["yes","no"]', "[]", '[""]', '["\\ud800"]', json.dumps(["x" * 5000] * 30))
        ),
        '{"json_object":true}',
        '{"json_object":false}',
        "{}",
        '{"regex":"a","choice":["a"]}',
        '{"json":' + json.dumps(nested('{"properties":{"a":', "{}", "}}", 60)) + "}",
        '{"json":{"properties":{' + ",".join(f'"p{i}":{{}}' for i in range(2100)) + "}}}",
    ]
)
FORMATS = st.sampled_from(
    [
        '{"type":"text"}',
        '{"type":"json_object"}',
        '{"type":"json_schema"}',
        '{"type":"xml"}',
        '"json"',
        '{"type":"json_schema","json_schema":{"name":"a","schema":' + SCHEMA + "}}",
        '{"type":"json_schema","json_schema":{"name":"a","schema":{"multipleOf":NaN}}}',
        '{"type":"json_schema","json_schema":{"name":"a","schema":{"pattern":"("}}}',
        '{"type":"json_schema","json_schema":{"name":"a","schema":{"minLength":99999999999999999999}}}',
    ]
)
NUMBERS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "2",
        "63",
        "64",
        "65",
        "0.5",
        "-0.0",
        "1e-320",
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "1.0",
        "2.5",
        "-Infinity",
        "9" * 400,
        "-" + "9" * 400,
        "1e99999",
        str(2**31),
        str(2**32),
        str(2**53 + 1),
        str(2**63),
        str(2**64),
    ]
) | st.integers(-100, 100).map(str)
TEXTS = st.sampled_from(
    [
        '""',
        '"x"',
        '"\\ud800"',
        '"\\udfff\\ud800"',
        '"\\u0000"',
        '"\x00"',
        '"\\',
        '"' + "é" * 300 + '"',
        '"\U0001f600"',
        '"' + "x" * 257 + '"',
        '"a\\r\\nX-Other: b"',
        '"..\\/.."',
        '"null"',
        '"%s%n{0}"',
    ]
) | st.text(max_size=12).map(lambda text: json.dumps(text, ensure_ascii=False))
ODD = st.sampled_from(
    [
        "null",
        "true",
        "false",
        "[]",
        "{}",
        "[[]]",
        "[null]",
        nested("[", "", "]", 300),
        nested('{"a":', "1", "}", 300),
        nested("[", "", "]", 5000),
        "{" * 40,
        "[1,2",
        "tru",
        '{"a":1,"a":2}',
        "[" + ",".join(["0"] * 70_000) + "]",
    ]
)
LISTS = st.sampled_from(
    [
        '["a"]',
        '["\\n\\n"]',
        '[""]',
        "[1]",
        "[-1]",
        "[4095]",
        "[4096]",
        f"[{2**40}]",
        '["a",1]',
        '["' + "x" * 300 + '"]',
        json.dumps(["a"] * 17),
        json.dumps(list(range(65))),
        json.dumps(["w"] * 300),
        json.dumps([7] * 70_000),
    ]
)
BIASES = st.sampled_from(
    [
        '{"5":1}',
        '{"5":1e400}',
        '{"x":1}',
        '{"-1":1}',
        '{"99999":1}',
        '{"\u0663":1}',
        '{"5":-100.5}',
        json.dumps({str(i): 1 for i in range(1100)}),
    ]
)
MANY = st.sampled_from(
    [
        json.dumps("ab " * 60),
        json.dumps("ab " * 5_000),
        json.dumps("x" * (1 << 20)),
        json.dumps("x" * ((1 << 20) + 1)),
        json.dumps("é\n" * 200_000),
        json.dumps([5] * 490),
        json.dumps([5] * 10_000),
        json.dumps([5] * 262_145),
        json.dumps("\u202e" * 90),
        json.dumps([0, 1, 2, 4095]),
    ]
)
TOOLS = st.sampled_from(
    [
        '[{"type":"function","function":{"name":"f","parameters":' + SCHEMA + "}}]",
        '[{"type":"function"}]',
        "[{}]",
        '[{"type":"function","function":{"name":"f","parameters":{"$ref":"#/x"}}}]',
        '[{"type":"code"}]',
        json.dumps([{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]),
    ]
)
CHOICES = st.sampled_from(['"auto"', '"none"', '"required"', '{"type":"function","function":{"name":"g"}}', '"x"'])
MESSAGES = st.sampled_from(
    [
        '[{"role":"user","content":"x"}]',
        "[]",
        '[{"role":"tool","content":"x"}]',
        '[{"role":"user"}]',
        '[{"content":1}]',
        '[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{"}}]}]',
        '[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"http://x"}}]}]',
        '[{"role":"user","content":' + json.dumps("word " * 400) + "}]",
        json.dumps([{"role": "user", "content": "x"}] * 500),
        '[{"role":"\\ud800","content":"\\ud800"}]',
    ]
)
SPECULATION = st.sampled_from(
    [
        '{"enabled":false}',
        '{"always":true}',
        '{"enabled":false,"always":true}',
        '{"num_speculative_tokens":33}',
        '{"num_draft_probs":65}',
        '{"draft_probs_bits":3}',
        '{"acceptance_rule":"x"}',
        '{"detail":true}',
        '{"x":1}',
        "[]",
    ]
)
OPTIONS = st.sampled_from(
    ['{"include_usage":true}', '{"include_event_ids":true}', '{"x":1}', '{"include_usage":2}', "[]"]
)
OF_FIELD: dict[str, SearchStrategy[str]] = {
    "response_format": FORMATS,
    "structured_outputs": GRAMMARS,
    "stop": LISTS | TEXTS,
    "stop_token_ids": LISTS,
    "bad_words": LISTS,
    "allowed_token_ids": LISTS,
    "logit_bias": BIASES,
    "prompt": MANY | TEXTS | LISTS,
    "tokens": LISTS,
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "speculation": SPECULATION,
    "stream_options": OPTIONS,
    "model": TEXTS,
    "user": TEXTS,
    "request_id": TEXTS,
    "cache_salt": TEXTS,
    "prompt_cache_key": TEXTS,
    "stream": st.sampled_from(["true", "false", "1", '"true"']),
    "logprobs": NUMBERS | st.sampled_from(["true", "5", "20"]),
    "chat_template_kwargs": st.sampled_from(
        ['{"tools":1}', '{"messages":[]}', '{"loop":null}', '{"x":' + "[" * 200 + "]" * 200 + "}"]
    ),
}
# Valid, and of what generation can be asked for, much.
LARGE = st.sampled_from(
    [
        {"prompt": "word " * 60, "n": 64, "max_tokens": 2},
        {"prompt": "word " * 300, "n": 16, "max_tokens": 2},
        {"prompt": "import os\n" * 60, "max_tokens": 1, "echo": True, "logprobs": 20},
        {"prompt": "import os\n" * 60, "max_tokens": 1, "prompt_logprobs": 20, "n": 8},
        {"prompt": "import", "max_tokens": 64, "n": 16, "logprobs": 20, "ignore_eos": True},
        {"prompt": "import", "max_tokens": 64, "n": 8, "logprobs": 20, "ignore_eos": True, "stream": True},
        {"prompt": "import", "max_tokens": 16, "n": 4, "best_of": 16, "temperature": 1},
        {"prompt": "import", "max_tokens": 300, "ignore_eos": True, "speculation": {"detail": True}},
        {"prompt": [5] * 400, "max_tokens": 4, "return_token_ids": True, "stream": True, "n": 8},
        {"prompt": "x", "max_tokens": 4, "bad_words": [f"w{i}" for i in range(256)], "n": 4},
        {"prompt": "x", "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(1024)}, "n": 8},
        {"prompt": "x", "max_tokens": 4, "allowed_token_ids": list(range(4000)), "n": 8},
    ]
)


def _bodies(path: str) -> SearchStrategy[str]:
    """A valid body with one to four of its fields changed."""
    kind = BODIES[path]
    known = sorted({field.alias or name for name, field in kind.model_fields.items()} | set(kind.neutral))

    def value_of(name: str) -> SearchStrategy[str]:
        usual = OF_FIELD.get(name, NUMBERS)
        return st.one_of(usual, usual, usual, TEXTS, ODD, NUMBERS)

    base = {
        COMPLETIONS: {"prompt": '"import"', "max_tokens": "4", "temperature": "0"},
        CHATS: {"messages": '[{"role":"user","content":"x"}]', "max_tokens": "4"},
        TOKENIZE: {"prompt": '"import"'},
        DETOKENIZE: {"tokens": "[5,6]"},
    }[path]
    names = st.sampled_from(known) | st.sampled_from(known) | st.text(max_size=4)
    changed = names.flatmap(lambda name: st.tuples(st.just(name), value_of(name)))

    def written(changes: list[tuple[str, str]]) -> str:
        fields = list((base | dict(changes)).items())
        fields += changes[:1] if len(changes) == 4 else []  # a name that comes twice
        return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields) + "}"

    few = st.lists(changed, min_size=1, max_size=1)
    return (few | few | st.lists(changed, min_size=2, max_size=4)).map(written)


def near_valid(count: int, seed: int) -> list[HttpInput]:
    """Bodies near valid ones, on all four routes that take one."""
    kind, found = "HTTP: bodies near valid ones", []
    shares = {COMPLETIONS: 0.5, CHATS: 0.3, TOKENIZE: 0.08, DETOKENIZE: 0.04}
    for path, share in shares.items():
        for text in drawn(_bodies(path), round(count * share), seed):
            body = text.encode("utf-8", "surrogatepass")
            raw = request("POST", path, body)
            found.append(HttpInput(kind=kind, what=f"{path}: {text[:160]}", raw=raw, allows=own_deadline(text)))
    for fields in drawn(LARGE, count - len(found), seed):
        raw = request("POST", COMPLETIONS, json.dumps({"temperature": 0} | fields).encode())
        found.append(HttpInput(kind=kind, what=f"much: {json.dumps(fields)[:160]}", raw=raw))
    return found


def own_deadline(text: str) -> tuple[str, ...]:
    """Statuses that are permitted beside the usual ones: 504 for a request that sets itself a short deadline."""
    _, found, rest = text.partition('"deadline_ms":')
    digits = rest.lstrip().split(",")[0].rstrip("} ")
    return ("504",) if found and digits.isdecimal() and len(digits) < 6 and int(digits) < LATE_MS else ()


# Heads and framings.

ID = "X-Request-Id"
GOOD = b'{"prompt":"import","max_tokens":2,"temperature":0}'
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "HEAD",
    "TRACE",
    "QUERY",
    "CONNECT",
    "get",
    "X" * 200,
)
PATHS = (
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/completions/",
    "/v1/completions?x=%00",
    "/v1/models/%2e%2e/x",
    "/v1/models/" + "x" * 3000,
    "/v1/streams/",
    "/v1/streams/%00",
    "/v1/streams/%C3%A9",
    "/v1/streams/..",
    "/v1/streams/a/../b",
    "/metrics",
    "/livez",
    "/health",
    "/health/",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/-/routes",
    "/-/healthz",
    "/%2D/routes",
    "/.env",
    "/v1/%ff",
    "*",
    "http://other/v1/models",
    "/v1/models?" + "a=b&" * 1000,
    "/v1/models#x",
    "/v1/streams/{RUN}",
    "/tokenize/x",
)
KEYS = (
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic dXNlcjpwYXNz",
    "Bearer {KEY}x",
    "bearer {KEY}",
    "Bearer  {KEY}",
    "Bearer {KEY} {KEY}",
    "Bearer or-00000000-0000",
    "Bearer " + "x" * 6000,
    "{KEY}",
    "Bearer é",
    "Bearer \x00",
    "Token {KEY}",
    "Bearer {OTHER_KEY}",
)
TYPES = (
    "",
    "text/plain",
    "application/xml",
    "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "\t;",
    "é/é",
    "application/x-www-form-urlencoded",
    "application/grpc",
    "application/json, application/json",
)


def framed(count: int, seed: int) -> list[HttpInput]:
    """Heads, keys and framings that are odd, broken or several at once."""
    chance = random.Random(seed)
    makers = (
        _method_and_path,
        _key,
        _content_type,
        _encoded,
        _chunked,
        _truncated,
        _length,
        _twice,
        _header,
        _noise,
    )
    return [makers[index % len(makers)](chance) for index in range(count)]


def _framed(what: str, raw: bytes, **more: Any) -> HttpInput:
    return HttpInput(kind="HTTP: heads, keys and framing", what=what, raw=raw, **more)


def _method_and_path(chance: random.Random) -> HttpInput:
    method, path = chance.choice(METHODS), chance.choice(PATHS + tuple(BODIES))
    body = chance.choice([None, b"", GOOD])
    return _framed(f"{method} {path[:80]}", request(method, path, body), may_hang_up=True)


def _key(chance: random.Random) -> HttpInput:
    key, path = (
        chance.choice(KEYS),
        chance.choice((*BODIES, "/v1/models", "/metrics", "/health", "/v1/streams/x")),
    )
    method = "POST" if path in BODIES else "GET"
    raw = request(method, path, GOOD if method == "POST" else None, key=key)
    return _framed(f"key {str(key)[:40]!r}", raw, may_hang_up=key is not None and not key.isprintable())


def _content_type(chance: random.Random) -> HttpInput:
    kind = chance.choice(TYPES)
    return _framed(
        f"content type {kind!r}",
        request("POST", chance.choice(tuple(BODIES)), GOOD, (("Content-Type", kind),)),
    )


def _encoded(chance: random.Random) -> HttpInput:
    encoding = chance.choice(("utf-16", "utf-16-le", "utf-32-be", "utf-8-sig", "utf-7", "cp037", "latin-1"))
    body = '{"prompt":"é import","max_tokens":2}'.encode(encoding)
    headers = chance.choice([(), (("Content-Encoding", "gzip"),), (("Content-Encoding", "br"),)])
    return _framed(f"{encoding} {headers}", request("POST", COMPLETIONS, body, headers))


def _chunked(chance: random.Random) -> HttpInput:
    """Chunks of odd sizes, extensions and trailers; some of them broken."""
    parts, body = [], GOOD if chance.random() < 0.7 else GOOD + b" " * 70_000
    while body:
        size = chance.choice([1, 2, 7, 100, 16384])
        part, body = body[:size], body[size:]
        extension = chance.choice([b"", b";a=b", b";" + b"x" * 300])
        parts.append(b"%x" % len(part) + extension + b"\r\n" + part + b"\r\n")
    end = chance.choice(
        [
            b"0\r\n\r\n",
            b"0\r\nX-Trailer: a\r\n\r\n",
            b"0;x\r\n\r\n",
            b"",
            b"-1\r\n\r\n",
            b"ffffffffffffffff\r\n",
            b"zz\r\n",
        ]
    )
    head = request(
        "POST",
        COMPLETIONS,
        b"",
        (("Transfer-Encoding", chance.choice(["chunked", "Chunked", "gzip, chunked"])),),
    )
    is_whole = end.startswith(b"0")
    what = f"chunks, end {end[:20]!r}"
    return _framed(what, head + b"".join(parts) + end, may_hang_up=True, ends=not is_whole)


def _truncated(chance: random.Random) -> HttpInput:
    """The head or the body ends in the middle."""
    raw = request("POST", COMPLETIONS, GOOD)
    place = chance.randrange(1, len(raw))
    return _framed(f"ends after {place} bytes", raw[:place], may_hang_up=True, ends=True)


def _length(chance: random.Random) -> HttpInput:
    length = chance.choice(
        [
            "0",
            "-1",
            "1",
            "+50",
            "0x32",
            "50, 50",
            "50, 51",
            "9" * 30,
            "99999999999",
            "8388609",
            "abc",
            "",
            "\u0665",
            " 50 ",
        ]
    )
    raw = request("POST", COMPLETIONS, GOOD, (("Content-Length", length),))
    return _framed(f"Content-Length {length[:20]!r}", raw, may_hang_up=True, ends=True)


def _twice(chance: random.Random) -> HttpInput:
    name, values = chance.choice(
        [
            ("Content-Length", (str(len(GOOD)), str(len(GOOD) + 1))),
            ("Content-Length", (str(len(GOOD)), str(len(GOOD)))),
            ("Authorization", (KEY, "Bearer wrong")),
            ("Authorization", ("Bearer {OTHER_KEY}", KEY)),
            (ID, ("{RUN}-a", "{RUN}-b")),
            ("Last-Event-ID", ("a", "b")),
            ("Host", ("a", "b")),
            ("Content-Type", ("application/json", "text/plain")),
            ("Transfer-Encoding", ("chunked", "identity")),
        ]
    )
    raw = request(
        "POST",
        COMPLETIONS,
        GOOD,
        tuple((name, value) for value in values),
        key=None if name == "Authorization" else KEY,
    )
    return _framed(f"{name} twice", raw, may_hang_up=name in ("Content-Length", "Transfer-Encoding", "Host"), ends=True)


def _header(chance: random.Random) -> HttpInput:
    name, value = chance.choice(
        [
            (ID, "x" * 65),
            (ID, "é"),
            (ID, "a b"),
            (ID, ".."),
            (ID, "a/../b"),
            (ID, "\t"),
            (ID, "x" * 8000),
            (ID, ""),
            ("Last-Event-ID", "é"),
            ("Last-Event-ID", ":"),
            ("Last-Event-ID", "9" * 5000),
            ("Last-Event-ID", "-"),
            ("traceparent", "00-zz-zz-01"),
            ("traceparent", "x" * 4000),
            ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
            ("X-Canary-Key", "x" * 5000),
            ("X-Canary-Key", "é"),
            ("Accept", "é"),
            ("Accept-Encoding", "br, x"),
            ("Expect", "100-continue"),
            ("Expect", "x"),
            ("Range", "bytes=0-1"),
            ("Upgrade", "websocket"),
            ("Upgrade", "h2c"),
            ("X-" + "a" * 7000, "x"),
            ("Cookie", "x" * 7000),
            ("X-Forwarded-For", "127.0.0.1"),
            ("X-Odd", "a\x00b"),
            ("X Odd", "a"),
            ("", "a"),
            ("X-Folded", "a\r\n b"),
        ]
    )
    body = chance.choice([GOOD, GOOD[:-1] + b',"stream":true}'])
    return _framed(
        f"{name[:20]}: {value[:40]!r}", request("POST", COMPLETIONS, body, ((name, value),)), may_hang_up=True
    )


def _noise(chance: random.Random) -> HttpInput:
    """No HTTP at all, or HTTP with bits flipped."""
    if chance.random() < 0.3:
        return _framed("noise", chance.randbytes(chance.randrange(1, 400)), may_hang_up=True, ends=True)
    raw = bytearray(request("POST", COMPLETIONS, GOOD))
    for _ in range(chance.randrange(1, 6)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return _framed(f"bits flipped: {bytes(raw[:60])!r}", bytes(raw), may_hang_up=True, ends=True)
