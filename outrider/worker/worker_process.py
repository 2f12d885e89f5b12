"""The server of a worker process of either kind: gRPC with health and reflection, metrics, a lease, a graceful end.

async with WorkerProcess(options, "target", ["outrider.v1.Target"]) as process:
    process.serve_metrics(registry)
    await process.listen()  # health and metrics answer
    engine = await process.beside(load_model)
    add_TargetServicer_to_server(servicer, process.services)
    await process.run(record, load, on_drain, ready_facts)

Ready means that the model's thread answers between two steps. While the model loads, the worker is alive and not ready;
if loading gets stuck, or SIGTERM comes, the process ends. Order of a graceful end: the lease says "draining",
health says NOT_SERVING, running sessions finish within the grace period, the others are aborted, the server stops, the
lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar, cast

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from outrider.addresses import PORT_MAX, bound_socket, is_unspecified, join_address, with_port
from outrider.concurrency import time_slices
from outrider.concurrency.background import end_tasks, keep_going
from outrider.concurrency.loop_share import LoopShare
from outrider.errors import ConfigurationError, OutriderError
from outrider.observability import logs
from outrider.observability.logs import LogFormat
from outrider.observability.loop_lag import LoopLag, keep_ticking
from outrider.observability.metrics_server import serve_metrics
from outrider.observability.telemetry import show_expiry, show_loop_lag
from outrider.registry.registry import Registry, check_redis
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import Pool, WorkerLoad, WorkerRecord, WorkerState
from outrider.security.call_admission import OpenCallLimit
from outrider.security.tls import Dialer, Role, RoleCheck, TlsFiles, check_role, check_worker_id
from outrider.visible_text import visible
from outrider.worker.loading_thread import start_beside, watch_progress
from outrider.worker.model_thread import PEERS_S, PEERS_SHARE, ActionT, Core, EventT, ModelThread
from outrider.worker.rpc import HEALTH_SERVER_OPTIONS, OPEN_METHODS, SERVER_OPTIONS, HealthService, LateServices
from outrider.worker.stall_watch import StallWatch
from outrider.worker.worker_options import WorkerOptions

logger = logging.getLogger(__name__)

LIVENESS = "liveness"
"""The grpc.health.v1 service that tells whether the process should be restarted. All others report readiness."""
EXIT_STALLED = 70  # EX_SOFTWARE
_PULSE_S = 1.0
_CUT_OFF_S = 0.5  # for calls to end by themselves
ResultT = TypeVar("ResultT")


class Stopped(Exception):
    """The worker was told to stop before it was ready."""


def pin_to_cores(cores: str | None) -> None:
    """Restricts this process and its threads to `cores`; must run before torch starts threads of its own."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"--cpu-affinity {cores}: {error}; name cores of this machine, such as 0 or 0,1"
        ) from error


class WorkerProcess:
    """One worker's server from start to end."""

    def __init__(
        self,
        options: WorkerOptions,
        role: Pool,
        service_names: list[str],
        permitted: Mapping[str, frozenset[Role]] | None = None,
    ) -> None:
        """`permitted`: roles by method, /package.Service/Method, where there are certificates; a method named neither
        there nor in `OPEN_METHODS` is refused to all."""
        self.options = options
        self.role = role
        self.incarnation = uuid.uuid4().hex
        self.files = None if options.tls_dir is None else TlsFiles(options.tls_dir)
        if self.files is not None:
            check_role(self.files.current(), Role[role.upper()])
            check_worker_id(self.files.current(), Role[role.upper()], options.worker_id)
        self.dialer = Dialer(self.files)
        rules = () if self.files is None else (RoleCheck({**OPEN_METHODS, **(permitted or {})}),)
        self.server = grpc.aio.server(interceptors=(*rules, OpenCallLimit(OPEN_METHODS)), options=SERVER_OPTIONS)
        self.port = 0
        self.health_port = 0
        self.show_state: Callable[[WorkerState | Literal["loading"]], None] = lambda state: None
        """Is called with each new state."""
        self._health_server: grpc.aio.Server | None = None
        self._service_names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._health = HealthService()
        self.services = cast(grpc.aio.Server, LateServices())
        """Takes the services that are added when the model is loaded."""
        self._is_listening = False
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._registry: Registry | None = None
        self._stalled_s: Callable[[], float] = lambda: 0.0
        self._lag = LoopLag()
        self._observe_lag: Callable[[float, float], None] = lambda lag_s, own_s: None

    async def __aenter__(self) -> Self:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(self._service_names, self.server)
        # Checks that take milliseconds come before the model is loaded, which may take minutes.
        if self.options.redis_url is not None:
            if self.options.announce is not None:
                _check_announced(self.options.announce, self.options.port)
            elif is_unspecified(self.options.host):
                raise ConfigurationError(
                    f"--host {self.options.host} cannot be announced: name the address where others reach this worker "
                    "with --announce HOST, or HOST:PORT"
                )
            self._registry = Registry(self.options.redis_url)
        self.port = self._listen(self.server, self.options.port, "--port", self.files)
        if self.options.health_port is not None:
            limit = OpenCallLimit(OPEN_METHODS)
            self._health_server = grpc.aio.server(interceptors=(limit,), options=HEALTH_SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_port = self._listen(self._health_server, self.options.health_port, "--health-port", None)
        return self

    def _listen(self, server: grpc.aio.Server, port: int, flag: str, files: TlsFiles | None) -> int:
        """Binds a port and returns it; 0 binds a free one."""
        address = join_address(self.options.host, port)
        _check_port(self.options.host, port, flag)
        try:
            if files is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, files.server_credentials())
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error}") from error

    async def listen(self) -> None:
        """Answers health checks from now on: alive, and not ready. SIGTERM and SIGINT are obeyed from now on."""
        if self._is_listening:
            return
        self._is_listening = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._set_health(is_ready=False)
        self.server.add_generic_rpc_handlers((cast(LateServices, self.services),))
        await self.server.start()
        if self._health_server is not None:
            await self._health_server.start()

    async def find_redis(self) -> None:
        """Waits for Redis, if there is to be one. Raises Stopped, and OutriderError when it stays away."""
        if self.options.redis_url is not None:
            await self._unless_stopped(check_redis(self.options.redis_url, self.options.redis_wait_s))

    async def beside(self, work: Callable[[], ResultT], *, is_watched: bool = True) -> ResultT:
        """Runs a part of loading on a thread of its own and returns its result. Raises what it raises, and Stopped when
        the worker is told to stop, after which the process must end.

        is_watched: end the process if it neither computes nor reads for long; not where it may wait for others.
        """
        watch = asyncio.create_task(self._end_when_stuck()) if is_watched else None
        try:
            return await self._unless_stopped(start_beside(work, f"{self.role}-loading"))
        finally:
            await end_tasks(watch)

    async def _end_when_stuck(self) -> None:
        await watch_progress(self.options.load_stall_exit_s)
        logger.critical(
            "loading has neither computed nor read anything for %.0f s (--load-stall-exit-s); this process ends",
            self.options.load_stall_exit_s,
        )
        leave(EXIT_STALLED)

    async def _unless_stopped(self, awaitable: Awaitable[ResultT]) -> ResultT:
        work, stop = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Stopped
            return work.result()
        finally:
            work.cancel()
            stop.cancel()

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(_CUT_OFF_S)
        if self._health_server is not None:
            await self._health_server.stop(_CUT_OFF_S)
        if self._registry is not None:
            await self._registry.close()

    @property
    def address(self) -> str:
        """The address at which others reach it, host:port."""
        if self.options.announce is None:
            return join_address(self.options.host, self.port)
        return with_port(self.options.announce, self.port)

    def serve_metrics(self, registry: CollectorRegistry) -> int:
        """Serves `/metrics` with what is in the registry; returns the port. Raises ConfigurationError."""
        if self.files is not None:
            show_expiry(self.files, registry)
        self._observe_lag = show_loop_lag(registry, self.options.worker_id)
        return serve_metrics(registry, self.options.host, self.options.metrics_port, self.files)

    def request_stop(self, failure: BaseException | None = None) -> None:
        """Ends `run`; with a failure the process exits non-zero. Must be called on the event loop."""
        self._failure = self._failure or failure
        self._stop.set()

    def make_thread(
        self, core: Core[EventT, ActionT], dispatch: Callable[[list[ActionT]], None]
    ) -> ModelThread[EventT, ActionT]:
        """Creates the thread for `core`: its actions reach `dispatch` on the event loop, its death ends the process."""
        loop = asyncio.get_running_loop()

        def deliver(actions: list[ActionT]) -> None:
            loop.call_soon_threadsafe(dispatch, actions)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(self.request_stop, error)

        # A target's steps are what callers wait for. A draft worker's depend on what targets tell it.
        share = LoopShare(PEERS_SHARE, PEERS_S) if self.role == "target" else None
        thread = ModelThread(core, deliver, fail, name=f"{self.role}-model", peers_share=share)
        self.watch(thread.stalled_s)
        return thread

    def watch(self, stalled_s: Callable[[], float]) -> None:
        """Has `run` watch the model by how long it has not responded, seconds."""
        self._stalled_s = stalled_s

    async def run(
        self,
        record: WorkerRecord,
        load: Callable[[], WorkerLoad],
        on_drain: Callable[[], None],
        ready_facts: dict[str, Any],
        on_grace_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Serves until SIGTERM, SIGINT or `request_stop`; then drains. After `on_drain` the servicer must refuse new
        sessions; in `on_grace_over` it should abort the remaining ones."""
        await self.listen()
        if self._health_server is not None:
            ready_facts = {**ready_facts, "health_port": self.health_port}
        record = replace(record, address=self.address, zone=self.options.zone)
        async with contextlib.AsyncExitStack() as stack:
            ticks = partial(keep_ticking, self._lag, self._observe_lag)
            ticking = asyncio.create_task(keep_going(ticks, "the loop's ticking"), name="loop lag")
            stack.push_async_callback(end_tasks, ticking)
            lease: WorkerLease | None = None
            if self._registry is not None:
                lease = await stack.enter_async_context(WorkerLease(self._registry, record, load))
            cast(LateServices, self.services).open()
            self._set_health(is_ready=True)
            self.show_state("ready")
            facts = {
                "event": "ready",
                "role": self.role,
                "address": self.address,
                "pid": os.getpid(),
                **ready_facts,
            }
            print(json.dumps(facts), flush=True)
            await self._watch_until_stop(lease)
            if self._failure is None:
                on_drain()
                await self._drain(lease, load)
                on_grace_over()
                await self.server.stop(_CUT_OFF_S)  # before the record is removed, which explains it
        if self._failure is not None:
            raise self._failure

    async def _watch_until_stop(self, lease: WorkerLease | None) -> None:
        """Marks the worker not ready while its model does not respond, and finally ends the process: nothing else can,
        because its thread is inside a call that does not return."""
        options = self.options
        is_ready = True
        interval_s = min(_PULSE_S, options.stall_s / 4)
        watch = StallWatch(interval_s, time.monotonic())
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._stop.wait()
            stalled_s = watch.look(self._stalled_s(), time.monotonic())
            if stalled_s > options.stall_exit_s:
                logger.critical("the model has shown no sign of life for %.0f s; this process ends", stalled_s)
                leave(EXIT_STALLED)
            if is_ready != (stalled_s <= options.stall_s):
                is_ready = not is_ready
                logger.warning("the model %s", "responds again" if is_ready else f"has stalled for {stalled_s:.0f} s")
                self._enter("ready" if is_ready else "stalled", lease)
                self._set_health(is_ready=is_ready)

    async def _drain(self, lease: WorkerLease | None, load: Callable[[], WorkerLoad]) -> None:
        logger.info("draining: admitting nothing, at most %.0f s to finish", self.options.drain_grace_s)
        self._enter("draining", lease)
        self._set_health(is_ready=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_grace_s):
                while load().num_sessions:  # noqa: ASYNC110 - the count lives on the model's thread
                    await asyncio.sleep(0.05)

    def _enter(self, state: WorkerState, lease: WorkerLease | None) -> None:
        self.show_state(state)
        if lease is not None:
            lease.set_state(state)

    def _set_health(self, *, is_ready: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if is_ready else kind.NOT_SERVING
        for service in ("", *self._service_names):
            self._health.set(service, status)


def _check_announced(address: str, port: int) -> None:
    """port: the worker's own, which the address has where it names none; 0: not known yet."""
    try:
        with_port(address, port or PORT_MAX)
    except ValueError as error:
        raise ConfigurationError(f"--announce {address} is not HOST or HOST:PORT: {error}") from error


def _check_port(host: str, port: int, flag: str) -> None:
    """Checks a port first, because gRPC's own error does not say which port or why."""
    if port == 0:
        return
    try:
        bound_socket(host, port).close()
    except OSError as error:
        raise ConfigurationError(
            f"port {port} on {host} cannot be used ({error.strerror}); name another with {flag}"
        ) from error


def run_worker(main: Callable[[], Any], cores: str | None = None, log_format: LogFormat = LogFormat.TEXT) -> int:
    """Runs an async main, on `cores` alone if given; a known error is one paragraph on stderr and exit status 1."""
    logs.configure(log_format)
    try:
        pin_to_cores(cores)
        time_slices.use_short_slices()
        uvloop.run(main())
    except Stopped:
        logger.info("stopped before the worker was ready")
    except OutriderError as error:
        report_cause(error.message)
        return 1
    return 0


def report_cause(message: str) -> None:
    """Reports why this process ends: on standard error, and under torchrun in its report, which comes last."""
    print(visible(f"error: {message}"), file=sys.stderr)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def leave(status: int) -> NoReturn:
    """Ends this process at once, after everything of it has been closed.

    The interpreter's own shutdown unloads torch module by module: a second of a free core (measured), and on a busy
    machine more than the grace period after which a supervisor kills.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
