"""The Ray Serve deployment: one replica is one service behind two edges, HTTP and gRPC, on one event loop.

Ray is imported here, in `listeners` and in `__main__` only. Workers never see it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import grpc
from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.grpc_util import RayServegRPCContext

from coordinator import grpc_api
from coordinator.http_api import create_app
from coordinator.service import GenerationService
from coordinator.settings import REFUSALS_AT_ONCE, CoordinatorSettings
from outrider import turns
from outrider.errors import OutriderError
from protos.outrider.v1 import generation_pb2

_log = logging.getLogger(__name__)

APPLICATION_NAME: Final = "outrider"
# Import path of what registers the service with Serve's gRPC proxy.
GRPC_SERVICER_FUNCTIONS: Final = ("coordinator.grpc_ingress.add_GenerationServicer_to_server",)


@serve.ingress(None)
class Coordinator:
    """One replica. Stateless: everything it knows comes from the registry or lives in an open request."""

    # Serve awaits it, so that the service opens on the loop that it will serve on.
    async def __init__(self, settings: CoordinatorSettings) -> None:  # type: ignore[misc]
        turns.take_short_turns()  # beside a worker's model thread on a small machine
        self._service = GenerationService(settings)
        await self._service.__aenter__()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, is_echoing_request_id=False)

    async def __del__(self) -> None:
        await self._service.__aexit__()

    async def Generate(
        self, request: generation_pb2.GenerationRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerationChunk]:
        """outrider.v1.Generation.Generate."""
        try:
            async with aclosing(grpc_api.generate(self._service, request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except OutriderError as error:
            self._service.count_failure(error)
            grpc_context.set_code(grpc.StatusCode[error.grpc_code])
            grpc_context.set_details(error.message)
            raise

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest
    ) -> generation_pb2.ListModelsResponse:
        """outrider.v1.Generation.ListModels."""
        return grpc_api.list_models(self._service)


def build_application(settings: CoordinatorSettings, num_replicas: int) -> Any:
    """The Serve application, to hand to `serve.run`."""
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
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    return deployment.bind(settings)
