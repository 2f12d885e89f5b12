"""Bugs to plant, each of the kind that one feature of a run is there to find.

Not here is what a simulated run does not have: certificates, and with them workers that announce other ids than theirs
(`tests/coordinator/test_worker_identity.py`), roles (`tests/outrider/test_tls.py`), the file of keys
(`tests/outrider/test_api_keys.py`), HTTP (`tests/coordinator/test_extreme_values.py`) and its large bodies
(`test_large_requests.py`), Ray (`test_ray_environment.py`), sequences that a tenant may have at once
(`test_concurrency_limits.py`), targets of different context lengths (`test_slot_search.py`), how often a grammar is
compiled (`tests/outrider/test_compile_queue.py`), and real processors: memory that kernels take
(`tests/engine/test_tensor_parallel.py`) and processes that get no time (`tests/outrider/test_worker_process.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from coordinator.access.api_keys import Caller
from coordinator.access.rate_limits import RateLimits
from coordinator.api.grpc import grpc_api
from coordinator.intake import generation_request
from coordinator.intake.generation_request import GenerationSpec
from coordinator.intake.run_identity import RunIdentity, WorkerLife
from coordinator.output.client_pace import PaceWatch
from coordinator.placement.fair_queue import FairQueue
from coordinator.recovery import journal
from coordinator.recovery.journal import Journal
from coordinator.recovery.journal_entry import JournaledStream, JournalEntry
from coordinator.recovery.poison import PoisonRecord
from coordinator.recovery.resumption import NOTHING_SEEN, Claim, Resumption
from coordinator.service.active_sequences import ActiveSequences
from coordinator.service.generation_service import GenerationService
from coordinator.service.streams import Recollection, ResumableStreams
from outrider.observability.loop_lag import LoopLag
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import generation_pb2
from target_worker.messages import StartSession
from target_worker.scheduling.batch_slots import BatchSlots
from target_worker.scheduling.session import Session
from target_worker.serving import server
from target_worker.serving.generate_messages import parse_generate
from tests.simulation.actors import Target
from tests.simulation.features import Feature
from tests.simulation.registry import PoolModel

CHUNK, LOAD = grpc_api._chunk, Journal.load


def sample_all_choices_alike(self: GenerationSpec, index: int) -> SamplingParams:
    return self.sampling


def lose_a_log_probability(*arguments: Any) -> generation_pb2.GenerationChunk:
    chunk = CHUNK(*arguments)
    del chunk.logprobs[1:]
    return chunk


def forget_the_grammar(*arguments: Any) -> StartSession:
    event = parse_generate(*arguments)
    return replace(event, sampling=replace(event.sampling, grammar=None))


async def let_everybody_in(self: RateLimits, *arguments: Any, **named: Any) -> None: ...


async def make_up_what_is_not_there(self: Journal, request_id: str) -> JournalEntry | None:
    return await LOAD(self, request_id) or JournalEntry("grpc", b"")


def begin_again(self: JournaledStream, *, is_lost: bool = False) -> None:
    """As `write_again`, by a writer that takes itself for the last to have come."""
    self.is_first = self.has_changes = True
    self.begun_s += 60.0
    self._wake()


def announce_the_same_weights(weights: int) -> str:
    return "the same"


def go_on_with_whatever_is_there(
    self: ResumableStreams, spec: GenerationSpec, claim: Claim | None, recollection: Recollection
) -> tuple[GenerationSpec, Resumption]:
    """As `resume`, without a look at whose run that is."""
    known = () if recollection.entry is None else recollection.entry.token_ids
    points = (NOTHING_SEEN,) * spec.num_choices if claim is None else claim.points
    return spec, Resumption(points, (*known, *((),) * spec.num_choices)[: spec.num_choices])


class Believed(Resumption):
    def has_begun(self, index: int) -> bool:
        return self.points[index].num_tokens > 0


def believe_the_client(
    self: ResumableStreams, spec: GenerationSpec, claim: Claim | None, recollection: Recollection
) -> tuple[GenerationSpec, Resumption]:
    points = (NOTHING_SEEN,) * spec.num_choices if claim is None else claim.points
    return spec, Believed(points, ((),) * spec.num_choices)


def take_any_weights(self: RunIdentity, target: WorkerRecord) -> bool:
    return True


def wait_for_the_client(self: PaceWatch) -> None: ...


def forget_what_was_lost(self: RunIdentity, sequence: int, target: WorkerRecord, *, is_gone: bool = True) -> None: ...


def forget_what_an_unfinished_run_lost(
    self: PoisonRecord, prompt_digest: str, killed: Set[WorkerLife], now_s: float
) -> None: ...


def find_nobody_beyond(self: FairQueue, tenants: object) -> frozenset[str]:
    return frozenset()


def trust_hosts_clocks(holder: WorkerRecord | None, holders_us: int, record: WorkerRecord, joined_at_us: int) -> bool:
    return holder is not None and holder.started_at_ms > record.started_at_ms


def blame_others(self: LoopLag, since_s: float, now_s: float) -> float:
    return now_s - since_s


def share_with_everybody(caller: Caller, asked: str = "") -> str:
    return ""


async def work_on_the_loop(work: Callable[..., object], *arguments: object) -> object:
    return work(*arguments)


def give_up_nothing(self: BatchSlots, session: Session) -> bool:
    return False


def count_all_alike(self: GenerationService, spec: GenerationSpec) -> ActiveSequences:
    return self._active


PLANTED: dict[str, tuple[Feature, object, str, object, str]] = {
    "all choices have one seed": (
        *(Feature.CHOICES, GenerationSpec, "sampling_of", sample_all_choices_alike, "tokens"),
    ),
    "a log probability is lost where a step has several tokens": (
        *(Feature.LOGPROBS, grpc_api, "_chunk", lose_a_log_probability, "log probabilities"),
    ),
    "a target forgets the grammar": (*(Feature.GRAMMAR, server, "parse_generate", forget_the_grammar, "tokens"),),
    "a tenant's limit is not kept": (*(Feature.KEYS, RateLimits, "admit", let_everybody_in, "its limit"),),
    "a stream that the journal has lost is gone on with": (
        *(Feature.JOURNAL_LOSS, Journal, "load", make_up_what_is_not_there, "failed"),
    ),
    "a stream goes on with another request's tokens": (
        *(Feature.REUSED_ID, ResumableStreams, "resume", go_on_with_whatever_is_there, "I2"),
    ),
    "a drawn seed is drawn again": (
        *(Feature.DRAWN_SEEDS, ResumableStreams, "resume", go_on_with_whatever_is_there, "I2|has tokens"),
    ),
    "a client's word makes its request urgent": (
        *(Feature.LIAR, ResumableStreams, "resume", believe_the_client, "I9"),
    ),
    "a sequence goes on at whatever target there is": (
        *(Feature.WEIGHTS, RunIdentity, "accepts", take_any_weights, "I2"),
    ),
    "nobody looks whether a client reads": (*(Feature.STALLED_READER, PaceWatch, "start", wait_for_the_client, "I10"),),
    "the workers that a request brings down are not counted": (
        *(Feature.POISON, RunIdentity, "lose", forget_what_was_lost, "brought down"),
    ),
    "a client that leaves in between may bring down as many workers again": (
        *(Feature.POISON, PoisonRecord, "suspect", forget_what_an_unfinished_run_lost, "brought down"),
    ),
    "a target that compiles says nothing": (*(Feature.SLOW_GRAMMAR, server, "WAITING_EVERY_S", 1e9, "I10"),),
    "a coordinator that was stopped blames its targets": (
        *(Feature.LONG_STOP, LoopLag, "silence_s", blame_others, "I10"),
    ),
    "a worker's own clock tells which of two lives is the later": (
        *(Feature.SKEWED_CLOCKS, PoolModel, "is_later", staticmethod(trust_hosts_clocks), "an earlier life"),
    ),
    "a tenant takes more than its share of the slots": (
        *(Feature.SHARES, FairQueue, "_beyond_share", find_nobody_beyond, "gets a slot"),
    ),
    "a worker announces other weights than it has": (
        *(Feature.WEIGHTS, Target, "fingerprint_of", staticmethod(announce_the_same_weights), "I2"),
    ),
    "a target reads what is committed on its event loop": (
        *(Feature.GRAMMAR, asyncio, "to_thread", work_on_the_loop, "I10: t"),
    ),
    "tenants share a prefix cache": (
        *(Feature.KEYS, generation_request, "cache_salt", share_with_everybody, "I9: tenant"),
    ),
    "a writer that missed a write takes the journal back": (
        *(Feature.REUSED_ID, JournaledStream, "write_again", begin_again, "I9"),
    ),
    "a tenant may fill the journal": (
        *(Feature.FULL_JOURNAL, journal, "TENANT_SHARE", 1.0, "I10: one tenant's streams"),
    ),
    "a session in the background keeps its slot": (
        *(Feature.BATCH, BatchSlots, "_make_room_for", give_up_nothing, "a session in the background"),
    ),
    "lines of batches take the room of requests": (
        *(Feature.BATCH_OF_MANY, GenerationService, "_sequences_beside", count_all_alike, "it has room for"),
    ),
}
"""By what is wrong: the feature, what is replaced and by what, and what the simulation says of it."""
