"""The start of a worker of either kind: its flags, its ranks, its model; and how long it serves."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.engine.options import EngineOptions
from outrider.observability.telemetry import WorkerMetrics
from outrider.observability.tracing import Tracing
from outrider.registry.worker_record import Pool, WorkerLoad
from outrider.security.tls import Role
from outrider.settings import make_parser
from outrider.worker.engine_options import ServedEngine, engine_config
from outrider.worker.model_thread import ActionT, Core, EventT
from outrider.worker.worker_facts import identity, record_from_info
from outrider.worker.worker_options import worker_options
from outrider.worker.worker_process import ResultT, WorkerProcess, leave, run_worker
from outrider.worker.worker_ranks import follow, own_cores
from outrider.worker.worker_servicer import WorkerServicer

if TYPE_CHECKING:
    from outrider.engine.model import Engine
    from outrider.grammar import GrammarCompiler

MetricsT = TypeVar("MetricsT", bound=WorkerMetrics)


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """How a worker of one pool is started: its flags, and who may call which of its methods."""

    role: Pool
    description: str
    settings: tuple[type, ...]
    # Roles that may call each method, if there are certificates; a method that is not named is refused.
    permitted: Mapping[str, frozenset[Role]]
    program: str = ""  # its name in `--help`; empty: by its role

    def parse_arguments(self, arguments: list[str] | None = None) -> argparse.Namespace:
        parser = make_parser(self.program or f"{self.role}_worker", self.description, *self.settings)
        parser.set_defaults(role=self.role)
        return parser.parse_args(arguments)

    def main(self, serve: Callable[[argparse.Namespace], Awaitable[None]], words: list[str] | None = None) -> int:
        """Runs a worker, or a rank of one, by this process' command line or other words; returns the exit status."""
        arguments = self.parse_arguments(words)
        if os.environ.get("RANK", "0") != "0":
            return follow(arguments)
        # The first process of a container ignores signals without a handler. `listen` installs its own later.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: leave(0))
        return run_worker(lambda: serve(arguments), own_cores(arguments.cpu_affinity), arguments.log_format)

    @asynccontextmanager
    async def opened(
        self, arguments: argparse.Namespace, make_metrics: Callable[[str], MetricsT]
    ) -> AsyncIterator[OpenedWorker[MetricsT]]:
        """Opens the ports: metrics and health answer from here on. `make_metrics` gets the worker's id. Raises
        OutriderError, and Stopped."""
        options = worker_options(arguments)
        config = engine_config(arguments) if EngineOptions in self.settings else None
        services = [*dict.fromkeys(method.split("/")[1] for method in self.permitted)]
        # Tracing is closed last: stopping the server ends the spans of calls that are cut off.
        async with (
            Tracing.to(arguments.otlp_endpoint, f"outrider-{self.role}", options.worker_id) as tracing,
            WorkerProcess(options, self.role, services, self.permitted) as process,
        ):
            metrics = make_metrics(options.worker_id)
            process.show_state = metrics.show_state
            metrics_port = process.serve_metrics(metrics.registry)
            await process.listen()
            yield OpenedWorker(process, config, tracing, metrics, metrics_port)


@dataclass(frozen=True, slots=True)
class OpenedWorker(Generic[MetricsT]):
    """A worker whose ports answer, and whose model is not loaded yet."""

    process: WorkerProcess
    config: EngineOptions | None  # None: of an engine that is not ours
    tracing: Tracing
    metrics: MetricsT
    metrics_port: int

    async def load(self, adapt: Callable[[EngineOptions], EngineOptions] = lambda config: config) -> Engine:
        """Loads the model, after the device and Redis have been found. Raises OutriderError, and Stopped.

        adapt: changes the options by what else the worker loads.
        """
        return await self.load_with(lambda config, device: self._load(adapt(config), device))

    async def load_with(self, load: Callable[[EngineOptions, str], ResultT]) -> ResultT:
        """As `load`, of what another function of the options and the device loads."""
        device = await self.beside(self._find_device)
        await self.process.find_redis()
        config = self.config
        assert config is not None
        return await self.beside(lambda: load(config, device))

    async def beside(self, work: Callable[[], ResultT]) -> ResultT:
        """Runs a part of loading beside the event loop (`WorkerProcess.beside`)."""
        return await self.process.beside(work, is_watched=os.environ.get("WORLD_SIZE", "1") == "1")

    # Imported late and beside the event loop: importing torch takes seconds.

    def _find_device(self) -> str:
        from outrider.engine.device import find_device

        assert self.config is not None
        return find_device(self.config.device)

    def _load(self, config: EngineOptions, device: str) -> Engine:
        from outrider.engine.loading.loading import load_model
        from outrider.engine.ranks.rank_group import join_ranks

        return load_model(config, join_ranks(self.process.options.stall_exit_s, device))


def grammar_compiler(engine: ServedEngine, tokenizer_dir: Path) -> GrammarCompiler:
    from outrider.grammar import GrammarCompiler

    path = tokenizer_dir / "tokenizer.json"
    return GrammarCompiler(path, vocab_size=engine.vocab_size, eos_token_ids=engine.eos_token_ids)


async def serve_until_stopped(
    worker: OpenedWorker[MetricsT],
    engine: ServedEngine,
    core: Core[EventT, ActionT],
    servicer: WorkerServicer[EventT, ActionT],
    load: Callable[[], WorkerLoad],
    on_grace_over: Callable[[], None] = lambda: None,
) -> None:
    """Runs the core on the model thread and serves, then frees the model. The callbacks are `WorkerProcess.run`'s."""
    process, info = worker.process, servicer.info
    worker.metrics.max_num_seqs.set(info.max_num_seqs)
    facts = {"metrics_port": worker.metrics_port, **identity(info)}
    thread = process.make_thread(core, servicer.dispatch)
    servicer.bind(thread)
    thread.start()
    try:
        record = record_from_info(process.role, info)
        await process.run(record, load, servicer.start_draining, facts, on_grace_over)
    finally:
        if thread.stop():
            engine.dismiss()
