"""Watch for draft workers whose hints are never accepted. Pure.

Such a draft loads, has the right tokenizer and occupies a worker, and no request shows it: they pause speculation one
by one and decode plainly. So hints are counted over all requests, by draft worker and by the target's model. The first
hundred decided hints are enough; a worker that has been of use is judged by more, for prompts differ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from coordinator.placement.routing import WorkerKey, key_of
from outrider.registry.worker_record import WorkerRecord

NUM_DECIDED_FIRST: Final = 100
NUM_DECIDED_LATER: Final = 2000
ACCEPTED_SHARE_MIN: Final = 0.02
"""Least accepted share of the hints decided. A draft that is right for 10 % of its hints has fewer than two of a
hundred accepted in one run of three thousand."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A change of verdict on a draft worker, after a full count."""

    draft: WorkerRecord
    model: str
    num_decided: int
    num_accepted: int
    is_alarm: bool  # False: the alarm is over

    def __str__(self) -> str:
        name = f"draft worker {self.draft.worker_id} ({self.draft.model_name}, {self.draft.dtype})"
        counts = f"of {self.num_decided} hints for {self.model} {self.num_accepted} were accepted"
        if not self.is_alarm:
            return f"{name} is of use again: {counts}"
        return (
            f"{name} is of no use: {counts}. It has the right tokenizer but predicts other tokens: is it a draft for "
            "another model, were its weights damaged by their quantization, or does it lack a fine-tuning that the "
            "target has? Requests go on without its hints, at plain decoding's speed; its worker is wasted"
        )


@dataclass(slots=True)
class _Count:
    num_decided: int = 0
    num_accepted: int = 0
    num_needed: int = NUM_DECIDED_FIRST
    is_alarm: bool = False


class AcceptanceWatch:
    """One replica's counts, bounded by the living workers (`keep`)."""

    def __init__(self) -> None:
        self._counts: dict[tuple[WorkerKey, str], _Count] = {}

    def observe(self, draft: WorkerRecord, model: str, num_draft_tokens: int, num_accepted: int) -> Finding | None:
        """Counts one step's verified and accepted hints of a worker's likeliest path; returns a finding if the verdict
        changes."""
        count = self._counts.setdefault((key_of(draft), model), _Count())
        # Hints behind a rejected one are not decided.
        count.num_decided += min(num_accepted + 1, num_draft_tokens)
        count.num_accepted += num_accepted
        if count.num_decided < count.num_needed:
            return None
        is_alarm = count.num_accepted < ACCEPTED_SHARE_MIN * count.num_decided
        finding = Finding(draft, model, count.num_decided, count.num_accepted, is_alarm)
        has_changed = is_alarm is not count.is_alarm
        num_needed = NUM_DECIDED_FIRST if is_alarm else NUM_DECIDED_LATER
        self._counts[key_of(draft), model] = _Count(num_needed=num_needed, is_alarm=is_alarm)
        return finding if has_changed else None

    def keep(self, drafts: Collection[WorkerRecord]) -> None:
        """Forgets all other workers."""
        kept = {key_of(draft) for draft in drafts}
        self._counts = {key: count for key, count in self._counts.items() if key[0] in kept}

    @property
    def alarms(self) -> list[tuple[str, str]]:
        """Draft worker and model of every standing alarm."""
        return sorted((key[1], model) for (key, model), count in self._counts.items() if count.is_alarm)
