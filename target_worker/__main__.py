"""`python -m target_worker`: starts one target worker."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from outrider.engine.options import EngineOptions
from outrider.engine.threads import bind_threads, cores_of, keep_off
from outrider.observability.telemetry import TargetMetrics
from outrider.registry.worker_record import WorkerLoad
from outrider.security.tls import ANY_ROLE, Role
from outrider.settings import SettingError, from_flags
from outrider.worker.worker_facts import worker_info
from outrider.worker.worker_main import WorkerKind, grammar_compiler, serve_until_stopped
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import leave
from protos.outrider.v1 import hints_pb2_grpc, target_pb2_grpc
from target_worker.limits import EngineName, SchedulerLimits, Service

if TYPE_CHECKING:
    from outrider.engine.model import Engine
    from target_worker.local_heads import LocalHead

logger = logging.getLogger("target_worker")

PERMITTED: Final = {
    "/outrider.v1.Target/Generate": frozenset({Role.COORDINATOR}),
    "/outrider.v1.Target/SetSpeculation": frozenset({Role.COORDINATOR}),
    "/outrider.v1.Target/GetInfo": ANY_ROLE,
    "/outrider.v1.Hints/Exchange": frozenset({Role.DRAFT}),
}
KIND: Final = WorkerKind(
    "target",
    "Serves a target model: a complete generation server that also accepts draft workers' hints.",
    (EngineOptions, Service, SchedulerLimits, WorkerOptions),
    PERMITTED,
)
parse_arguments = KIND.parse_arguments


def lead_and_test(engine: Engine) -> None:
    """Makes the engine lead its ranks, if there are others, and tests it: from here on they must hear of it often."""
    from outrider.engine.loading.self_test import batch_invariance_failures

    engine.lead()
    if failures := batch_invariance_failures(engine):
        logger.warning("NOT batch-invariant here, output may depend on the batch composition: %s", "; ".join(failures))


def leave_room(config: EngineOptions, service: Service) -> EngineOptions:
    """Leaves cores to draft workers and memory for the draft head. Raises SettingError for more threads than there are,
    ModelLoadError where the head does not fit the model."""
    if (beside := service.num_threads_beside_draft) is not None:
        if beside > config.num_threads:
            why = f"--num-threads-beside-draft is {beside}; permitted: 1 to --num-threads ({config.num_threads})"
            raise SettingError("num_threads_beside_draft", why)
        config = replace(config, num_threads_beside_draft=beside)
    if service.draft_head is None:
        return config
    from outrider.engine.heads.loading import head_memory

    memory = head_memory(service.draft_head, config.model, config.dtype, is_local=service.local_head)
    return replace(config, beside_bytes=memory.fixed, beside_bytes_per_token=memory.per_token)


def add_head(engine: Engine, service: Service, metrics: TargetMetrics) -> LocalHead | None:
    """Makes the engine keep what the draft head reads; returns the head if it runs here. Raises ModelLoadError."""
    if service.draft_head is None:
        return None
    from outrider.engine.heads.loading import feature_source
    from target_worker.local_heads import load_local_head

    folder, config = service.draft_head, engine.config
    engine.tap(feature_source(folder, config.model, config.dtype, engine.device))
    if not service.local_head:
        return None
    return load_local_head(folder, config.model, engine, metrics.head_ms.observe)


async def serve(arguments: argparse.Namespace) -> None:
    """Loads the model, serves until told to stop. Raises OutriderError when it cannot start."""
    limits, service = from_flags(SchedulerLimits, arguments), from_flags(Service, arguments)
    name = arguments.served_model_name or arguments.model.resolve().name
    if (num_own := service.num_threads_beside_draft) is not None:
        bind_threads(cores_of(arguments.cpu_affinity))
    async with KIND.opened(arguments, partial(TargetMetrics, name, names=arguments.metrics_names)) as worker:
        process, metrics = worker.process, worker.metrics
        engine = await worker.load(partial(leave_room, service=service))
        keep_off(cores_of(arguments.cpu_affinity)[num_own:] if num_own is not None else [])
        # Imported late: torch takes seconds, for which neither --help nor a probe should wait.
        from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
        from target_worker.core_sharing import CoreSharing
        from target_worker.runner import TargetCore
        from target_worker.scheduling.scheduler import Scheduler
        from target_worker.serving.server import TargetServicer

        limits = replace(limits, max_model_len=engine.max_model_len, end_of_sequence_ids=engine.eos_token_ids)
        limits = replace(limits, verifies_branches=limits.verifies_branches and engine.feeds_trees)
        head = await worker.beside(lambda: add_head(engine, service, metrics))
        cores = CoreSharing() if engine.can_share_cores else None
        scheduler = Scheduler(limits, engine.allocator, engine.vocab_size, head, cores)
        info = await worker.beside(
            lambda: worker_info(
                *(engine, process.options, name, process.incarnation),
                max_num_seqs=limits.max_num_seqs,
                max_num_waiting=limits.max_num_waiting,
                num_speculative_tokens=limits.num_speculative_tokens,
            )
        )
        grammars = await worker.beside(lambda: grammar_compiler(engine, arguments.model))
        if (folder := service.draft_head) is not None:
            info.head_fingerprint = await worker.beside(partial(checkpoint_fingerprint, folder))
        await worker.beside(lambda: lead_and_test(engine))
        servicer = TargetServicer(info, metrics, grammars, scheduler.check_room, tracing=worker.tracing)
        servicer.hints.use_head(info.head_fingerprint)
        target_pb2_grpc.add_TargetServicer_to_server(servicer, process.services)
        hints_pb2_grpc.add_HintsServicer_to_server(servicer.hints, process.services)

        def load() -> WorkerLoad:
            num_waiting = scheduler.num_waiting + servicer.num_compiling
            return WorkerLoad(
                scheduler.num_running, num_waiting, scheduler.wait_ms, num_background=scheduler.num_background
            )

        core = TargetCore(scheduler, engine, metrics, cores)
        await serve_until_stopped(worker, engine, core, servicer, load, servicer.end_calls)


def parse_vllm_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """As `parse_arguments`, of a worker whose model vLLM runs."""
    from target_worker.vllm import worker

    return worker.kind(PERMITTED).parse_arguments(words)


def main(words: list[str]) -> int:
    """Runs the worker that a command line describes; returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine", type=EngineName, default=EngineName.OUTRIDER)
    try:
        chosen = parser.parse_known_args(words)[0].engine
    except SystemExit:
        chosen = EngineName.OUTRIDER  # whose parser names the value
    if chosen is EngineName.OUTRIDER:
        return KIND.main(serve, words)
    from target_worker.vllm import worker
    from target_worker.vllm.options import split_words

    own, vllm_flags = split_words(words)
    kind = worker.kind(PERMITTED)
    return kind.main(partial(worker.serve, kind, vllm_flags), own)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
