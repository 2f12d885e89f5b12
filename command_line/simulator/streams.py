"""Streams of coordinator replicas in virtual time, and the slots that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from command_line.simulator.traffic import VOCAB_SIZE, Request
from coordinator.observability.statistics import RequestTimes, SpeculationCounts
from coordinator.output.sequence_output import SequenceFinished
from coordinator.output.text_output import PromptOutput, VisibleOutput
from outrider.registry.worker_record import Pool, Snapshot, WorkerRecord
from protos.outrider.v1 import common_pb2
from target_worker.messages import SessionEnded, TokensCommitted

CANDIDATES_MAX: Final = 8
"""Number of workers asked for a slot, as in `coordinator.placement.reservations`."""
MODEL: Final = "simulated"


class CountedOutput:
    """Output of a sequence without a reader: tokens, counts and times."""

    def __init__(self, arrival_s: float, num_tokens_max: int) -> None:
        self.counts = SpeculationCounts()
        self.times = RequestTimes(arrival_s)
        self.decoding_mode: common_pb2.DecodingMode = common_pb2.DECODING_MODE_GREEDY
        self.exactness: common_pb2.Exactness = common_pb2.EXACTNESS_TOKENS
        self.token_ids: list[int] = []
        self.stop_string: str | None = None
        self._num_tokens_max = num_tokens_max

    @property
    def has_room(self) -> bool:
        return len(self.token_ids) < self._num_tokens_max

    def add_prompt_scores(self, chunk: object) -> None: ...

    def show_prompt(self) -> list[PromptOutput]:
        return []

    def check(self, step: object) -> None: ...

    def show(self, step: TokensCommitted) -> list[VisibleOutput]:
        self.token_ids += step.token_ids
        return []

    def repeat(self, token_ids: Sequence[int]) -> VisibleOutput:
        raise AssertionError("nothing is resumed here")

    def take_end(self, counted: SessionEnded, queued_ms: float, *, is_replay: bool) -> None:
        self.times.queue_ms = queued_ms + counted.queue_ms

    def finish(self, reason: str, stop_reason: str | int | None, now_s: float) -> SequenceFinished:
        self.times.end_s = now_s
        return SequenceFinished(
            text="",
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=0,
            num_output_tokens=len(self.token_ids),
            decoding_mode=self.decoding_mode,
            counts=self.counts,
            times=self.times,
            num_cached_tokens=None,
        )


@dataclass(slots=True, eq=False)
class Stream:
    """One request and its outcome. Times are the coordinator's, in seconds."""

    request: Request
    arrived_s: float
    is_refused: bool = False
    output: CountedOutput = field(init=False)

    def __post_init__(self) -> None:
        self.output = CountedOutput(self.arrived_s, self.request.num_output_tokens)


@dataclass(slots=True)
class Reservations:
    """Slots taken by all replicas together, by incarnation, and their last state in the registry."""

    targets: tuple[WorkerRecord, ...]
    drafts: tuple[WorkerRecord, ...]
    num_taken: Counter[str] = field(default_factory=Counter)
    snapshot: Snapshot = field(default_factory=Snapshot)
    on_released: list[Callable[[], None]] = field(default_factory=list)  # called when a target has a free slot again

    def refresh(self) -> None:
        self.snapshot = Snapshot(self.targets, self.drafts, num_reserved=dict(self.num_taken))

    def take(self, asked: Sequence[WorkerRecord], limits: Sequence[int]) -> WorkerRecord | None:
        for worker, limit in zip(asked[:CANDIDATES_MAX], limits, strict=False):
            if self.num_taken[worker.incarnation] < limit:
                self.num_taken[worker.incarnation] += 1
                return worker
        return None

    def give_back(self, worker: WorkerRecord) -> None:
        self.num_taken[worker.incarnation] -= 1
        if worker.pool == "target":
            for tell in self.on_released:
                tell()


def record(pool: Pool, number: int, max_num_seqs: int, max_num_waiting: int, max_model_len: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{pool}-{number}", pool=pool, address=f"{pool}:{number}", incarnation=f"{pool}-{number}",
        started_at_ms=0, model_name=MODEL, tokenizer_fingerprint="", vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, dtype="", num_model_parameters=0,
        max_num_waiting=max_num_waiting,
    )  # fmt: skip
