"""Actions of a sequence (`coordinator.request.sequence`), performed in the order given. Pure, plain data."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.output.sequence_output import OutputItem
from coordinator.placement.slot_queue import Slot
from coordinator.speculation.fallback import FallbackAction, FallbackState, Trigger
from outrider.errors import OutriderError
from outrider.registry.worker_record import WorkerRecord


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Calls Generate at the target of this slot."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Gives back a slot that is not used."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Reject:
    """Leaves the target because of a malformed answer; TargetLeft comes back with this error."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class ChangeSpeculation:
    """Attaches or detaches a draft worker, or switches the target's acceptance of hints."""

    actions: tuple[FallbackAction, ...]


@dataclass(frozen=True, slots=True)
class Show:
    """Passes an item of output to the client."""

    item: OutputItem


@dataclass(frozen=True, slots=True)
class CountStep:
    """Counts a step for metrics, limits and fair shares."""

    num_tokens: int
    num_draft_tokens: int
    num_accepted: int
    num_branches: int  # of num_draft_tokens, those beside the draft's likeliest path
    num_accepted_branches: int
    gap_s: float | None  # since the step before; None for the first


@dataclass(frozen=True, slots=True)
class ReportFallback:
    """Reports a change of the fallback controller's state."""

    before: FallbackState
    after: FallbackState
    trigger: Trigger


@dataclass(frozen=True, slots=True)
class ReportLeft:
    """Reports that the sequence leaves a target early."""

    target: WorkerRecord
    error: OutriderError


@dataclass(frozen=True, slots=True)
class CountReplay:
    """Counts a replay of the sequence at another target, or its end because there is none."""


@dataclass(frozen=True, slots=True)
class ShareLosses:
    """Shares changes in the record of lost targets with other replicas soon."""


@dataclass(frozen=True, slots=True)
class ReportPoison:
    """Reports that the run was ended for the targets that it cost."""


Action = (
    OpenCall | ReleaseSlot | Reject | ChangeSpeculation | Show | CountStep | ReportFallback | ReportLeft
    | CountReplay | ShareLosses | ReportPoison
)  # fmt: skip
