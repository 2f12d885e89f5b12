"""`python -m draft_worker.memory`: starts one memory worker."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Final

from draft_worker.links import TargetDialer
from draft_worker.memory.options import MemoryLimits, MemoryOptions
from draft_worker.memory.scheduler import MemoryCounts, MemoryScheduler
from draft_worker.messages import Action, Event
from draft_worker.server import DraftServicer
from outrider.observability.telemetry import MemoryMetrics
from outrider.registry.worker_record import MEMORY, WorkerLoad
from outrider.security.tls import ANY_ROLE, Role
from outrider.settings import from_flags
from outrider.worker.worker_facts import identity, record_from_info
from outrider.worker.worker_main import WorkerKind
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import WorkerProcess, leave
from protos.outrider.v1 import common_pb2, draft_pb2_grpc

KIND: Final = WorkerKind(
    "draft",
    "Serves a memory: remembers what targets have generated, and hints at it where the same tokens come again.",
    (MemoryOptions, MemoryLimits, WorkerOptions),
    {
        "/outrider.v1.Draft/Attach": frozenset({Role.COORDINATOR}),
        "/outrider.v1.Draft/GetInfo": ANY_ROLE,
    },
    "memory_worker",
)
parse_arguments = KIND.parse_arguments


class MemoryCore:
    """The scheduler of a memory worker as the core of its thread. There is no model, so hints are sent at once."""

    def __init__(self, scheduler: MemoryScheduler, metrics: MemoryMetrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._shown = MemoryCounts()
        self._num_forgotten = 0  # already exported

    def handle(self, event: Event, now: float) -> list[Action]:
        return self._scheduler.handle(event, now)

    def run_next(self, now: float) -> tuple[list[Action], float | None]:
        actions = self._scheduler.read_backlog() if self._scheduler.has_backlog else []
        self._show()
        return actions, 0.0 if self._scheduler.has_backlog else None

    def _show(self) -> None:
        metrics, scheduler = self._metrics, self._scheduler
        memory, counts, shown = scheduler.memory, scheduler.counts, self._shown
        metrics.num_sessions.set(scheduler.num_sessions)
        metrics.num_tokens.set(memory.num_tokens)
        metrics.num_scopes.set(memory.num_scopes)
        metrics.num_forgotten_tokens.inc(memory.num_forgotten_tokens - self._num_forgotten)
        metrics.num_lookups.inc(counts.num_lookups - shown.num_lookups)
        metrics.num_hits.inc(counts.num_hits - shown.num_hits)
        metrics.num_verified.inc(counts.num_verified - shown.num_verified)
        metrics.num_accepted.inc(counts.num_accepted - shown.num_accepted)
        self._num_forgotten = memory.num_forgotten_tokens
        self._shown = MemoryCounts(counts.num_lookups, counts.num_hits, counts.num_verified, counts.num_accepted)


def worker_info(process: WorkerProcess, options: MemoryOptions, limits: MemoryLimits) -> common_pb2.WorkerInfo:
    """The worker's description of itself. Raises ConfigurationError."""
    from outrider.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(options.tokenizer)
    return common_pb2.WorkerInfo(
        worker_id=process.options.worker_id,
        model_name=options.served_model_name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.num_ids,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        incarnation=process.incarnation,
        engine=MEMORY,
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until told to stop. Raises OutriderError when it cannot start."""
    options, limits = from_flags(MemoryOptions, arguments), from_flags(MemoryLimits, arguments)
    async with KIND.opened(arguments, partial(MemoryMetrics, options.served_model_name)) as worker:
        process, metrics = worker.process, worker.metrics
        info = await worker.beside(lambda: worker_info(process, options, limits))
        await process.find_redis()
        scheduler = MemoryScheduler(limits)
        dialer = TargetDialer(process.dialer)
        servicer = DraftServicer(info, scheduler, metrics, None, dialer, worker.tracing)
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, process.services)
        metrics.max_num_seqs.set(info.max_num_seqs)
        thread = process.make_thread(MemoryCore(scheduler, metrics), servicer.dispatch)
        servicer.bind(thread)
        thread.start()

        def load() -> WorkerLoad:
            return WorkerLoad(
                scheduler.num_sessions, round_trips=servicer.round_trips, num_background=scheduler.num_background
            )

        try:
            facts = {"metrics_port": worker.metrics_port, **identity(info)}
            await process.run(record_from_info(process.role, info), load, servicer.start_draining, facts)
        finally:
            thread.stop()
            await servicer.close()


if __name__ == "__main__":
    leave(KIND.main(serve))
