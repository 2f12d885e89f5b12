"""A batch and its states, as OpenAI has them. Pure.

    validating ─┬─> failed
                ├─> in_progress ─┬─> finalizing ─┬─> completed
                │                │               └─> expired
                └────────────────┴─> cancelling ───> cancelled

`finalizing` is also the state of a batch whose time is up: `is_overdue` says that it ends as expired. A state changes
in Redis by one script, which compares the state before; `sources_of` says from which states a state may follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self


class BatchState(StrEnum):
    """The state of a batch."""

    VALIDATING = "validating"  # its file is being checked, all of it before any line runs
    FAILED = "failed"  # a line was refused, and none has run
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # every line has ended, or its time is up; the output is being written
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"  # no line runs any more; the output so far is being written
    CANCELLED = "cancelled"


_NEXT: Final[Mapping[BatchState, frozenset[BatchState]]] = MappingProxyType(
    {
        BatchState.VALIDATING: frozenset({BatchState.FAILED, BatchState.IN_PROGRESS, BatchState.CANCELLING}),
        BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING}),
        BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED}),
        BatchState.CANCELLING: frozenset({BatchState.CANCELLED}),
        BatchState.FAILED: frozenset(),
        BatchState.COMPLETED: frozenset(),
        BatchState.EXPIRED: frozenset(),
        BatchState.CANCELLED: frozenset(),
    }
)


def sources_of(state: BatchState) -> tuple[BatchState, ...]:
    """The states that a state may follow."""
    return tuple(before for before, after in _NEXT.items() if state in after)


def is_over(state: BatchState) -> bool:
    """Whether nothing follows the state."""
    return not _NEXT[state]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCounts:
    """Sums over lines that have ended. Raises ValueError for negative ones."""

    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0  # of the input
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0  # of the output

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0:
            raise ValueError(f"sums over lines are never negative: {self}")

    @property
    def num_ended(self) -> int:
        """Lines that have ended."""
        return self.num_completed + self.num_failed

    def __add__(self, other: LineCounts) -> LineCounts:
        return LineCounts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as Redis keeps it. Times are in seconds since 1970; None: that has not happened."""

    batch_id: str
    tenant: str | None  # None: API keys are not in use
    shares_prefixes: bool = False  # as the API key says
    models: frozenset[str] | None = None  # that it may use, as the API key said; None: all
    input_file_id: str
    endpoint: str
    window: str
    metadata: Mapping[str, str] | None = None
    output_life_s: int | None = None  # of its output files; None: the default
    created_at: int
    expires_at: int  # when its time is up
    state: BatchState = BatchState.VALIDATING
    is_overdue: bool = False  # lines were left when its time was up
    errors: tuple[Mapping[str, Any], ...] = ()  # of the check of its file
    num_lines: int = 0
    counts: LineCounts = LineCounts()
    input_content: str = ""  # names of its own copy of the file and of the index of its lines, once it is checked
    index_content: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: Mapping[BatchState, int] = field(default_factory=dict)  # when it came into a state

    def __post_init__(self) -> None:
        if self.counts.num_ended > self.num_lines:
            raise ValueError(f"{self.counts.num_ended} lines have ended, of {self.num_lines}")

    @property
    def has_ended_lines_only(self) -> bool:
        """Whether every line has ended."""
        return self.counts.num_ended == self.num_lines

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return is_over(self.state)

    def to_fields(self) -> dict[str, str]:
        """The fields of a new batch in Redis."""
        about = {
            "batch_id": self.batch_id,
            "tenant": self.tenant,
            "shares_prefixes": self.shares_prefixes,
            "input_file_id": self.input_file_id,
            "endpoint": self.endpoint,
            "window": self.window,
            "metadata": self.metadata,
            "output_life_s": self.output_life_s,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        } | ({} if self.models is None else {"models": sorted(self.models)})
        return {"about": json.dumps(about), "state": self.state, "num_lines": str(self.num_lines)}

    @classmethod
    def from_fields(cls, stored: Mapping[str, str]) -> Self:
        """Reads what Redis keeps. Raises ValueError if it is damaged."""
        try:
            about = json.loads(stored["about"])
            if (models := about.pop("models", None)) is not None:
                about["models"] = frozenset(models)
            times = {state: int(stored[f"{state}_at"]) for state in BatchState if f"{state}_at" in stored}
            return cls(
                **about,
                state=BatchState(stored["state"]),
                is_overdue=stored.get("is_overdue") == "1",
                errors=tuple(json.loads(stored.get("errors", "[]"))),
                num_lines=int(stored.get("num_lines", 0)),
                counts=LineCounts(**{each.name: int(stored.get(each.name, 0)) for each in fields(LineCounts)}),
                input_content=stored.get("input_content", ""),
                index_content=stored.get("index_content", ""),
                output_file_id=stored.get("output_file_id") or None,
                error_file_id=stored.get("error_file_id") or None,
                times=times,
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the record of a batch is damaged: {error!r}") from error
