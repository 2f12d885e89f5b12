"""The Ray Serve deployment: one replica is one service behind two edges, HTTP and gRPC, on one event loop.

Ray is imported here, in `listeners` and in `__main__` only. Workers never see it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.grpc_util import RayServegRPCContext

from coordinator.access.api_keys import Scope
from coordinator.api.grpc import grpc_api
from coordinator.api.grpc.grpc_ingress import Pace
from coordinator.api.http.application import create_app
from coordinator.api.http.batch_service import BatchService
from coordinator.hosting.replica_shutdown import before_the_end
from coordinator.intake.generation_request import Origin
from coordinator.observability.metrics import serve_replica
from coordinator.service.generation_service import GenerationService
from coordinator.settings import REFUSALS_AT_ONCE, CoordinatorSettings, Listen
from outrider.concurrency import time_slices
from outrider.errors import ConfigurationError, OutriderError
from outrider.observability import logs
from outrider.observability.tracing import TRACEPARENT
from outrider.registry.redis_connection import redis_url_from
from outrider.settings import from_environment, from_mapping
from protos.outrider.v1 import generation_pb2

_log = logging.getLogger(__name__)

APPLICATION_NAME: Final = "outrider"
SHUTDOWN_TIMEOUT_S: Final = 10.0
# Import paths of what registers the services with Serve's gRPC servers.
GRPC_SERVICER_FUNCTIONS: Final = (
    "coordinator.api.grpc.grpc_ingress.add_GenerationServicer_to_server",
    "coordinator.api.grpc.grpc_health.add_HealthServicer_to_server",
)
GRPC_REFLECTION_FUNCTION: Final = "coordinator.api.grpc.grpc_reflection.add_ReflectionServicer_to_server"


@serve.ingress(None)
class Coordinator:
    """One replica of the service. It is stateless: its knowledge is in the registry or in open requests."""

    # Serve awaits it, so that the service opens on the loop that it will serve on.
    async def __init__(self, settings: CoordinatorSettings) -> None:  # type: ignore[misc]
        time_slices.use_short_slices()  # beside a worker's model thread on a small machine
        logs.configure(
            settings.log_format,
            level=logging.INFO if settings.logs_requests else logging.WARNING,
            path=None if settings.log_path is None else Path(settings.log_path),
        )
        self._service = GenerationService(settings)
        serve_replica(self._service.environment.metrics.registry, settings)
        self._batches = BatchService(self._service)
        await self._service.__aenter__()
        loop, requests = asyncio.get_running_loop(), self._service.environment.open_requests
        before_the_end(lambda: loop.call_soon_threadsafe(requests.end_all))
        await self._batches.__aenter__()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, self._batches.desk, is_echoing_request_id=False)

    async def __del__(self) -> None:
        await self._batches.__aexit__()
        await self._service.__aexit__()

    @property
    def pace(self) -> Pace:
        """Limits on the pace of gRPC clients."""
        environment = self._service.environment
        on_cut = environment.metrics.slow_readers.labels("connection").inc
        return Pace(environment.settings.client_stall_max_s, on_cut)

    async def Generate(
        self, request: generation_pb2.GenerationRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerationChunk]:
        """Serves outrider.v1.Generation.Generate."""
        with self._failing(grpc_context):
            origin = self._origin(grpc_context)
            async with aclosing(grpc_api.generate(self._service, request, origin)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """Serves outrider.v1.Generation.ListModels."""
        with self._failing(grpc_context):
            self._origin(grpc_context)
        return grpc_api.list_models(self._service)

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Tells the gRPC servers whether a target worker is usable (`coordinator.api.grpc.grpc_health`)."""
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._service.catalog.served() else status.NOT_SERVING)

    def _origin(self, grpc_context: RayServegRPCContext) -> Origin:
        """Authenticates a call by its metadata. Raises Unauthenticated or Forbidden."""
        metadata = dict(grpc_context.invocation_metadata() or ())
        return Origin(
            self._service.authenticate(metadata.get("authorization"), Scope.GENERATE),
            metadata.get(TRACEPARENT),
            metadata.get(grpc_api.CANARY_KEY_METADATA, ""),
        )

    @contextmanager
    def _failing(self, grpc_context: RayServegRPCContext) -> Iterator[None]:
        """Gives the call the status of an error that ends it."""
        try:
            yield
        except Exception as error:
            self._service.count_failure(error)
            if isinstance(error, OutriderError):  # of others Serve makes INTERNAL
                grpc_context.set_code(grpc.StatusCode[error.grpc_code])
                grpc_context.set_details(error.message)
            raise


def build_application(settings: CoordinatorSettings, num_replicas: int) -> Any:
    """Builds the Serve application for `serve.run`."""
    deployment = serve.deployment(
        Coordinator,
        name="coordinator",
        num_replicas=num_replicas,
        # Asking for CPUs would keep replicas from starting beside busy workers on a small machine.
        ray_actor_options={"num_cpus": 0},
        # What is more is refused by the replica itself, which knows who goes first and when to come back.
        max_ongoing_requests=settings.requests_max + REFUSALS_AT_ONCE,
        max_queued_requests=settings.requests_max,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        # A replica that leaves lets its requests finish, up to a bound that a stop of the whole can wait for.
        graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployment.bind(settings)


def application(args: Mapping[str, Any]) -> Any:
    """Builds the application for Serve's configuration files: `import_path: coordinator.hosting.app:application`.

    args: fields of `CoordinatorSettings`. What is a secret, or the same for all of an installation, comes from the
    environment where it is not given, by the variables of these fields; OUTRIDER_INSECURE=1, without which there have
    to be API keys. Replicas are the configuration's (`deployments`). Raises ValueError.
    """
    try:
        given: dict[str, Any] = {"redis_url": redis_url_from()}
        given |= from_mapping(CoordinatorSettings, args, "args of the coordinator")
        is_insecure = from_environment(Listen).get("is_insecure")
    except ConfigurationError as error:
        raise ValueError(error.message) from error
    if not given.get("api_keys_file") and not is_insecure:
        raise ValueError(
            "without OUTRIDER_API_KEYS whoever reaches the coordinator may ask: name a file of keys (`outrider keys`), "
            "or set OUTRIDER_INSECURE=1 where the network itself keeps strangers out"
        )
    if not given.get("redis_url"):
        raise ValueError("the coordinator's args lack redis_url")
    if isinstance(weights := given.get("tenant_weights"), Mapping):
        given["tenant_weights"] = tuple((name, float(weight)) for name, weight in weights.items())
    return build_application(CoordinatorSettings(**given), num_replicas=1)
