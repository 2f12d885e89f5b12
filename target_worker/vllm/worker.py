"""The start of a target worker on vLLM: its flags, its engine, its description; and how long it serves."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

from outrider.engine.loading.checkpoint_files import tensors_of, weight_files
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.errors import ConfigurationError
from outrider.model_files import read_json
from outrider.observability.telemetry import TargetMetrics
from outrider.observability.vllm_names import MetricsNames
from outrider.security.tls import Role
from outrider.settings import from_flags
from outrider.worker.worker_facts import identity, record_from_info
from outrider.worker.worker_main import WorkerKind
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import WorkerProcess
from protos.outrider.v1 import common_pb2, hints_pb2_grpc, target_pb2_grpc
from target_worker.limits import EngineName, Service
from target_worker.messages import Action
from target_worker.serving.server import TargetServicer
from target_worker.vllm.engine import EngineDescription, EngineLoad, VllmEngine, prepare
from target_worker.vllm.hints import EngineDoor, SessionHints
from target_worker.vllm.options import VllmOptions
from target_worker.vllm.sessions import EngineSessions

logger = logging.getLogger("target_worker")

_EPILOG: Final = "Flags behind -- are vLLM's own, as `vllm serve --help` lists them."


def kind(permitted: dict[str, frozenset[Role]]) -> WorkerKind:
    """The worker's kind. `permitted`: roles that may call each of a target's methods."""
    description = f"Serves a target model that vLLM runs, and accepts draft workers' hints. {_EPILOG}"
    return WorkerKind("target", description, (VllmOptions, Service, WorkerOptions), permitted)


async def serve(kind: WorkerKind, vllm_flags: tuple[str, ...], arguments: argparse.Namespace) -> None:
    """Starts vLLM and serves until told to stop. Raises OutriderError when it cannot start, or vLLM ends."""
    options = from_flags(VllmOptions, arguments, vllm_flags=vllm_flags)
    service = from_flags(Service, arguments)
    if service.draft_head is not None:
        raise ConfigurationError(
            f"--draft-head {service.draft_head}: vLLM keeps no features for draft workers; draft with a model instead, "
            "or leave --engine out"
        )
    name = service.served_model_name or Path(options.model).name
    make_metrics = partial(TargetMetrics, name, names=MetricsNames.OUTRIDER)
    async with kind.opened(arguments, make_metrics) as worker:
        process, metrics = worker.process, worker.metrics
        if service.metrics_names is not MetricsNames.OUTRIDER:
            metrics.registry.register(VllmMetrics())
        await process.beside(lambda: prepare(options), is_watched=False)
        await process.find_redis()
        parts: list[EngineSessions] = []

        def dispatch(actions: list[Action]) -> None:
            servicer.dispatch(actions)

        def observe(load: EngineLoad) -> None:
            for each in parts:
                each.observe(load)

        hints = SessionHints(lambda action: dispatch([action]), metrics.hint_wait_s.inc)
        async with EngineDoor(hints) as door:
            # Not watched: it is other processes that load.
            engine = await process.beside(
                lambda: VllmEngine.load(options, name, door.path, observe),
                is_watched=False,
            )
            try:
                info = await process.beside(lambda: worker_info(process, engine.description, options, name))
                sessions = EngineSessions(
                    *(engine, hints, metrics, dispatch, process.request_stop), max_num_waiting=options.max_num_waiting
                )
                parts.append(sessions)
                servicer = TargetServicer(info, metrics, None, tracing=worker.tracing)
                target_pb2_grpc.add_TargetServicer_to_server(servicer, process.services)
                hints_pb2_grpc.add_HintsServicer_to_server(servicer.hints, process.services)
                metrics.max_num_seqs.set(info.max_num_seqs)
                servicer.bind(sessions)
                process.watch(sessions.stalled_s)
                facts = {"metrics_port": worker.metrics_port, **identity(info)}
                record = record_from_info(process.role, info)
                try:
                    await process.run(
                        *(record, lambda: sessions.load, servicer.start_draining, facts), servicer.end_calls
                    )
                finally:
                    await sessions.end()
            finally:
                engine.close()


def worker_info(
    process: WorkerProcess, about: EngineDescription, options: VllmOptions, name: str
) -> common_pb2.WorkerInfo:
    """The worker's description of itself. Raises ConfigurationError."""
    from outrider.text.tokenizer import fingerprint

    return common_pb2.WorkerInfo(
        worker_id=process.options.worker_id,
        model_name=name,
        tokenizer_fingerprint=fingerprint(about.model_dir),
        vocab_size=about.vocab_size,
        max_model_len=about.max_model_len,
        max_num_seqs=about.max_num_seqs,
        max_num_waiting=options.max_num_waiting,
        num_speculative_tokens=options.num_speculative_tokens,
        dtype=about.dtype,
        incarnation=process.incarnation,
        num_model_parameters=num_parameters(about.model_dir),
        weights_fingerprint=_weights_of(about.model_dir),
        numerics=about.numerics,
        engine=EngineName.VLLM.value,
    )


def num_parameters(model_dir: Path) -> int:
    """Numbers in a checkpoint's tensors; 0 for a format that is not ours to read."""
    try:
        files = weight_files(model_dir, read_json(model_dir / "config.json"))
        return sum(math.prod(tensor.shape) for path in files for tensor in tensors_of(path))
    except (ConfigurationError, OSError):
        return 0


def _weights_of(model_dir: Path) -> str:
    """The checkpoint's fingerprint; empty, which equals only itself, for a format that is not ours to read."""
    try:
        return checkpoint_fingerprint(model_dir)
    except ConfigurationError as error:
        logger.warning("no fingerprint of the weights, so no session goes on at another worker: %s", error.message)
        return ""


class VllmMetrics(Collector):
    """vLLM's own metrics, from the registry that it registers them in."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in self._registry.collect() if metric.name.startswith("vllm:"))

    def describe(self) -> Iterable[Metric]:
        return []
