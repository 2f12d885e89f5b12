"""The start of a worker of either kind: its flags, its ranks, its model; and how long it serves."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.observability.tracing import Tracing
from outrider.registry.worker_record import Pool, WorkerLoad
from outrider.security.tls import Role
from outrider.settings import make_parser
from outrider.worker.engine_options import engine_config
from outrider.worker.model_thread import ActionT, Core, EventT
from outrider.worker.worker_options import worker_options
from outrider.worker.worker_process import WorkerProcess, identity, record_from_info, run_worker
from outrider.worker.worker_ranks import follow, own_cores
from outrider.worker.worker_servicer import WorkerServicer

if TYPE_CHECKING:
    from outrider.engine.model import Engine
    from outrider.grammar import GrammarCompiler
    from outrider.observability.telemetry import DraftMetrics, TargetMetrics


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """How a worker of one pool is started: its flags, and who may call which of its methods."""

    role: Pool
    description: str
    settings: tuple[type, ...]
    # Roles that may call each method, if there are certificates; a method that is not named is refused.
    permitted: Mapping[str, frozenset[Role]]

    def parse_arguments(self, arguments: list[str] | None = None) -> argparse.Namespace:
        parser = make_parser(f"{self.role}_worker", self.description, *self.settings)
        parser.set_defaults(role=self.role)
        return parser.parse_args(arguments)

    def main(self, serve: Callable[[argparse.Namespace], Awaitable[None]]) -> int:
        """Runs a worker, or a rank of one, by this process' command line; returns the exit status."""
        arguments = self.parse_arguments()
        if os.environ.get("RANK", "0") != "0":
            return follow(arguments)
        return run_worker(lambda: serve(arguments), own_cores(arguments.cpu_affinity), arguments.log_format)

    @asynccontextmanager
    async def loaded(self, arguments: argparse.Namespace) -> AsyncIterator[tuple[WorkerProcess, Engine, Tracing]]:
        """Loads the model and opens the server, which does not listen yet. Raises OutriderError."""
        # Imported late, so that --help and bad arguments do not wait for torch.
        from outrider.engine.loading.loading import load_model
        from outrider.engine.model import check_device
        from outrider.engine.ranks.rank_group import join_ranks

        options, config = worker_options(arguments), engine_config(arguments)
        check_device(config.device)  # before anything that takes time, or other ranks
        services = [*dict.fromkeys(method.split("/")[1] for method in self.permitted)]
        # Tracing is closed last: stopping the server ends the spans of calls that are cut off.
        async with (
            Tracing.to(arguments.otlp_endpoint, f"outrider-{self.role}", options.worker_id) as tracing,
            WorkerProcess(options, self.role, services, self.permitted) as process,
        ):
            engine = load_model(config, join_ranks(options.stall_exit_s))
            engine.lead()
            yield process, engine, tracing


def grammar_compiler(engine: Engine, tokenizer_dir: Path) -> GrammarCompiler:
    from outrider.grammar import GrammarCompiler

    path = tokenizer_dir / "tokenizer.json"
    return GrammarCompiler(path, vocab_size=engine.vocab_size, eos_token_ids=engine.eos_token_ids)


async def serve_until_stopped(
    process: WorkerProcess,
    engine: Engine,
    core: Core[EventT, ActionT],
    servicer: WorkerServicer[EventT, ActionT],
    metrics: TargetMetrics | DraftMetrics,
    load: Callable[[], WorkerLoad],
    on_grace_over: Callable[[], None] = lambda: None,
) -> None:
    """Runs the core on the model thread and serves, then frees the model. The callbacks are `WorkerProcess.run`'s."""
    info = servicer.info
    metrics.max_num_seqs.set(info.max_num_seqs)
    facts = {"metrics_port": process.serve_metrics(metrics.registry), **identity(info)}
    thread = process.make_thread(core, servicer.dispatch)
    servicer.bind(thread)
    thread.start()
    try:
        record = record_from_info(process.role, info)
        await process.run(record, load, servicer.start_draining, facts, on_grace_over)
    finally:
        if thread.stop():
            engine.dismiss()
