"""Registers grpc.health.v1.Health with gRPC servers, for kubelet, load balancers and gRPC's own clients.

`""` and `outrider.v1.Generation` are SERVING while at least one target worker is usable, as `/health` says over HTTP,
and NOT_SERVING while none is and while this replica or proxy leaves. `liveness` is always SERVING. No key is asked for,
so the number of calls is bounded, and one too many ends the oldest of the client that has most (`OpenCalls`).

Serve's servers ask a replica through Serve, as for any call: behind HAProxy that is the replica itself, and Serve's own
proxy chooses one. One question at a time is asked for all callers, whose number may be large, so that they cost the
replica nothing. A watch occupies no request of a replica and does not delay its end.

Serve's function runs inside the proxy or replica process, which finds it by its import path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from coordinator.api.grpc.grpc_ingress import Question, Unreadable, client_address, is_replica, read_or_report
from outrider.security.call_admission import OpenCalls, admitted

SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
READINESS: Final = ("", "outrider.v1.Generation")
LIVENESS: Final = "liveness"
FRESH_S: Final = 1.0
"""How old the known state may be before a caller waits for a new one; watches look as often."""
ANSWER_MAX_S: Final = 2.0
"""A replica that does not answer for so long is not ready."""
WATCH_MAX_S: Final = 1800.0
"""A client may have left without notice; one that has not watches again."""
_SERVES_ITSELF: Final = "/ray.serve.RayServeAPIService/Healthz"
_Status = health_pb2.HealthCheckResponse
Ask = Callable[[Any, Any], Awaitable[bytes]]


def add_HealthServicer_to_server(servicer: Any, server: Any) -> None:
    """Registers the service with a server of Serve's; `servicer` is Serve's placeholder."""
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    def ask(service_method: str) -> Ask:
        handler: Ask = server.service_handler_factory(
            service_method=service_method, streaming_type=gRPCStreamingType.UNARY_UNARY
        )
        return handler

    server.add_passthrough_service(SERVICE)  # else Serve would send its calls to a replica
    calls = OpenCalls(client_address if is_replica() else None)
    add_health(server, ask(_SERVES_ITSELF), ask(f"/{SERVICE}/Check"), calls)


def add_health(server: Any, is_here: Ask, is_ready: Ask, calls: OpenCalls) -> None:
    """Registers the service with any server; `is_here` and `is_ready` answer the questions of `Health`."""
    health = Health(is_here=is_here, is_ready=is_ready)
    codec = {
        "request_deserializer": read_or_report(health_pb2.HealthCheckRequest.FromString),
        "response_serializer": _Status.SerializeToString,
    }
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(health.check, **codec),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch, **codec),
    }
    methods = {name: admitted(method, calls.admission) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


@dataclass(frozen=True, slots=True)
class State:
    """The readiness of a server."""

    is_ready: bool
    is_leaving: bool = False


@dataclass(slots=True)
class Health:
    """Answers the calls of one server. `is_here` and `is_ready` are handlers of calls: whether the server itself takes
    requests, and a replica's answer."""

    is_here: Ask
    is_ready: Ask
    watch_max_s: float = WATCH_MAX_S
    fresh_s: float = FRESH_S
    _looked_s: float = field(default=float("-inf"))
    _look: asyncio.Task[State] | None = None

    async def check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        """Serves Health.Check."""
        status = await self._status(await _readable(request, context))
        if status is None:
            known = ", ".join(map(repr, (*READINESS, LIVENESS)))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no such service here; there are {known}")
        return _Status(status=status)

    async def watch(self, request: Any, context: Any) -> None:
        """Serves Health.Watch: the status now, and whenever it changes."""
        service = await _readable(request, context)
        try:
            async with asyncio.timeout(self.watch_max_s):
                await self._send_changes(service, context)
            why = "this server is leaving; watch again"
        except TimeoutError:
            why = f"a watch lasts {self.watch_max_s:g} s at most; watch again"
        await context.abort(grpc.StatusCode.UNAVAILABLE, why)

    async def _send_changes(self, service: str, context: Any) -> None:
        """Sends the status, and each change of it, until this server leaves."""
        sent = None
        while True:
            status = await self._status(service)
            if status is None:
                status = _Status.SERVICE_UNKNOWN  # not an error, by the protocol
            if status != sent:
                await context.write(_Status(status=status))
                sent = status
            if (await self.state()).is_leaving:
                return
            await asyncio.sleep(self.fresh_s)

    async def _status(self, service: str) -> Any:
        """A serving status; None for a service that is not here."""
        if service == LIVENESS:
            return _Status.SERVING
        if service not in READINESS:
            return None
        return _Status.SERVING if (await self.state()).is_ready else _Status.NOT_SERVING

    async def state(self) -> State:
        """The state, at most `fresh_s` old."""
        now_s = asyncio.get_running_loop().time()
        if self._look is None or (self._look.done() and now_s - self._looked_s >= self.fresh_s):
            self._looked_s, self._look = now_s, asyncio.create_task(self._ask(), name="health")
        return await asyncio.shield(self._look)  # others wait for it, too

    async def _ask(self) -> State:
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                here = Question()
                await self.is_here(health_pb2.HealthCheckRequest(), here)
                if not here.is_answered:
                    return State(is_ready=False, is_leaving=True)
                question = Question()
                answer = await self.is_ready(health_pb2.HealthCheckRequest(), question)
        except TimeoutError:
            return State(is_ready=False)
        return State(question.is_answered and _Status.FromString(answer).status == _Status.SERVING)


async def _readable(request: Any, context: Any) -> str:
    """The service that a request names."""
    if isinstance(request, Unreadable):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.cause)
    return str(request.service)
