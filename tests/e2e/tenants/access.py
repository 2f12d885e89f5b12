"""A coordinator's addresses, the key of one tenant, and clients for both of its ports.

An `Access` is plain data, so that it can be sent to the process in which the hostile tenant runs.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import grpc
import grpc.aio
import httpx

ANSWER_MAX_S: Final = 60.0
"""Longest that a client here waits for one answer."""


@functools.cache
def tls_context(authority: str) -> ssl.SSLContext:
    """A context that trusts this authority. Making one takes longer than a short request."""
    return ssl.create_default_context(cafile=authority)


@dataclass(frozen=True)
class Access:
    """Everything that a tenant knows of an installation."""

    url: str  # http(s)://host:port
    grpc_address: str
    key: str
    authority: str | None
    """File of the authority that the public certificates come from; None where the public ports have no TLS."""
    source: str = "127.0.0.1"
    """Address that connections of HTTP come from: limits may be per address."""
    bounded_key: str = ""
    """The key of a tenant that may send only a few requests a minute."""
    worker_redis_url: str = ""
    """Redis as a worker may use it: a scenario about a compromised worker needs it."""
    worker_ids: tuple[str, ...] = ()
    """Names that no tenant may learn from an error."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),)

    @property
    def context(self) -> ssl.SSLContext | None:
        return None if self.authority is None else tls_context(self.authority)

    @property
    def http_address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        """A client with connections of its own."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key or self.key}"},
            transport=httpx.AsyncHTTPTransport(verify=self.context or False, local_address=self.source),
            timeout=ANSWER_MAX_S,
            trust_env=False,
        )

    def channel(self) -> grpc.aio.Channel:
        """A channel with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.authority is None:
            return grpc.aio.insecure_channel(self.grpc_address, options=options)
        with open(self.authority, "rb") as file:
            credentials = grpc.ssl_channel_credentials(file.read())
        return grpc.aio.secure_channel(self.grpc_address, credentials, options=options)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the HTTP port."""
        host, port = self.http_address
        return await asyncio.open_connection(host, port, ssl=self.context, local_addr=(self.source, 0))

    async def connect_grpc(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the gRPC port."""
        host, _, port = self.grpc_address.rpartition(":")
        context = None
        if self.authority is not None:
            context = ssl.create_default_context(cafile=self.authority)
            context.set_alpn_protocols(["h2"])
        return await asyncio.open_connection(host, int(port), ssl=context, local_addr=(self.source, 0))
