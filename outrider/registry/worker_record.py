"""A worker's description of itself in the registry, and the set of all live workers. Plain data, checked on
construction."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self, get_args

from outrider.addresses import split_address

Pool = Literal["target", "draft"]
WorkerState = Literal["ready", "stalled", "draining"]
POOLS: Final[tuple[Pool, ...]] = get_args(Pool)
MEMORY: Final = "memory"
"""`WorkerRecord.engine` of a draft worker that has no model: its hints are what was generated before."""
_ABSENT_BEFORE: Final = frozenset({"weights_fingerprint", "numerics"})
"""Fields missing from records of the previous release, which have no checksum either."""
_ADDED: Final = frozenset({"num_speculative_tokens", "num_background", "engine", "head_fingerprint"})
"""Fields missing from records of the previous release that have a checksum."""
_CHECK: Final = "check"
"""Name of the checksum over all fields. A damaged record could read as another model or another address."""
_BESIDE: Final = frozenset({_CHECK, "joined_at_us"})
"""Fields of a stored hash that are not the worker's own."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's description of itself; every field is set by the worker alone."""

    worker_id: str  # unique in the pool; 1 to 64 characters
    pool: Pool
    address: str  # host:port of its gRPC server, as others dial it
    incarnation: str  # changes with every start of the process
    started_at_ms: int  # the worker's own clock, since the epoch; informative, as clocks of two hosts do not compare
    model_name: str  # of a target: the name that clients request
    tokenizer_fingerprint: str  # outrider.text.tokenizer.fingerprint
    vocab_size: int  # rows of the output layer
    max_model_len: int  # longest prompt plus output, tokens
    max_num_seqs: int  # most sessions at once, at least 1
    dtype: str  # of the weights
    num_model_parameters: int
    # stalled: its model has not responded for a while; draining: finishes what runs, admits nothing.
    state: WorkerState = "ready"
    max_num_waiting: int = 0  # most sessions that wait beside those
    num_running: int = 0  # sessions in the batch at the last heartbeat
    num_waiting: int = 0  # sessions admitted and not yet in the batch
    num_background: int = 0  # those of both that run for no waiting client and make room for others
    wait_ms: int = 0  # of a target: expected wait of a session that came now
    zone: str = ""  # location, in the operator's terms; empty: unknown
    round_trips: str = ""  # of a draft worker: "ADDRESS=MICROSECONDS ..." for its targets
    # Two targets that agree in both strings compute the same logits bit for bit. Empty: unknown, a worker of a release
    # before these fields; unknown equals only itself.
    weights_fingerprint: str = ""  # outrider.engine.loading.checkpoint_fingerprint
    numerics: str = ""  # outrider.engine.compiled.numerics: dtype, quantization, kernels, ranks, versions
    num_speculative_tokens: int = 0  # of a target: most hints verified per step; 0: unknown, or none
    engine: str = ""  # that computes its model; empty: ours; MEMORY: none does
    # Of a draft worker: the draft head that it runs; of a target: the one whose features it sends; empty: none.
    head_fingerprint: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.worker_id) <= 64:
            raise ValueError(f"worker_id must have 1 to 64 characters, got {self.worker_id!r}")
        if self.pool not in POOLS:
            raise ValueError(f"pool must be one of {POOLS}, got {self.pool!r}")
        if self.state not in get_args(WorkerState):
            raise ValueError(f"state must be one of {get_args(WorkerState)}, got {self.state!r}")
        try:
            split_address(self.address)
        except ValueError as error:
            raise ValueError(f"address must be host:port: {error}") from error
        if self.max_num_seqs < 1 or self.max_model_len < 1:
            raise ValueError("max_num_seqs and max_model_len must be at least 1")

    def can_read(self, target: WorkerRecord) -> bool:
        """Whether a target sends what this draft worker drafts from; a draft worker without a draft head needs nothing
        but the tokens."""
        return self.head_fingerprint in ("", target.head_fingerprint)

    @classmethod
    def from_fields(cls, stored: Mapping[str, str]) -> Self:
        """Reads a stored hash. Raises ValueError when a field is missing or out of its bounds.

        During a rolling upgrade workers of the previous release run beside new ones: fields that they lack stay
        unknown, and everything else works.
        """
        values: dict[str, Any] = {}
        for each in fields(cls):
            if each.name not in stored:
                if each.name in _ABSENT_BEFORE | _ADDED:
                    continue
                raise ValueError(f"field {each.name} is missing")
            value = stored[each.name]
            values[each.name] = int(value) if each.type == "int" else value
        is_of_before = not stored.keys() & (_ABSENT_BEFORE | {_CHECK})
        if not is_of_before and stored.get(_CHECK) != _checksum(stored):
            raise ValueError("the record is damaged")
        return cls(**values)

    def to_fields(self) -> dict[str, str]:
        """The hash to store; `from_fields` reverses it."""
        stored = {each.name: str(getattr(self, each.name)) for each in fields(self)}
        return stored | {_CHECK: _checksum(stored)}


def _checksum(stored: Mapping[str, str]) -> str:
    """Checksum of all fields that a worker wrote, including those of a later release."""
    told = repr(sorted(item for item in stored.items() if item[0] not in _BESIDE)).encode()
    return f"{zlib.crc32(told):08x}"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The part of a record that is updated with every heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    wait_ms: int = 0
    round_trips: str = ""
    num_background: int = 0

    @property
    def num_sessions(self) -> int:
        """Sessions that have not ended."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live workers at the last read. `degraded`: Redis has been unreachable since, and this is stale."""

    targets: tuple[WorkerRecord, ...] = ()
    drafts: tuple[WorkerRecord, ...] = ()
    degraded: bool = False
    num_reserved: Mapping[str, int] = field(default_factory=dict)  # by incarnation, over all coordinators
