"""Sends one streamed request and time-stamps its answer. Every failure becomes part of the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from command_line.client import CONNECT_TIMEOUT_S, bearer, error_text, is_refused
from command_line.load.stream import EventSplitter, Observation, RequestError
from command_line.load.summary import RequestResult
from command_line.load.transport import SeparatePools

# After [DONE] only the end of the body is missing. A server that omits it costs a connection, not an answer.
DRAIN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server under test."""

    name: str
    url: str  # http://host:port, without /v1
    model: str = ""


def new_bench_client(timeout_s: float, api_key: str | None) -> httpx.AsyncClient:
    """One client for all servers, with as many connections as requests, so that none waits for one.

    `timeout_s` is for a whole answer; `observe` enforces it. Proxies in the environment are ignored: they would be
    measured too.
    """
    return httpx.AsyncClient(
        headers={
            "Accept-Encoding": "identity",  # events are time-stamped on arrival, so nothing may buffer them
            **bearer(api_key),
        },
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), pool=None),
        transport=SeparatePools(),
        trust_env=False,
    )


async def observe(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], *, index: int, timeout_s: float
) -> RequestResult:
    """POSTs `body` to `url` and returns the measurements or the failure, within `timeout_s` seconds. Never raises."""
    request = client.build_request("POST", url, json=body)
    seen = Observation(sent_s=time.perf_counter())
    failure: RequestError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await _receive(client, request, seen)
        seen.check_complete()
    except RequestError as error:
        failure = error
    except (TimeoutError, httpx.TimeoutException):
        if not seen.is_done:
            failure = RequestError("timeout", f"no complete answer within {timeout_s:g} s")
    except httpx.HTTPError as error:
        if not seen.is_done:
            failure = transport_error(error, has_begun=seen.num_events > 0)
    e2el_s = seen.e2el_s
    ended_s = time.perf_counter() if failure or e2el_s is None else seen.sent_s + e2el_s
    return RequestResult(
        index=index,
        sent_s=seen.sent_s,
        ended_s=ended_s,
        ttft_s=seen.ttft_s,
        e2el_s=e2el_s,
        itl_s=seen.itl_s,
        num_output_tokens=seen.num_output_tokens,
        is_counted_by_usage=seen.num_usage_tokens is not None,
        mean_acceptance_length=seen.mean_acceptance_length,
        num_spec_steps=seen.num_spec_steps,
        cause=failure.cause if failure else None,
        detail=failure.detail if failure else "",
    )


async def _receive(client: httpx.AsyncClient, request: httpx.Request, seen: Observation) -> None:
    """Reads the whole answer into `seen`. Raises RequestError and httpx.HTTPError."""
    response = await client.send(request, stream=True)
    try:
        if response.status_code != httpx.codes.OK:
            raise RequestError(f"HTTP {response.status_code}", error_text(await response.aread()))
        splitter, received = EventSplitter(), response.aiter_raw()
        async for part in received:
            arrived_s = time.perf_counter()
            for data in splitter.feed(part):
                seen.absorb(data, arrived_s)
            if seen.is_done:
                break
        if seen.is_done:
            # Reads the end of the body, so that the connection can serve the next request.
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in received:
                    pass
        elif not seen.num_events:
            kind = response.headers.get("content-type", "no content type")
            raise RequestError("not an event stream", f"the answer is {kind}; no line begins with data:")
    finally:
        await response.aclose()


def transport_error(error: httpx.HTTPError, *, has_begun: bool = False) -> RequestError:
    """Name and detail of a failure below HTTP; `has_begun`: part of the answer had arrived."""
    detail = str(error) or type(error).__name__
    if is_refused(error):
        return RequestError("connection refused", "nothing listens at this address")
    if isinstance(error, httpx.ConnectError):
        return RequestError("cannot connect", detail)
    return RequestError("stream cut" if has_begun else "connection lost", detail)
