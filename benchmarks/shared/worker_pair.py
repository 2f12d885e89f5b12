"""Starts a target and a draft worker for benchmarks and tests, and sends requests without a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from command_line.start.cores import CorePlan, WorkerThreads, draft_threads, plan_cores, target_threads
from outrider.local import tether
from outrider.objective import NO_OBJECTIVE, Objective
from outrider.sampling_params import SamplingParams, SpeculationSettings
from outrider.worker.rpc import CHANNEL_OPTIONS
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 15.0


@dataclass(slots=True)
class Generation:
    """Result of one request."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # HintSource of every step
    finished: target_pb2.SessionFinished = field(default_factory=target_pb2.SessionFinished)
    started_at: float = 0.0  # time.perf_counter(), seconds
    first_token_at: float = 0.0
    ended_at: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and number of tokens of every step

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first token, without prefill."""
        first_step = 1
        return (len(self.token_ids) - first_step) / (self.ended_at - self.first_token_at)


class WorkerProcessHandle:
    """A worker as a child process; `address` is known once it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, object]) -> None:
        self.process = process
        self.facts = facts
        self.address = str(facts["address"])

    @classmethod
    async def start(cls, module: str, *arguments: str, through: Sequence[str] = ()) -> WorkerProcessHandle:
        """`through`: a command that runs the worker, such as `nice`."""
        # Tethered, so that an interrupted run leaves no worker behind.
        process = await asyncio.create_subprocess_exec(
            *tether.words(STOP_GRACE_S),
            *(*through, sys.executable, "-m", module, *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            if not line:
                raise RuntimeError(f"{module} did not start; see its message above")
            return cls(process, json.loads(line))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise

    def metrics(self) -> list[Sample]:
        """The worker's metrics as Prometheus would read them."""
        url = f"http://{self.address.rsplit(':', 1)[0]}:{self.facts['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
        return [sample for family in families for sample in family.samples]

    async def stop(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(2 * STOP_GRACE_S):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


@dataclass(slots=True)
class WorkerPair:
    """A target worker and an optional draft worker."""

    target: WorkerProcessHandle
    draft: WorkerProcessHandle | None
    target_stub: target_pb2_grpc.TargetStub
    draft_stub: draft_pb2_grpc.DraftStub | None
    draft_dials: str | None = None  # instead of the target's own address
    has_local_hints: bool = False  # without a draft worker requests take the target's own, instead of being plain
    head_fingerprint: str = ""  # of the draft head whose features the target sends

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        use_draft: bool = True,
        speculation: SpeculationSettings | None = None,
        attach_first: bool = False,
        timeout_s: float = 300.0,
        result: Generation | None = None,
        prediction: Sequence[int] = (),
        objective: Objective = NO_OBJECTIVE,
    ) -> Generation:
        """Sends one request, with the draft attached unless told otherwise.

        With `attach_first` the draft worker begins before the target, so that even the first tokens have hints.
        `result` is filled while tokens arrive, for callers that do not wait for the end.
        """
        session_id = uuid.uuid4().hex
        use_draft = use_draft and self.draft_stub is not None
        is_plain = not (use_draft or self.has_local_hints)
        speculation = speculation or SpeculationSettings(enabled=use_draft, is_plain=is_plain)
        attachment = None
        if use_draft:
            is_attached = asyncio.Event()
            attachment = asyncio.create_task(self._attach(session_id, token_ids, sampling, speculation, is_attached))
            if attach_first:
                await is_attached.wait()
        request = target_pb2.GenerateRequest(
            session_id=session_id,
            token_ids=token_ids,
            sampling=sampling.to_proto(),
            speculation=speculation.to_proto(),
            prediction=prediction,
            slo=objective.to_proto(),
        )
        result = result if result is not None else Generation()
        result.started_at = time.perf_counter()
        try:
            async for event in self.target_stub.Generate(request, timeout=timeout_s):
                if event.HasField("step"):
                    now = time.perf_counter()
                    result.first_token_at = result.first_token_at or now
                    result.arrivals.append((now, len(event.step.token_ids)))
                    result.token_ids.extend(event.step.token_ids)
                    result.origins.extend(event.step.origins)
                    result.sources.append(event.step.hint_source)
                elif event.HasField("finished"):
                    result.finished = event.finished
            result.ended_at = time.perf_counter()
        finally:
            if attachment is not None:
                attachment.cancel()
                # Unlike `await attachment`, this distinguishes its cancellation from our own.
                await asyncio.wait([attachment])
                if not attachment.cancelled():
                    attachment.exception()  # the draft worker is gone and no longer needed
        return result

    async def _attach(
        self,
        session_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationSettings,
        is_attached: asyncio.Event,
    ) -> None:
        assert self.draft_stub is not None
        request = draft_pb2.AttachRequest(
            session_id=session_id,
            attachment=1,
            target_address=self.draft_dials or self.target.address,
            token_ids=token_ids,
            sampling=sampling.to_proto(),
            speculation=speculation.to_proto(),
            head_fingerprint=self.head_fingerprint,
        )
        async for _ in self.draft_stub.Attach(request, timeout=600.0):
            is_attached.set()


@contextlib.asynccontextmanager
async def attach_draft(pair: WorkerPair, draft_address: str) -> AsyncIterator[WorkerPair]:
    """The same target with another draft worker."""
    async with grpc.aio.insecure_channel(draft_address, options=CHANNEL_OPTIONS) as channel:
        yield replace(pair, draft_stub=draft_pb2_grpc.DraftStub(channel))


@dataclass(frozen=True, slots=True)
class TwoCores:
    """Cores of a target and a draft worker on two cores, as `outrider serve` plans them: apart, or with
    `--share-cores`."""

    is_shared: bool

    @property
    def _plan(self) -> CorePlan:
        return plan_cores([0, 1], 1, 1, shares_cores=self.is_shared)

    @property
    def target(self) -> WorkerThreads:
        return target_threads(self._plan, None, 1)[0]

    @property
    def draft(self) -> WorkerThreads:
        return draft_threads(self._plan, None, 1)[0]


def worker_words(threads: WorkerThreads) -> list[str]:
    """The flags of a worker that say so."""
    beside = threads.num_threads_beside_draft
    return [
        *("--cpu-affinity", ",".join(map(str, threads.cores)), "--num-threads", str(threads.num_threads)),
        *(() if beside is None else ("--num-threads-beside-draft", str(beside))),
    ]


@contextlib.asynccontextmanager
async def worker_pair(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    target_arguments: Sequence[str] = (),
    draft_arguments: Sequence[str] = (),
    cores: TwoCores | None = None,
) -> AsyncIterator[WorkerPair]:
    """Starts the workers, yields them, and always stops them.

    Lookup is off unless `target_arguments` contain --lookup: the draft is measured. Arguments come after those of
    `cores`, so that they can say otherwise.
    """
    target_words = [] if cores is None else worker_words(cores.target)
    draft_words = [] if cores is None else worker_words(cores.draft)
    async with contextlib.AsyncExitStack() as stack:
        words = ["--model", str(target_dir), "--no-lookup", *target_words, *target_arguments]
        starts = [WorkerProcessHandle.start("target_worker", *words)]
        if draft_dir is not None:
            words = ["--model", str(draft_dir), *draft_words, *draft_arguments]
            through = () if cores is None else cores.draft.through
            starts.append(WorkerProcessHandle.start("draft_worker", *words, through=through))
        started = await asyncio.gather(*starts, return_exceptions=True)
        for handle in started:
            if isinstance(handle, WorkerProcessHandle):
                stack.push_async_callback(handle.stop)
        for handle in started:
            if isinstance(handle, BaseException):
                raise handle
        handles = [handle for handle in started if isinstance(handle, WorkerProcessHandle)]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(handle.address, options=CHANNEL_OPTIONS))
            for handle in handles
        ]
        yield WorkerPair(
            handles[0],
            handles[1] if draft_dir is not None else None,
            target_pb2_grpc.TargetStub(channels[0]),
            draft_pb2_grpc.DraftStub(channels[1]) if draft_dir is not None else None,
            head_fingerprint=str(handles[0].facts.get("head_fingerprint", "")),
        )
