"""Sends one streamed request and time-stamps what comes back. Whatever goes wrong becomes part of the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.cli.bench.stream import EventSplitter, Observation, RequestError
from outrider.cli.bench.summary import RequestResult
from outrider.cli.bench.transport import SeparatePools
from outrider.cli.client import error_text

CONNECT_TIMEOUT_S = 10.0
# After [DONE] only the end of the body is missing; a server that forgets it costs a connection, not an answer.
DRAIN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Server:
    """One server under test."""

    name: str
    url: str  # http://host:port, without /v1
    model: str = ""


def new_bench_client(timeout_s: float, api_key: str | None) -> httpx.AsyncClient:
    """One client for all servers, with as many connections as there are requests, so nobody waits for one.

    `timeout_s` is for a whole answer; `observe` enforces it. Proxies in the environment would be measured too.
    """
    return httpx.AsyncClient(
        headers={
            "Accept-Encoding": "identity",  # events are time-stamped as they come, so nothing may hold them back
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        },
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s), pool=None),
        transport=SeparatePools(),
        trust_env=False,
    )


async def observe(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], *, index: int, timeout_s: float
) -> RequestResult:
    """POSTs `body` to `url` and returns what was measured, or why not, within `timeout_s` seconds. Never raises."""
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
            # The end of the body, so that the connection can serve the next request.
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in received:
                    pass
        elif not seen.num_events:
            kind = response.headers.get("content-type", "no content type")
            raise RequestError(
                "not an event stream", f"the answer is {kind}, none of its lines begins with data:"
            )
    finally:
        await response.aclose()


def transport_error(error: httpx.HTTPError, *, has_begun: bool = False) -> RequestError:
    """What to call a failure below HTTP; `has_begun`: part of the answer had come."""
    detail = str(error) or type(error).__name__
    if _is_refused(error):
        return RequestError("connection refused", "nothing listens at this address")
    if isinstance(error, httpx.ConnectError):
        return RequestError("cannot connect", detail)
    return RequestError("stream cut" if has_begun else "connection lost", detail)


def _is_refused(error: BaseException | None) -> bool:
    """Whether the system's own error lies below what httpx, httpcore and anyio made of it."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_refused, error.exceptions))
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _is_refused(error.__cause__ or error.__context__)
