"""Requests that bring target workers down, known by what they had computed. Pure.

With a worker all runs are lost that it had, innocent ones too. So a run that has lost all but one of the workers that
it may cost is tried alone: no target gets two such runs at a time, and a worker that dies then was brought down by the
one that it had. A target refuses a second one, whichever replica sends it; `Trials` keeps replicas from asking in vain.

A run that loses more workers than chance explains is ended (`PoisonRecord.blames`): where no others die, as many as a
run may cost, the last one on its trial. What it asked for is remembered under a digest of its prompt and grammar, so
that its client's retries do not cost as many workers again: for CONVICTED_S the same is refused at once. A run may also
end before that: its client leaves, or its deadline is over. Then the workers that were lost to it are remembered as
long, and the next run with the prompt begins with their number.

Innocent requests meet dying workers too, and popular prompts more often than others. So whoever completes the same
prompt meanwhile clears it; a run that goes on answers for its own losses only; and what other runs lost makes a run one
that is tried alone, at most: no prompt is convicted without a loss of the run that is ended.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from coordinator.routing import WorkerKey, key_of
from coordinator.run_identity import WorkerLife
from outrider.worker_record import WorkerRecord

ON_TRIAL: Final = "on trial"
"""What restricts a run, beside targets, that has to be tried alone."""
TRIAL_TOKENS: Final = 24
"""A run has passed its trial when it has so many more tokens than it got at the target that it was lost with. Three
steps: one generates nine tokens or one, as its hints happen to be."""
TRIAL_TOKENS_MAX: Final = 96
"""Or so many in all. Others wait for their trial meanwhile, and what brings workers down by the sequence's length
happens again at once: the tokens that there were are its prompt now."""
CHANCE_MAX: Final = 0.01
"""A run is not ended while an innocent one would lose as many workers, or more, with a greater probability."""
CHANCE_AFTER_TRIAL_MAX: Final = 0.001
"""The limit for a run that had passed its trial at the worker lost last: that speaks for it, but not for ever."""
LOSSES_PER_OTHER: Final = 2
"""Workers that a run may cost in addition for each other one that dies; in a small fleet chance explains much."""
LOSSES_MAX: Final = 8
"""Workers that a run may cost however many others die. Who reads this number of a run in the journal refuses it."""
NOTED_MAX: Final = 256
"""Workers remembered that were lost, to whatever runs, the latest ones."""
NOTED_S: Final = 300.0
"""How long a lost worker tells that the fleet loses some: longer than most runs, so that there is something to compare
with at their third loss."""
CONVICTED_S: Final = 120.0
AGAIN_AFTER_S: Final = 0.3
"""How long a target that tries a run of another replica is not asked to try one of ours."""
TRYING_S: Final = 5.0
"""How long a target that tried a run of another replica may still do so: one that ends then ended by that."""
CONVICTIONS_MAX: Final = 16
"""Prompts refused at once, the latest ones; each is a label of a metric."""
SUSPECTS_MAX: Final = 1024
"""Prompts whose losses are remembered at once, the latest ones."""
LIVES_MAX: Final = 16
"""Workers remembered of one prompt, more than a run may cost."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    killed: frozenset[WorkerLife]
    until_s: float


@dataclass(frozen=True, slots=True)
class _Loss:
    model: str
    lost_s: float
    had: set[str]  # digests of the prompts that the worker had, as far as this replica knows


class PoisonRecord:
    """Digests of prompts that cost workers, and of those that cost too many, and the workers that were lost. Empty, and
    so false, while there is none. Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # oldest first
        self._suspects: dict[str, _Suspect] = {}  # likewise
        self._losses: dict[WorkerLife, _Loss] = {}  # likewise

    def __len__(self) -> int:
        return len(self._until_s) + len(self._suspects) + len(self._losses)

    def suspect(self, prompt_digest: str, killed: Set[WorkerLife], now_s: float) -> None:
        """A run with this prompt ended before its output did, and had lost these workers, or earlier runs had some."""
        known = self._suspects.pop(prompt_digest, None)
        if known is not None and known.until_s > now_s:
            killed = known.killed | killed
        self._suspects[prompt_digest] = _Suspect(frozenset(sorted(killed)[:LIVES_MAX]), now_s + CONVICTED_S)
        while len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]

    def num_killed(self, prompt_digest: str, now_s: float) -> int:
        """Workers that were lost to runs with this prompt that have ended, none of them with its output."""
        known = self._suspects.get(prompt_digest)
        return 0 if known is None or known.until_s <= now_s else len(known.killed)

    def note_loss(self, target: WorkerRecord, prompt_digest: str | None, now_s: float) -> None:
        """A target went away or fell silent while a run with this prompt was there; None: before a run came."""
        life = target.worker_id, target.incarnation
        loss = self._losses.setdefault(life, _Loss(target.model_name, now_s, set()))
        if prompt_digest is not None:
            loss.had.add(prompt_digest)
        while len(self._losses) > NOTED_MAX:
            del self._losses[next(iter(self._losses))]

    def blames(
        self,
        prompt_digest: str,
        num_losses: int,
        killed: Set[WorkerLife],
        *,
        has_passed_trial: bool,
        num_losses_max: int,
        num_sequences: int,
        targets: Set[str],
        model: str,
        now_s: float,
    ) -> bool:
        """Whether a run with this prompt, which has lost `num_losses` workers, is to be ended.

        That is so at `num_losses_max`, with two exceptions. Where other targets of the model were lost in the last
        NOTED_S, it is a binomial test: if it were not the run's doing, each of the workers lost would have been one of
        the run's with the probability `num_sequences` / number of targets. The run is ended where as many as it has
        lost, or more, have a probability below CHANCE_MAX, and at the latest with LOSSES_PER_OTHER more for each other
        one. A run that had passed its trial at the last one is always tested, and with CHANCE_AFTER_TRIAL_MAX: what
        happened before did not happen again, and others came to that target meanwhile. At LOSSES_MAX any is ended.

        `killed`: those that it lost here and that did not say what had failed. `targets`: ids of those there are.
        """
        if num_losses >= LOSSES_MAX:
            return True
        if num_losses < num_losses_max:
            return False
        recent = {
            life: loss
            for life, loss in self._losses.items()
            if loss.model == model and loss.lost_s > now_s - NOTED_S
        }
        num_elsewhere = sum(
            life not in killed and prompt_digest not in loss.had for life, loss in recent.items()
        )
        if not has_passed_trial and num_losses >= num_losses_max + LOSSES_PER_OTHER * num_elsewhere:
            return True
        num_targets = len(targets | {worker_id for worker_id, _ in recent}) or 1
        share = min(num_sequences / num_targets, 1.0)
        chance = probability_of_at_least(num_losses, num_losses + num_elsewhere, share)
        return chance < (CHANCE_AFTER_TRIAL_MAX if has_passed_trial else CHANCE_MAX)

    def convict(self, prompt_digest: str, now_s: float) -> None:
        """A run with this prompt has lost as many workers as a run may."""
        self._until_s.pop(prompt_digest, None)
        self._until_s[prompt_digest] = now_s + CONVICTED_S
        while len(self._until_s) > CONVICTIONS_MAX:
            del self._until_s[next(iter(self._until_s))]

    def acquit(self, prompt_digest: str) -> bool:
        """A run with this prompt has come to its end: no worker was lost to it. Whether that changes anything."""
        for loss in self._losses.values():
            loss.had.discard(prompt_digest)
        was_suspected = self._suspects.pop(prompt_digest, None) is not None
        return self._until_s.pop(prompt_digest, None) is not None or was_suspected

    def time_left_s(self, prompt_digest: str, now_s: float) -> float:
        """For how long this prompt is refused; 0 when it is not."""
        return max(self._until_s.get(prompt_digest, now_s) - now_s, 0.0)

    def convicted(self, now_s: float) -> list[str]:
        """The prompts that are refused now."""
        self._until_s = {digest: until_s for digest, until_s in self._until_s.items() if until_s > now_s}
        self._suspects = {digest: each for digest, each in self._suspects.items() if each.until_s > now_s}
        self._losses = {life: each for life, each in self._losses.items() if each.lost_s > now_s - NOTED_S}
        return list(self._until_s)


class Trials:
    """The targets that have a run which one more loss would end, as far as this replica knows: at most one at each.
    Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._at: set[WorkerKey] = set()
        self._refused_s: dict[WorkerKey, float] = {}  # when each target had a run of another replica

    def may_begin(self, target: WorkerRecord, now_s: float) -> bool:
        """Whether the target seems to have no such run."""
        key = key_of(target)
        return key not in self._at and now_s >= self._refused_s.get(key, -math.inf) + AGAIN_AFTER_S

    def refuse(self, target: WorkerRecord, now_s: float) -> None:
        """The target has one of another replica."""
        self._refused_s = {key: at_s for key, at_s in self._refused_s.items() if now_s - at_s < TRYING_S}
        self._refused_s[key_of(target)] = now_s

    def has_another(self, target: WorkerRecord, now_s: float) -> bool:
        """Whether the target tried a run of another replica a moment ago."""
        return now_s < self._refused_s.get(key_of(target), -math.inf) + TRYING_S

    def begin(self, target: WorkerRecord) -> None:
        """It has one from now on, until `end`."""
        self._at.add(key_of(target))

    def end(self, target: WorkerRecord) -> None:
        """That run has ended, was lost, or has gone on for long enough."""
        self._at.discard(key_of(target))


def probability_of_at_least(num: int, num_trials: int, probability: float) -> float:
    """Of so many successes or more, in so many independent trials with this probability of success each."""
    return sum(
        math.comb(num_trials, each) * probability**each * (1.0 - probability) ** (num_trials - each)
        for each in range(num, num_trials + 1)
    )
