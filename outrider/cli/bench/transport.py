"""Connections for a load generator: a pool of its own for each request under way.

A pool shared by all would be the bottleneck: httpcore looks at all of its connections, several times over, whenever a
request begins or ends, which with some hundreds of them costs more than the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

# Below the 5 s after which uvicorn, and so most servers, hang up: a request must not meet a connection that closes.
KEEPALIVE_S = 2.0

_Origin = tuple[str, str, int | None]


class SeparatePools(httpx.AsyncBaseTransport):
    """As many pools as requests were ever under way at once. No request waits for another's connection."""

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context(trust_env=False)  # takes longer to make than a request
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._idle: dict[_Origin, list[httpx.AsyncHTTPTransport]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response's stream gives the pool back when it is closed."""
        idle = self._idle.setdefault((request.url.scheme, request.url.host, request.url.port), [])
        pool = idle.pop() if idle else self._new_pool()
        try:
            response = await pool.handle_async_request(request)
        except BaseException:
            idle.append(pool)  # it has closed the connection itself
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
    """A body; with its end the pool is idle again."""

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
