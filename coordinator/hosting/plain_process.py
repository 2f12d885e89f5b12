"""A coordinator without Ray: one replica in this process, on one event loop.

    clients ──► this process     HTTP by uvicorn, gRPC by grpc.aio

Order of a graceful end, after SIGTERM or SIGINT:

1. `/-/healthz` and health over gRPC say that this process leaves. Requests still come in, for `drain_notice_s`, until
   load balancers have noticed.
2. The listeners close. Requests finish, for `drain_grace_s`. Shortly before its end those that are left end with an
   error, after which their clients can resume them elsewhere.
3. What has not ended then is cut off, and the process ends.

A second signal ends the waiting: requests end with their error at once.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import grpc.aio
import uvloop

from coordinator.api.grpc.grpc_server import make_server
from coordinator.hosting.http_server import HttpServer, connections_max, raise_descriptor_limit
from coordinator.hosting.replica import Replica
from coordinator.intake.request_limit import RequestLimit
from coordinator.settings import CoordinatorSettings, Listen
from outrider.addresses import join_address
from outrider.errors import ConfigurationError, OutriderError
from outrider.visible_text import visible

END_MARGIN_S: Final = 2.0
"""Time that the last errors have to reach clients."""
_LOOK_EVERY_S: Final = 0.05
"""Whether requests are left."""
Announce = Callable[..., object]
"""Tells that requests can come in, with facts about how they do."""


def run(settings: CoordinatorSettings, listen: Listen, announce: Announce) -> int:
    """Serves until a signal; returns the exit status."""
    raise_descriptor_limit()
    try:
        uvloop.run(PlainProcess(settings, listen, announce).serve())
    except OutriderError as error:
        print(visible(f"coordinator: {error.message}"), file=sys.stderr)
        return 1
    return 0


class PlainProcess:
    """Serves one replica until a signal."""

    def __init__(self, settings: CoordinatorSettings, listen: Listen, announce: Announce) -> None:
        self._settings, self._listen, self._announce = settings, listen, announce
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()

    async def serve(self) -> None:
        """Returns after the end. Raises ConfigurationError if it cannot begin."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        async with Replica(self._settings) as replica:
            if self._stop.is_set():  # meanwhile
                return
            listen, limit = self._listen, replica.limit
            http = HttpServer(replica.http_application(), listen.host, listen.port, self._stop.is_set)
            rpc = make_server(
                replica.grpc_calls,
                limit,
                self._stop.is_set,
                has_reflection=not self._settings.knows_callers,  # it knows nothing of keys
                connections_max=connections_max() // 2,
            )
            grpc_port = _bind(rpc, listen.host, listen.grpc_port)
            await rpc.start()
            try:
                port = await http.start()
            except OSError as error:
                raise ConfigurationError(f"--port {listen.port} on {listen.host}: {error.strerror}") from error
            gc.collect()
            gc.freeze()  # what is there now stays, and is not looked through again
            self._announce(port=port, grpc_port=grpc_port, metrics_port=replica.metrics_port)
            await self._stop.wait()
            await self._drain(replica, limit, http, rpc)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _drain(self, replica: Replica, limit: RequestLimit, http: HttpServer, rpc: grpc.aio.Server) -> None:
        await self._unless_hurried(asyncio.sleep(self._listen.drain_notice_s))
        grace_s = self._listen.drain_grace_s
        stopping = asyncio.gather(http.stop(), self._stop_rpc(rpc, limit))
        patience_s = max(grace_s - END_MARGIN_S, grace_s / 2)
        await self._unless_hurried(asyncio.wait((stopping,), timeout=patience_s))
        if not stopping.done():
            replica.end_requests()
            await asyncio.wait((stopping,), timeout=min(END_MARGIN_S, grace_s / 2))
        if not stopping.done():
            await asyncio.gather(http.cut(), rpc.stop(None))
        await stopping

    async def _stop_rpc(self, rpc: grpc.aio.Server, limit: RequestLimit) -> None:
        """Takes no more calls, and returns when no request is left; watches and idle connections are not waited for."""
        closing = asyncio.create_task(rpc.stop(self._listen.drain_grace_s + END_MARGIN_S))
        while limit.num and not closing.done():  # noqa: ASYNC110 - it is asked, it does not tell
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.wait((closing,), timeout=END_MARGIN_S)  # the last statuses are on their way
        await rpc.stop(None)
        await closing

    async def _unless_hurried(self, waiting: Awaitable[object]) -> None:
        """Waits, at most until the second signal."""
        hurrying = asyncio.ensure_future(self._hurry.wait())
        tasks = (asyncio.ensure_future(waiting), hurrying)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


def _bind(rpc: grpc.aio.Server, host: str, port: int) -> int:
    """Gives the server its address; returns the port, which the system chooses for 0. Raises ConfigurationError."""
    try:
        return int(rpc.add_insecure_port(join_address(host, port)))
    except RuntimeError as error:
        raise ConfigurationError(f"--grpc-port {port} on {host} is not free") from error
