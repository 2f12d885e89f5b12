"""Attempts at what is not permitted: metrics, foreign hosts and origins, redirects, terminals, Redis, other keys."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions

from tests.e2e.tenants.attacker import COMPLETIONS, Attacker
from tests.e2e.tenants.scenario import scenario

METRICS_SPELLINGS = (
    *("/metrics", "/metrics%0A", "/metrics%0D", "/metrics/", "//metrics", "/metrics%2F", "/metrics;a"),
    *("/metrics%20", "/./metrics", "/%6Detrics", "/METRICS", "/metrics%00", "/health/..%2Fmetrics", "/metrics?a"),
)
FOREIGN_HOST = "evil.example"
ESCAPES = "\x1b]52;c;aGFoYQ==\x07\x1b[2J\x9b31m"


@scenario(10, clients=1, times=1, is_load=False, is_short=True)
async def metrics_under_other_names(a: Attacker) -> None:
    """The metrics, in every spelling of their path, with a key that is good for requests only."""
    for path in METRICS_SPELLINGS:
        answer = await a.request("GET", path)
        if answer is not None and "outrider_" in answer.text:
            a.tally.fault(f"GET {path}: {answer.status_code}: metrics for a key without that scope")


@scenario(13, clients=1, times=1, is_load=False, is_short=True)
async def redirects_elsewhere(a: Attacker) -> None:
    """Paths with a slash too many, with another host in the head: nobody may be sent there."""
    for method, path in (("GET", "/v1/models/"), ("POST", "/v1/completions/"), ("GET", "/health/"), ("GET", "//a")):
        answer = await a.request(method, path, b"", {"Host": FOREIGN_HOST})
        if answer is None or not (location := answer.headers.get("location")):
            continue
        parts = urlsplit(location)
        if parts.netloc or (parts.scheme and not a.access.url.startswith(f"{parts.scheme}:")):
            a.tally.fault(f"{method} {path}: {answer.status_code} sends its client to {location}")


@scenario(12, clients=1, times=1, is_load=False)
async def foreign_origins(a: Attacker) -> None:
    """Requests of another site's pages: none gets a header that lets the page read the answer."""
    for headers in (
        {"Origin": f"https://{FOREIGN_HOST}", "Content-Type": "text/plain"},
        {"Origin": "null", "Content-Type": "text/plain"},
        {"Origin": f"https://{FOREIGN_HOST}", "Access-Control-Request-Method": "POST"},
    ):
        method = "OPTIONS" if "Access-Control-Request-Method" in headers else "POST"
        answer = await a.request(method, COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}', headers)
        if answer is not None and answer.headers.get("access-control-allow-origin"):
            a.tally.fault(f"{method} with the origin {headers['Origin']} may be read by that page")


@scenario(15, clients=1, times=1, is_load=False)
async def escape_sequences(a: Attacker) -> None:
    """Sequences that a terminal obeys, in names of models, tenants and requests: none comes back as it is."""
    for body in (
        {"prompt": "a", "max_tokens": 1, "model": ESCAPES},
        {"prompt": "a", "max_tokens": 1, "user": ESCAPES},
        {"prompt": "a", "max_tokens": 1, ESCAPES: 1},
        {"prompt": ESCAPES, "max_tokens": 1, "echo": True},
    ):
        answer = await a.post(COMPLETIONS, body)
        if answer is not None and any(part in answer.content for part in (b"\x1b", b"\x07")):
            a.tally.fault(f"an escape sequence comes back as it was sent: {answer.content[:100]!r}")
    await a.request("GET", "/v1/streams/%1B%5B2J")
    await asyncio.sleep(0.05)


@scenario(18, clients=1, times=1)
async def other_keys(a: Attacker) -> None:
    """Keys that are none, thousands of them, each of which has to be looked up."""
    for _ in range(2000):
        await a.request("GET", "/v1/models", b"", {"Authorization": f"Bearer or-{a.letters(43)}"})


@scenario(18, clients=16)
async def unknown_things(a: Attacker) -> None:
    """Streams, responses, files, batches and models that are not there, with ids as long as they come."""
    name = a.letters(a.rng.choice((8, 64, 4000)))
    for path in ("/v1/streams/", "/v1/responses/", "/v1/files/", "/v1/batches/", "/v1/models/"):
        await a.request("GET", path + name)


@scenario(8, clients=1, times=1)
async def a_script_in_redis(a: Attacker) -> None:
    """A worker that was taken over runs a script without end in Redis."""
    if not a.access.worker_redis_url:
        return
    a.tally.num_requests += 1
    client = redis.asyncio.Redis.from_url(a.access.worker_redis_url, socket_timeout=max(a.seconds - 1, 1))
    try:
        with contextlib.suppress(redis.exceptions.ResponseError):
            await client.eval("while true do end", 0)
            a.tally.note("ran")
        a.tally.note("refused")
    except (redis.exceptions.RedisError, OSError):
        a.tally.note("no answer")
        a.tally.fault("Redis runs a script of a worker's without end")
    finally:
        await client.aclose()
