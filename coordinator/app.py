"""The Ray Serve deployment: one replica is one service behind two edges, HTTP and gRPC, on one event loop.

Ray is imported here, in `listeners` and in `__main__` only. Workers never see it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import grpc
from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.grpc_util import RayServegRPCContext

from coordinator import grpc_api
from coordinator.generation_request import Origin
from coordinator.grpc_ingress import Pace
from coordinator.http_api import create_app
from coordinator.metrics import serve_replica
from coordinator.service import GenerationService
from coordinator.settings import REFUSALS_AT_ONCE, CoordinatorSettings
from outrider import logs, turns
from outrider.api_keys import Scope
from outrider.errors import ConfigurationError, OutriderError
from outrider.logs import LogFormat
from outrider.redis_connection import redis_url_from
from outrider.tracing import TRACEPARENT
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
        logs.configure(
            settings.log_format,
            level=logging.INFO if settings.logs_requests else logging.WARNING,
            path=None if settings.log_path is None else Path(settings.log_path),
        )
        self._service = GenerationService(settings)
        serve_replica(self._service.environment.metrics.registry, settings)
        await self._service.__aenter__()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, is_echoing_request_id=False)

    async def __del__(self) -> None:
        await self._service.__aexit__()

    @property
    def pace(self) -> Pace:
        """What clients over gRPC are held to."""
        environment = self._service.environment
        on_cut = environment.metrics.slow_readers.labels("connection").inc
        return Pace(environment.settings.client_stall_max_s, on_cut)

    async def Generate(
        self, request: generation_pb2.GenerationRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[generation_pb2.GenerationChunk]:
        """outrider.v1.Generation.Generate."""
        try:
            async with aclosing(
                grpc_api.generate(self._service, request, self._origin(grpc_context))
            ) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            self._fail(error, grpc_context)
            raise

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb2.ListModelsResponse:
        """outrider.v1.Generation.ListModels."""
        try:
            self._origin(grpc_context)
        except OutriderError as error:
            self._fail(error, grpc_context)
            raise
        return grpc_api.list_models(self._service)

    def _origin(self, grpc_context: RayServegRPCContext) -> Origin:
        """By the call's metadata. Raises Unauthenticated or Forbidden."""
        metadata = dict(grpc_context.invocation_metadata() or ())
        return Origin(
            self._service.authenticate(metadata.get("authorization"), Scope.GENERATE),
            metadata.get(TRACEPARENT),
            metadata.get(grpc_api.CANARY_KEY_METADATA, ""),
        )

    def _fail(self, error: Exception, grpc_context: RayServegRPCContext) -> None:
        self._service.count_failure(error)
        if not isinstance(error, OutriderError):
            return  # Serve makes INTERNAL of it
        grpc_context.set_code(grpc.StatusCode[error.grpc_code])
        grpc_context.set_details(error.message)


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


def application(args: Mapping[str, Any]) -> Any:
    """For Serve's own configuration files: `import_path: coordinator.app:application`.

    args: fields of `CoordinatorSettings`. What is a secret, or the same for all of an installation, comes from the
    environment where it is not given: OUTRIDER_REDIS_URL or OUTRIDER_REDIS_URL_FILE, OUTRIDER_API_KEYS and
    OUTRIDER_TLS_DIR; OUTRIDER_REQUIRE_WORKER_IDS=1; OUTRIDER_INSECURE=1, without which there have to be API keys; and
    OUTRIDER_METRICS_INSECURE=1, without which a metrics port beside keys has to have certificates. Replicas are the
    configuration's (`deployments`). Raises ValueError.
    """
    known = {field.name for field in fields(CoordinatorSettings)}
    if unknown := sorted(args.keys() - known):
        raise ValueError(
            f"unknown args of the coordinator: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    try:
        url = redis_url_from()
    except ConfigurationError as error:
        raise ValueError(error.message) from error
    given = {
        "redis_url": url,
        "api_keys_file": os.environ.get("OUTRIDER_API_KEYS"),
        "tls_dir": os.environ.get("OUTRIDER_TLS_DIR"),
        "require_worker_ids": os.environ.get("OUTRIDER_REQUIRE_WORKER_IDS") == "1",
        "is_metrics_insecure": os.environ.get("OUTRIDER_METRICS_INSECURE") == "1",
        **args,
    }
    if not given["api_keys_file"] and os.environ.get("OUTRIDER_INSECURE") != "1":
        raise ValueError(
            "without OUTRIDER_API_KEYS whoever reaches the coordinator may ask: name a file of keys (`outrider keys`), "
            "or set OUTRIDER_INSECURE=1 where the network itself keeps strangers out"
        )
    if missing := [name for name in ("tokenizer_dir", "redis_url") if not given.get(name)]:
        raise ValueError(f"the coordinator's args lack {' and '.join(missing)}")
    if isinstance(names := given.get("served_model_names"), list):
        given["served_model_names"] = tuple(names)
    if isinstance(weights := given.get("tenant_weights"), Mapping):
        given["tenant_weights"] = tuple((name, float(weight)) for name, weight in weights.items())
    if "log_format" in given:
        given["log_format"] = LogFormat(given["log_format"])
    return build_application(CoordinatorSettings(**given), num_replicas=1)
