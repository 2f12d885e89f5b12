"""The Ray Serve deployment: one replica is one service behind two edges, HTTP and gRPC, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Final

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.grpc_util import RayServegRPCContext

from coordinator.api.grpc.grpc_ingress import Pace
from coordinator.hosting.replica import Replica
from coordinator.hosting.replica_shutdown import before_the_end
from coordinator.intake.request_limit import ongoing_max
from coordinator.settings import DRAIN_GRACE_S, CoordinatorSettings, Listen
from outrider.errors import ConfigurationError, OutriderError
from outrider.objective import tenant_objective
from outrider.registry.redis_connection import redis_url_from
from outrider.settings import from_environment, from_mapping
from protos.outrider.v1 import generation_pb2

APPLICATION_NAME: Final = "outrider"
# Import paths of what registers the services with Serve's gRPC servers.
GRPC_SERVICER_FUNCTIONS: Final = (
    "coordinator.api.grpc.grpc_ingress.add_GenerationServicer_to_server",
    "coordinator.api.grpc.grpc_health.add_HealthServicer_to_server",
)
GRPC_REFLECTION_FUNCTION: Final = "coordinator.api.grpc.grpc_reflection.add_ReflectionServicer_to_server"


@serve.ingress(None)
class Coordinator:
    """A replica that Ray Serve hosts, in an actor of its own."""

    # Serve awaits it, so that the service opens on the loop that it will serve on.
    async def __init__(self, settings: CoordinatorSettings) -> None:  # type: ignore[misc]
        self._replica = Replica(settings)
        await self._replica.__aenter__()
        self._calls = self._replica.grpc_calls
        self.admission = self._calls.admission(self._replica.limit)
        """The admission of calls to this replica's own gRPC server."""
        loop, end_requests = asyncio.get_running_loop(), self._replica.end_requests
        before_the_end(lambda: loop.call_soon_threadsafe(end_requests))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._replica.http_application(is_echoing_request_id=False)  # Serve returns it itself

    async def __del__(self) -> None:
        await self._replica.__aexit__()

    @property
    def pace(self) -> Pace:
        """Limits on the pace of gRPC clients."""
        return self._calls.pace

    async def Generate(
        self, request: generation_pb2.GenerationRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerationChunk]:
        """Serves outrider.v1.Generation.Generate."""
        with self._failing(grpc_context):
            chunks = await self._calls.generate(request, grpc_context.invocation_metadata())
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """Serves outrider.v1.Generation.ListModels."""
        with self._failing(grpc_context):
            return await self._calls.list_models(grpc_context.invocation_metadata())

    async def Authenticate(
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """Tells Serve's proxy whether a caller may ask, before it reads the caller's message."""
        with self._failing(grpc_context):
            await self._calls.authenticate(grpc_context.invocation_metadata())
        return generation_pb2.ListModelsResponse()

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Tells the gRPC servers whether a target worker is usable (`coordinator.api.grpc.grpc_health`)."""
        return self._calls.readiness()

    @contextmanager
    def _failing(self, grpc_context: RayServegRPCContext) -> Iterator[None]:
        """Gives the call the status of an error that ends it."""
        try:
            with self._calls.counted():
                yield
        except OutriderError as error:
            grpc_context.set_code(grpc.StatusCode[error.grpc_code])
            grpc_context.set_details(error.told)
            raise


def build_application(settings: CoordinatorSettings, num_replicas: int, drain_grace_s: float = DRAIN_GRACE_S) -> Any:
    """Builds the Serve application for `serve.run`."""
    deployment = serve.deployment(
        Coordinator,
        name="coordinator",
        num_replicas=num_replicas,
        # Asking for CPUs would keep replicas from starting beside busy workers on a small machine.
        ray_actor_options={"num_cpus": 0},
        # Nothing that lasts reaches it: Serve would let requests wait, and read their bodies whole, however long.
        max_ongoing_requests=ongoing_max(settings.requests_max),
        max_queued_requests=settings.requests_max,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        # A replica that leaves lets its requests finish, up to a bound that a stop of the whole can wait for.
        graceful_shutdown_timeout_s=drain_grace_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployment.bind(settings)


def application(args: Mapping[str, Any]) -> Any:
    """Builds the application for Serve's configuration files: `import_path: coordinator.hosting.app:application`.

    args: fields of `CoordinatorSettings`. What is a secret, or the same for all of an installation, comes from the
    environment where it is not given, by the variables of these fields; OUTRIDER_INSECURE=1, without which there have
    to be API keys or an identity provider. Replicas are the configuration's (`deployments`). Raises ValueError.
    """
    try:
        given: dict[str, Any] = {"redis_url": redis_url_from()}
        given |= from_mapping(CoordinatorSettings, args, "args of the coordinator")
        is_insecure = from_environment(Listen).get("is_insecure")
    except ConfigurationError as error:
        raise ValueError(error.message) from error
    if not given.get("api_keys_file") and not given.get("oidc_issuer") and not is_insecure:
        raise ValueError(
            "without OUTRIDER_API_KEYS whoever reaches the coordinator may ask: name a file of keys (`outrider keys`) "
            "or an identity provider (OUTRIDER_OIDC_ISSUER), or set OUTRIDER_INSECURE=1 where the network itself "
            "keeps strangers out"
        )
    if not given.get("redis_url"):
        raise ValueError("the coordinator's args lack redis_url")
    if isinstance(weights := given.get("tenant_weights"), Mapping):
        given["tenant_weights"] = tuple((name, float(weight)) for name, weight in weights.items())
    if isinstance(objectives := given.get("tenant_objectives"), Mapping):
        given["tenant_objectives"] = tuple((name, tenant_objective(name, times)) for name, times in objectives.items())
    return build_application(CoordinatorSettings(**given), num_replicas=1)
