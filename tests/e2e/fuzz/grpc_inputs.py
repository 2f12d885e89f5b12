"""Calls over gRPC: messages near valid ones, bytes that are none, odd metadata, paths and frames. Pure."""

from __future__ import annotations

import random
import struct
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from protos.outrider.v1 import common_pb2, generation_pb2
from tests.e2e.fuzz.inputs import GrpcInput, drawn
from tests.hostile import LATE_MS, mangled, messages

GENERATE, LIST_MODELS = b"/outrider.v1.Generation/Generate", b"/outrider.v1.Generation/ListModels"
HEALTH = tuple(b"/grpc.health.v1.Health/" + name for name in (b"Check", b"List", b"Watch"))
REFLECTION = b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Headers = tuple[tuple[bytes, bytes], ...]


def varint(number: int) -> bytes:
    """As protobuf writes a length."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    return bytes([*written, number])


SAMPLING = messages(
    common_pb2.SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    top_p=st.just(1.0),
    max_tokens=st.integers(1, 8),
    min_tokens=st.integers(0, 3),
    logprobs_mode=st.integers(0, 2),
)
ANY = messages(generation_pb2.GenerationRequest)
# Each of these is there in one request of four, so that many are right but for one field.
_ODD_FIELDS = {
    "request_id": lambda request: request.request_id,
    "n": lambda request: request.n % 70,
    "best_of": lambda request: request.best_of % 70,
    "echo": lambda request: request.echo,
    "stop": lambda request: request.stop[:20],
    "bad_words": lambda request: request.bad_words[:300],
    "speculation": lambda request: request.speculation,
    "resume_from": lambda request: request.resume_from[:3],
    "run": lambda request: request.run,
    "deadline_ms": lambda request: request.deadline_ms,
    "cache_salt": lambda request: request.cache_salt,
    "priority": lambda request: request.priority,
}


def _nearly_right(request: Any, sampling: Any, prompt: str, chosen: list[str]) -> Any:
    fields = {name: _ODD_FIELDS[name](request) for name in chosen}
    return generation_pb2.GenerationRequest(prompt=prompt, sampling=sampling, **fields)


GOOD_SAMPLING = st.builds(
    common_pb2.SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    top_p=st.just(1.0),
    max_tokens=st.integers(1, 8),
    num_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
NEARLY_RIGHT = st.builds(
    _nearly_right,
    ANY,
    GOOD_SAMPLING | SAMPLING,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.lists(st.sampled_from(sorted(_ODD_FIELDS)), max_size=3, unique=True),
)
# As many as a message has room for, of what takes hardly any.
_CROWD = 900_000
CROWDED = st.sampled_from(
    [
        ("words of nothing", b"\x12\x01a" + b"\x72\x00" * _CROWD),
        ("stop strings of nothing", b"\x12\x01a" + b"\x3a\x00" * _CROWD),
        ("points of nothing", b"\x12\x01a\x52\x01a" + b"\x7a\x00" * _CROWD),
        ("messages of nothing", b"\x22" + varint(2 * _CROWD) + b"\x0a\x00" * _CROWD),
        ("messages of a user", b"\x22" + varint(8 * 200_000) + b"\x0a\x06\x0a\x04user" * 200_000),
        ("words of sampling", b"\x12\x01a\x2a" + varint(2 * _CROWD) + b"\x72\x00" * _CROWD),
        ("token ids", b"\x1a" + varint(260_004) + b"\x0a" + varint(260_000) + b"\x05" * 260_000),
        ("unknown fields", b"\x12\x01a" + b"\xf8\x7f\x01" * 600_000),
        ("2 MiB and a byte", b"\x12" + varint(2 << 20) + b"a" * (2 << 20)),
        ("a long prompt", b"\x12" + varint(1 << 20) + b"ab " * (1 << 18) + b"a" * (1 << 18)),
    ]
)


def head(path: bytes = GENERATE, *more: tuple[bytes, bytes], key: bytes | None = b"Bearer {KEY}") -> Headers:
    """Headers of a gRPC call as clients send them."""
    usual = (
        *((b":method", b"POST"), (b":scheme", b"https"), (b":path", path), (b":authority", b"coordinator")),
        *((b"content-type", b"application/grpc"), (b"te", b"trailers")),
    )
    return (*usual, *(() if key is None else ((b"authorization", key),)), *more)


def framed(message: bytes, compressed: int = 0) -> bytes:
    """Frames a message as one of a gRPC call."""
    return struct.pack(">BI", compressed, len(message)) + message


def near_valid(count: int, seed: int) -> list[GrpcInput]:
    """Messages whose fields hold anything."""

    def call(what: str, raw: bytes, *, is_late: bool = False) -> GrpcInput:
        return GrpcInput(
            kind="gRPC: messages near valid ones",
            what=what,
            headers=head(),
            data=framed(raw),
            allows=("DEADLINE_EXCEEDED",) if is_late else (),
        )

    requests = NEARLY_RIGHT | NEARLY_RIGHT | NEARLY_RIGHT | ANY
    found = [call(what, raw) for what, raw in drawn(CROWDED, count // 20, seed)]
    for request in drawn(requests, count - len(found), seed):
        what = " ".join(str(request).split())[:160]
        found.append(call(what, request.SerializeToString(), is_late=0 < request.deadline_ms < LATE_MS))
    return found


def mutated(count: int, seed: int) -> list[GrpcInput]:
    """Bytes of messages with some of them changed, and bytes that never were any, to every method."""
    paths = st.sampled_from([GENERATE, GENERATE, GENERATE, LIST_MODELS])
    raw = mangled(NEARLY_RIGHT | ANY) | st.binary(max_size=200) | st.binary(max_size=3).map(lambda part: part * 20_000)
    return [
        GrpcInput(
            kind="gRPC: mutated and random bytes",
            what=f"{path.decode()} {len(content)} bytes: {content[:40].hex()}",
            headers=head(path),
            data=framed(content),
            allows=("DEADLINE_EXCEEDED",),  # a deadline may be what was made of it
        )
        for path, content in drawn(st.tuples(paths, raw), count, seed)
    ]


GOOD = framed(
    generation_pb2.GenerationRequest(
        prompt="import", sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=2)
    ).SerializeToString()
)
PATHS = (
    b"/outrider.v1.Generation/generate",
    b"/outrider.v1.Generation/",
    b"/outrider.v1.Generation",
    b"/",
    b"//",
    b"/outrider.v1.Target/Generate",
    b"/outrider.v1.Draft/Attach",
    b"/outrider.v1.Hints/Exchange",
    b"/ray.serve.RayServeAPIService/ListApplications",
    b"/ray.serve.RayServeAPIService/Healthz",
    b"/v1/completions",
    b"/outrider.v1.Generation/Generate/",
    b"/" + b"x" * 3000,
    b"/outrider.v2.Generation/Generate",
    b"/outrider.v1.Generation/%47enerate",
)
METADATA = (
    (b"x-request-id", b"\xff\xfe"),
    (b"traceparent", b"00-zz"),
    (b"x-canary-key", b"x" * 4000),
    (b"x-canary-key", b"\xc3\xa9"),
    (b"grpc-timeout", b"1n"),
    (b"grpc-timeout", b"0S"),
    (b"grpc-timeout", b"x"),
    (b"grpc-timeout", b"-1S"),
    (b"grpc-timeout", b"999999999S"),
    (b"grpc-timeout", b"99999999H"),
    (b"grpc-encoding", b"gzip"),
    (b"grpc-encoding", b"x"),
    (b"grpc-accept-encoding", b"x"),
    (b"a-bin", b"!!!"),
    (b"a-bin", b"AAA"),
    (b"authorization", b"Bearer wrong"),
    (b"authorization", b""),
    (b"authorization-bin", b"AAAA"),
    (b"grpc-status", b"0"),
    (b"grpc-message", b"%ff"),
    (b"content-length", b"5"),
    (b"x", b"y" * 9000),
    (b"application", b"other"),
    (b"request_id", b"x"),
    (b"multiplexed_model_id", b"x"),
    (b"cookie", b"a=b; c=d"),
)


def odd_calls(count: int, seed: int) -> list[GrpcInput]:
    """Metadata, keys, paths and frames that no client would send."""
    chance = random.Random(seed)
    makers = (_metadata, _key, _path, _frames, _content_type)
    return [makers[index % len(makers)](chance) for index in range(count)]


# What gRPC's own framing is not. A call without its one message is none: gRPC's core waits for its client to end it,
# and holds nothing for it.
UNFINISHED = (
    ("no message", b""),
    ("two messages", GOOD + GOOD),
    ("ten messages", GOOD * 10),
    ("cut in its head", GOOD[:3]),
    ("cut in its message", GOOD[:-2]),
    ("longer than it says", GOOD + b"x"),
)
FRAMES = (
    *UNFINISHED,
    ("4 GiB announced", struct.pack(">BI", 0, 2**32 - 1) + b"x"),
    ("64 MiB announced", struct.pack(">BI", 0, 64 << 20) + b"x"),
    ("compressed, with nothing", framed(GOOD[5:], 1)),
    ("flag of no meaning", framed(GOOD[5:], 77)),
    ("message of no bytes", framed(b"")),
    ("5 MiB", framed(b"\x12" + b"\x80\x80\xc0\x02" + b"x" * (5 << 20))),
)


def _odd(what: str, headers: Headers, data: bytes = GOOD, **more: Any) -> GrpcInput:
    return GrpcInput(kind="gRPC: metadata, keys, paths, frames", what=what, headers=headers, data=data, **more)


def _metadata(chance: random.Random) -> GrpcInput:
    pairs = chance.sample(METADATA, chance.choice([1, 1, 2]))
    names = {name for name, _ in pairs}
    allows: tuple[str, ...] = ("DEADLINE_EXCEEDED", "CANCELLED") if b"grpc-timeout" in names else ()
    if b"a-bin" in names or b"content-length" in names:
        # No base64, and a length that is not the body's: gRPC's core and HTTP/2.
        allows += ("INTERNAL", "RST_STREAM")
    if b"grpc-encoding" in names:
        allows += ("UNIMPLEMENTED", "INTERNAL")  # what gRPC's specification has for it
    key = None if b"authorization" in names and chance.random() < 0.5 else b"Bearer {KEY}"
    return _odd(f"metadata {pairs!r}"[:160], head(GENERATE, *pairs, key=key), allows=allows)


def _key(chance: random.Random) -> GrpcInput:
    keys = (
        None,
        b"",
        b"Bearer",
        b"Bearer {KEY}x",
        b"bearer {KEY}",
        b"{KEY}",
        b"Bearer \xc3\xa9",
        b"Basic eA==",
        b"Bearer " + b"x" * 3000,
    )
    key, path = chance.choice(keys), chance.choice([GENERATE, LIST_MODELS])
    return _odd(f"key {str(key)[:40]}", head(path, key=key), GOOD if path == GENERATE else framed(b""))


def _path(chance: random.Random) -> GrpcInput:
    path = chance.choice(PATHS)
    return _odd(f"path {path[:60]!r}", head(path, key=chance.choice([None, b"Bearer {KEY}"])))


def _frames(chance: random.Random) -> GrpcInput:
    """gRPC's core answers most of it, with the status that the specification names."""
    what, data = chance.choice(FRAMES)
    allows: tuple[str, ...] = ("INTERNAL", "UNIMPLEMENTED", "RST_STREAM")
    if (what, data) in UNFINISHED:
        allows += ("CANCELLED", "unanswered")
    return _odd(f"frames: {what}", head(chance.choice([GENERATE, LIST_MODELS])), data, allows=allows)


def _content_type(chance: random.Random) -> GrpcInput:
    kind = chance.choice(
        [
            b"application/grpc+proto",
            b"application/grpc+json",
            b"application/json",
            b"",
            b"text/plain",
            b"application/grpcx",
        ]
    )
    headers = tuple((name, kind if name == b"content-type" else value) for name, value in head())
    if chance.random() < 0.3:
        headers = tuple((name, b"GET" if name == b":method" else value) for name, value in headers)
    return _odd(
        f"content type {kind!r}, {headers[0][1].decode()}",
        headers,
        allows=("RST_STREAM", "INTERNAL", "UNKNOWN"),
    )


def services(count: int, seed: int) -> list[GrpcInput]:
    """Health and reflection: at the coordinator, which has keys and so no reflection, and at the workers."""
    checks = messages(health_pb2.HealthCheckRequest)
    asked = messages(reflection_pb2.ServerReflectionRequest)
    named = st.sampled_from(
        ["", "outrider.v1.Target", "outrider.v1.Draft", "liveness", "x" * 300, "é", "grpc.health.v1.Health"]
    )
    known = named.map(lambda name: health_pb2.HealthCheckRequest(service=name)) | named.map(
        lambda name: reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
    )
    content = (known | checks | asked).map(lambda message: message.SerializeToString()) | mangled(checks | asked)
    where = st.sampled_from(["coordinator", "target-0", "draft-0", "target-0/health", "draft-0/health"])
    paths = st.sampled_from([*HEALTH, REFLECTION, b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"])
    return [
        GrpcInput(
            kind="gRPC: health and reflection",
            what=f"{to} {path.decode()} {raw[:40].hex()}",
            to=to,
            headers=head(path, key=None),
            data=framed(raw),
            allows=_of_library(to, path),
        )
        for to, path, raw in drawn(st.tuples(where, paths, content), count, seed)
    ]


def _of_library(to: str, path: bytes) -> tuple[str, ...]:
    """Statuses with which gRPC's own services may answer: they report what they cannot read as unknown, refuse a
    service that does not exist without a message, and Watch reports changes until its client leaves."""
    if to == "coordinator":
        return ("unanswered",) if path.endswith(b"/Watch") else ()
    usual = ("INTERNAL", "UNKNOWN", "NOT_FOUND")
    return (*usual, "unanswered") if path.endswith(b"/Watch") else usual
