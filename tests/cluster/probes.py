"""Probes of a container, sent from the node to the pod's address, or run in the container, as a kubelet does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.pod_plan import Probe


@dataclass(slots=True)
class ProbeCount:
    """Turns single results into a verdict, which changes after so many equal ones in a row."""

    num_failures_max: int
    num_successes_min: int
    verdict: bool | None = None
    _num_equal: int = field(default=0, init=False)
    _last: bool | None = field(default=None, init=False)

    def put(self, is_success: bool) -> bool | None:
        """Takes a result; returns the verdict, None as long as there is none."""
        self._num_equal = self._num_equal + 1 if is_success is self._last else 1
        self._last = is_success
        if self._num_equal >= (self.num_successes_min if is_success else self.num_failures_max):
            self.verdict = is_success
        return self.verdict


Execute = Callable[[Sequence[str]], Awaitable[bool]]
"""Runs a command in the container; returns whether it succeeded."""


async def ask(probe: Probe, address: str, execute: Execute) -> bool:
    """Whether one probe succeeds."""
    with suppress(OSError, TimeoutError, httpx.HTTPError, grpc.RpcError):
        async with asyncio.timeout(probe.timeout_s):
            if probe.kind == "exec":
                return await execute(probe.words)
            return await _KINDS[probe.kind](probe, address)
    return False


async def verdicts(probe: Probe, address: str, execute: Execute, tell: Callable[[bool], None]) -> None:
    """Probes until it is cancelled, and tells each verdict."""
    count = ProbeCount(probe.num_failures_max, probe.num_successes_min)
    await asyncio.sleep(probe.delay_s)
    while True:
        verdict = count.put(await ask(probe, address, execute))
        if verdict is not None:
            tell(verdict)
        await asyncio.sleep(probe.period_s)


async def _ask_http(probe: Probe, address: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.get(f"http://{address}:{probe.port}{probe.target}")
    return 200 <= response.status_code < 400


async def _ask_tcp(probe: Probe, address: str) -> bool:
    _, writer = await asyncio.open_connection(address, probe.port)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


async def _ask_grpc(probe: Probe, address: str) -> bool:
    async with grpc.aio.insecure_channel(f"{address}:{probe.port}") as channel:
        request = health_pb2.HealthCheckRequest(service=probe.target)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe.timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


_KINDS: Final[dict[str, Callable[[Probe, str], Awaitable[bool]]]] = {
    "http": _ask_http,
    "tcp": _ask_tcp,
    "grpc": _ask_grpc,
}
