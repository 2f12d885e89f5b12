"""Connections for a load generator: one pool per request in flight.

A shared pool would be the bottleneck: httpcore scans all of its connections several times whenever a request starts
or ends. With some hundreds of them that costs more than the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

# Below the 5 s after which uvicorn, and so most servers, close idle connections: a request must not meet a
# closing one.
KEEPALIVE_S = 2.0

_Origin = tuple[str, str, int | None]


class SeparatePools(httpx.AsyncBaseTransport):
    """As many pools as requests were ever in flight at once. No request waits for another's connection."""

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context(trust_env=False)  # making one takes longer than a request
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._idle: dict[_Origin, list[httpx.AsyncHTTPTransport]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request. Closing the response's stream returns the pool."""
        idle = self._idle.setdefault((request.url.scheme, request.url.host, request.url.port), [])
        pool = idle.pop() if idle else self._new_pool()
        try:
            response = await pool.handle_async_request(request)
        except BaseException:
            idle.append(pool)  # the pool has closed the connection itself
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_Lent(response.stream, pool, idle),
            extensions=response.extensions,
        )

    def _new_pool(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        pool = httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, trust_env=False)
        self._all.append(pool)
        return pool

    async def aclose(self) -> None:
        """Closes every connection."""
        for pool in self._all:
            await pool.aclose()


class _Lent(httpx.AsyncByteStream):
    """A response body that returns its pool when it ends."""

    def __init__(
        self,
        body: httpx.AsyncByteStream,
        pool: httpx.AsyncHTTPTransport,
        idle: list[httpx.AsyncHTTPTransport],
    ) -> None:
        self._body, self._pool, self._idle = body, pool, idle
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            if not self._is_closed:
                self._is_closed = True
                self._idle.append(self._pool)
