"""Pairs of draft and target workers that a draft head rules out. Pure.

A draft worker with a draft head drafts from hidden states of its target, which a target keeps for one head or for none,
and on another engine for none. Both register the fingerprint of their head. A pair whose fingerprints differ would
have no hints, so it is never made (`Router.rank_drafts`); the operator is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.registry.worker_record import WorkerRecord

SHOWN_DIGITS: Final = 16
"""Leading digits of a fingerprint by which people tell heads apart."""


@dataclass(frozen=True, slots=True)
class UnpairedWorkers:
    """Draft workers and targets of one model that are not paired because of their draft heads."""

    model: str  # that the targets serve
    draft_head: str  # fingerprint of the head that the draft workers run
    target_head: str  # of the head that the targets keep features for; empty: for none
    engine: str  # of the targets; empty: ours
    draft_ids: tuple[str, ...]
    target_ids: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Identifies such pairs, the same while workers come and go."""
        return self.model, self.draft_head, self.target_head, self.engine

    @property
    def num_pairs(self) -> int:
        return len(self.draft_ids) * len(self.target_ids)

    def __str__(self) -> str:
        kept = f"the head {_shown(self.target_head)}" if self.target_head else "no head"
        return (
            f"draft worker {_named(self.draft_ids)} with the draft head {_shown(self.draft_head)} is not paired with "
            f"target worker {_named(self.target_ids)} of {self.model}, which keeps features for {kept}: "
            f"{_way_out({self.engine})}"
        )


def reason_against(worker: WorkerRecord, targets: Iterable[WorkerRecord]) -> str | None:
    """Why no target can use a draft worker because of its head; None if one can, or none of its tokenizer is there."""
    if worker.pool != "draft" or not worker.head_fingerprint:
        return None
    theirs = [each for each in targets if each.tokenizer_fingerprint == worker.tokenizer_fingerprint]
    if not theirs or any(map(worker.can_read, theirs)):
        return None
    return (
        f"runs the draft head {_shown(worker.head_fingerprint)}, for which no target keeps features: "
        f"{_way_out({each.engine for each in theirs})}"
    )


def unpaired(
    drafts: Iterable[WorkerRecord],
    targets: Iterable[WorkerRecord],
    admits: Callable[[str, WorkerRecord], bool],
) -> list[UnpairedWorkers]:
    """The pairs that are not made, by model and heads. `admits`: whether a target model would else take a draft
    worker's hints."""
    alike: dict[tuple[str, str, str], list[WorkerRecord]] = {}
    for target in targets:
        alike.setdefault((target.model_name, target.head_fingerprint, target.engine), []).append(target)
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for draft in drafts:
        for (model, head, engine), (target, *_) in alike.items():
            if not draft.can_read(target) and admits(model, draft):
                found.setdefault((model, draft.head_fingerprint, head, engine), []).append(draft.worker_id)
    return [
        UnpairedWorkers(
            *(model, draft_head, head, engine, tuple(draft_ids)),
            target_ids=tuple(each.worker_id for each in alike[model, head, engine]),
        )
        for (model, draft_head, head, engine), draft_ids in sorted(found.items())
    ]


def _shown(fingerprint: str) -> str:
    return fingerprint[:SHOWN_DIGITS]


def _named(worker_ids: Sequence[str]) -> str:
    first, *others = worker_ids
    return f"{first} (and {len(others)} more)" if others else first


def _way_out(engines: set[str]) -> str:
    if "" in engines or "outrider" in engines:
        return "start the target with --draft-head and the folder of this head"
    return f"a target on {' or '.join(sorted(engines))} keeps none; use a draft model there, or Outrider's own engine"
