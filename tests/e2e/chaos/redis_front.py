"""Redis as the fleet has it: behind TLS, which its own program does not speak, and at one address over all its lives.

process ── TLS ──► link (broken by faults) ──► HAProxy ──► door (a relay that nobody breaks) ──► Redis
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import redis
import redis.asyncio

from coordinator.hosting.ingress import find_haproxy
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from tests.e2e.chaos.certificates import Certificates
from tests.e2e.chaos.clocks import Clock, find_library
from tests.e2e.chaos.links import Link


class RedisBehindTls:
    """Used on the event loop that started it."""

    def __init__(self, scratch: Path, certificates: Certificates) -> None:
        """`scratch` exists and is ours."""
        self.link = Link("redis")
        self.clock = Clock(scratch / "clock", find_library())
        self._scratch = scratch
        self._certificates = certificates
        self._door = Link("redis door")
        self._server = EmbeddedRedis(scratch, self.clock.environment)
        self._front: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        await self._door.start()
        await self.link.start()
        (port,) = free_ports(1)
        folder = self._certificates.issue("redis")
        path = self._scratch / "redis.cfg"
        path.write_text(
            "global\n    ssl-load-extra-del-ext\n    ssl-load-extra-files key\n    maxconn 2000\n"
            "defaults\n    mode tcp\n    timeout connect 1s\n    timeout client 1h\n    timeout server 1h\n"
            f"frontend f\n    bind 127.0.0.1:{port} ssl crt {folder}/tls.crt ca-file {folder}/ca.crt verify required\n"
            f"    default_backend b\nbackend b\n    retries 0\n    server redis {self._door.address}\n"
        )
        self._start_front()
        self.link.server_address = ("127.0.0.1", port)
        await self.begin()

    def _start_front(self) -> None:
        with (self._scratch / "redis-front.log").open("ab") as log:
            words = [str(find_haproxy(self._scratch)), "-f", str(self._scratch / "redis.cfg"), "-db"]
            self._front = subprocess.Popen(words, stdout=log, stderr=log)

    async def show_certificate(self) -> None:
        """Has the front read its files anew, which costs everybody a connection."""
        if self._front is not None:
            self._front.kill()
            await asyncio.to_thread(self._front.wait)
        self._start_front()

    async def stop(self) -> None:
        for each in (self.link, self._door):
            await each.stop()
        if self._front is not None:
            self._front.kill()
            await asyncio.to_thread(self._front.wait)
        if self._server.pid is not None:
            self.send(signal.SIGCONT)
        self._server.stop()

    async def begin(self) -> None:
        """An empty server, behind the same link."""
        url = self._server.start()
        self._door.server_address = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))

    def send(self, number: signal.Signals) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, number)

    def bury(self) -> None:
        """Stops the server after it was killed."""
        self._server.stop()

    @property
    def url(self) -> str:
        """The server's URL without TLS and past the link, for the suite itself."""
        return self._server.url

    def url_for(self, name: str) -> str:
        """The URL for a process of the fleet: over the link, with the process' own certificate."""
        password = self._server.url.removeprefix("redis://").partition("@")[0]
        folder = self._certificates.folder(name)
        query = f"ssl_certfile={folder}/tls.crt&ssl_keyfile={folder}/tls.key&ssl_ca_certs={folder}/ca.crt"
        return f"rediss://{password}@{self.link.address}/0?{query}"

    async def keys(self) -> set[str]:
        """The keys in Redis, except those that expire by themselves some time after a stream's end; empty if it does
        not answer."""
        client = redis.asyncio.Redis.from_url(
            self.url, decode_responses=True, socket_timeout=1.0, socket_connect_timeout=1.0
        )
        with contextlib.suppress(redis.RedisError, OSError):  # one that is stopped fails the closing, too
            async with client:
                return {
                    key
                    for key in map(str, await client.keys("*"))
                    if not (key.startswith("or:journal:") and await client.pttl(key) > 0)
                }
        return set()
