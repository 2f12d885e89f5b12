"""States and events of a sequence (`coordinator.request.sequence` has the table). Pure, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Protocol

from coordinator.placement.slot_queue import Slot
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, target_pb2


class SequenceState(Enum):
    """The states of the table in `coordinator.request.sequence`; the last three are final."""

    NEW = auto()
    REPEATING = auto()
    CHECKING = auto()
    QUEUED = auto()
    RUNNING = auto()
    JUDGING = auto()
    COUNTING = auto()
    WAITING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


FINAL: Final = frozenset({SequenceState.FINISHED, SequenceState.FAILED, SequenceState.CANCELLED})


class IllegalEvent(RuntimeError):
    """An event that the state it met does not allow: a bug of ours. The state is unchanged."""


class Step(Protocol):
    """One step's result for a sequence: tokens committed, hints verified, hints accepted."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_draft_tokens(self) -> int: ...
    @property
    def num_branches(self) -> int:
        """Hints beside the draft's likeliest path, included in `num_draft_tokens`."""

    @property
    def num_accepted_branches(self) -> int: ...
    @property
    def num_prediction_tokens(self) -> int: ...
    @property
    def num_accepted_prediction_tokens(self) -> int: ...
    @property
    def hint_source(self) -> int:
        """Source of the first hint verified, a value of HintSource; 0 without any."""

    @property
    def is_resting(self) -> bool:
        """Whether the target accepts no hints at present, by its own choice."""


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence starts."""


@dataclass(frozen=True, slots=True)
class RepeatDue:
    """The event loop has time to repeat another part of what the client already has."""


@dataclass(frozen=True, slots=True)
class SlotGranted:
    """A slot at a target is reserved."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class NoTarget:
    """No target can take the sequence at present."""


@dataclass(frozen=True, slots=True)
class SlotRefused:
    """The queue for slots refuses the sequence: Overloaded, Unavailable or DeadlineExceeded."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class TargetStarted:
    """The target has accepted the sequence."""

    decoding_mode: common_pb2.DecodingMode
    exactness: common_pb2.Exactness = common_pb2.EXACTNESS_TOKENS


@dataclass(frozen=True, slots=True)
class TargetWaits:
    """The target is alive and has nothing to show; unknown kinds of event from newer targets map to it."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of prompt tokens, as the output takes them."""

    chunk: target_pb2.PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step of the target committed tokens."""

    step: Step


@dataclass(frozen=True, slots=True)
class TargetEnded:
    """The last event of the target's stream."""

    reason: target_pb2.FinishReason
    stop_token_id: int | None
    counted: Any  # what the target counted, as the output takes it


@dataclass(frozen=True, slots=True)
class TargetLeft:
    """The target's stream ended early or was refused; `coordinator.request.target_call` lists the errors."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class TargetProbed:
    """Whether the process of the target that was left is still alive; None: it gave no answer."""

    lives: bool | None


@dataclass(frozen=True, slots=True)
class DoubtfulProbed:
    """The targets counted as lost that serve after all; other replicas' losses were read meanwhile."""

    serving: Sequence[WorkerRecord]


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The wait for another target is over."""


@dataclass(frozen=True, slots=True)
class DraftLost:
    """No draft worker follows the sequence any more."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left, the deadline is over, or a sibling failed."""


Event = (
    Started | RepeatDue | SlotGranted | NoTarget | SlotRefused | TargetStarted | TargetWaits | PromptScored
    | StepTaken | TargetEnded | TargetLeft | TargetProbed | DoubtfulProbed | WaitOver | DraftLost | Cancelled
)  # fmt: skip


def exactness_of(started: target_pb2.SessionStarted) -> common_pb2.Exactness:
    """Returns the session's exactness, which followed from the decoding mode in releases before the field."""
    if started.exactness:
        return started.exactness
    is_sampled = started.decoding_mode == common_pb2.DECODING_MODE_REJECTION
    return common_pb2.EXACTNESS_DISTRIBUTION if is_sampled else common_pb2.EXACTNESS_TOKENS
