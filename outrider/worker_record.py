"""What a worker says about itself, and the set of all that said so lately. Plain data, checked on
construction."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self, get_args

Pool = Literal["target", "draft"]
WorkerState = Literal["ready", "stalled", "draining"]
POOLS: Final[tuple[Pool, ...]] = get_args(Pool)
_ABSENT_BEFORE: Final = frozenset({"weights_fingerprint", "numerics"})
"""Fields that records of the release before do not have; nor do they have a checksum."""
_CHECK: Final = "check"
"""Checksum of all fields. A damaged one may read as another value, such as another model or another address."""
_BESIDE: Final = frozenset({_CHECK, "joined_at_us"})
"""Fields of a stored hash that are not the worker's own."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says about itself; every field is set by the worker alone."""

    worker_id: str  # unique in the pool; 1 to 64 characters
    pool: Pool
    address: str  # host:port of its gRPC server, as others dial it
    incarnation: str  # changes with every start of the process
    started_at_ms: (
        int  # by the worker's own clock, since the epoch: for people, as clocks of two hosts do not compare
    )
    model_name: str  # of a target: the name that clients ask for
    tokenizer_fingerprint: str  # outrider.tokenizer.fingerprint
    vocab_size: int  # rows of the output layer
    max_model_len: int  # longest prompt plus output, tokens
    max_num_seqs: int  # most sessions at once, at least 1
    dtype: str  # of the weights
    num_model_parameters: int
    # stalled: its model has shown no sign of life for a while; draining: finishes what runs, admits nothing.
    state: WorkerState = "ready"
    max_num_waiting: int = 0  # most that wait beside those
    num_running: int = 0  # sessions in the batch, as of the last heartbeat
    num_waiting: int = 0  # sessions admitted and not yet in it
    wait_ms: int = (
        0  # of a target: how long a session that came now would wait for a place, as far as it can tell
    )
    zone: str = ""  # where it is, as the operator names places; empty: not told
    round_trips: str = ""  # of a draft worker: "ADDRESS=MICROSECONDS ..." of the targets it is connected to
    # Two targets whose both strings are equal compute the same logits bit for bit. Empty: unknown, a worker of a
    # release before these fields; unknown equals nothing but itself.
    weights_fingerprint: str = ""  # outrider.checkpoint_fingerprint
    numerics: str = ""  # outrider.engine.numerics: dtype, quantization, kernels, ranks, versions

    def __post_init__(self) -> None:
        if not 1 <= len(self.worker_id) <= 64:
            raise ValueError(f"worker_id must have 1 to 64 characters, got {self.worker_id!r}")
        if self.pool not in POOLS:
            raise ValueError(f"pool must be one of {POOLS}, got {self.pool!r}")
        if self.state not in get_args(WorkerState):
            raise ValueError(f"state must be one of {get_args(WorkerState)}, got {self.state!r}")
        if not self.address.rpartition(":")[2].isdigit():
            raise ValueError(f"address must be host:port, got {self.address!r}")
        if self.max_num_seqs < 1 or self.max_model_len < 1:
            raise ValueError("max_num_seqs and max_model_len must be at least 1")

    @classmethod
    def from_fields(cls, stored: Mapping[str, str]) -> Self:
        """Reads a stored hash. Raises ValueError when a field is missing or out of its bounds.

        During a rolling upgrade workers of the release before stand beside new ones: what these do not know of stays
        unknown, and everything else works.
        """
        values: dict[str, Any] = {}
        for each in fields(cls):
            if each.name not in stored:
                if each.name in _ABSENT_BEFORE:
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
    """Of all that a worker wrote, fields of a later release included."""
    told = repr(sorted(item for item in stored.items() if item[0] not in _BESIDE)).encode()
    return f"{zlib.crc32(told):08x}"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The part of a record that is told anew with every heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    wait_ms: int = 0
    round_trips: str = ""

    @property
    def num_sessions(self) -> int:
        """That have not ended."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live workers as of the last look. `degraded`: Redis could not be asked since, this is older news."""

    targets: tuple[WorkerRecord, ...] = ()
    drafts: tuple[WorkerRecord, ...] = ()
    degraded: bool = False
    num_reserved: Mapping[str, int] = field(
        default_factory=dict
    )  # by incarnation: of all coordinators together
