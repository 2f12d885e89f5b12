"""Requests that bring target workers down, known by what they had computed. Pure.

With a worker all runs are lost that it had, innocent ones too. So a run that one more loss would end is tried alone: no
target gets two such runs at a time, and a worker that dies then was brought down by the one that it had. A target
refuses a second one, whichever replica sends it; `Trials` keeps replicas from asking in vain. Others wait meanwhile, so
only those are tried that have to be: where all targets died at once, hardly a run is.

A run that loses more workers than chance explains is ended (`PoisonRecord.blames`): where no others die, as many as a
run may cost, the last one on its trial. What it asked for is remembered under a digest of its prompt and grammar, so
that its client's retries do not cost as many workers again: for CONVICTED_S the same is refused at once, at every
replica, for they tell each other (`coordinator.loss_exchange`). A run may also end before that: its client leaves, or
its deadline is over. Then the workers that were lost to it are remembered as long, and the next run with the prompt
begins with their number.

Innocent requests meet dying workers too, and popular prompts more often than others. So whoever completes the same
prompt meanwhile clears it, and who goes well beyond the place of a loss excuses it; a run that goes on answers for its
own losses only; and what other runs lost makes a run one that is tried alone, at most. But for LOSSES_MAX no run is
ended, and no prompt convicted, without a loss on trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

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
CHANCE_MAX: Final = 0.001
"""A run is not ended while an innocent one would lose as many workers, or more, with a greater probability."""
LOSSES_PER_OTHER: Final = 2
"""Workers that a run may cost in addition for each other one that dies; in a small fleet chance explains much."""
LOSSES_MAX: Final = 8
"""Workers that a run may cost however many others die. Who reads this number of a run in the journal refuses it."""
NOTED_MAX: Final = 256
"""Workers remembered that were lost, to whatever runs, the latest ones."""
NOTED_S: Final = 300.0
"""Workers lost as long before a run came, or since, tell it that the fleet loses some: longer than most runs take, so
that there is something to compare with at their third loss."""
BACK_S: Final = 15.0
"""A target that is registered as ready for so long after its loss was not lost: leases run out sooner, and models that
stand still are noticed."""
NEWS_MAX: Final = 512
"""Facts that wait to be told, the latest ones."""
NOTED_S_MAX: Final = 3600.0
"""Lost workers are remembered as long: longer than nearly all runs take."""
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


Fact = tuple[str, ...]
"""What replicas tell one another, each with the moment at which it became so:

    ("lost", worker id, incarnation, model)        a target went without a word
    ("had", worker id, incarnation, prompt)        it had a run with this prompt then
    ("excused", prompt, worker id, incarnation)    but it went well beyond the place of that loss elsewhere
    ("suspect", prompt, worker id, incarnation)    a run with this prompt lost it, and ended before its output did
    ("convicted", prompt)                          a run with this prompt was ended for its losses
    ("cleared", prompt)                            a run with this prompt came to its end: nothing was lost to it
"""
_ORDER: Final = {"cleared": 0, "lost": 1, "excused": 2, "had": 3, "suspect": 3, "convicted": 3}
TOLD_ANEW: Final = frozenset({"suspect", "convicted", "cleared"})
"""Facts of which the latest moment counts, and not the first."""


@dataclass(slots=True)
class _Suspect:
    killed: set[WorkerLife]
    since_s: float


@dataclass(frozen=True, slots=True)
class _Loss:
    model: str
    lost_s: float
    had: dict[str, float]  # prompts that the worker had, as far as is known, and when that was told
    excused: set[str]  # prompts that it was not lost to


class PoisonRecord:
    """Prompts that cost workers, those that cost too many, and the workers that were lost. Empty, and so false, while
    there is none. Prompts are digests, times seconds on the caller's clock."""

    def __init__(self) -> None:
        self._convicted_s: dict[str, float] = {}  # when; oldest first
        self._suspects: dict[str, _Suspect] = {}  # likewise
        self._losses: dict[WorkerLife, _Loss] = {}  # likewise
        self._cleared_s: dict[str, float] = {}  # likewise
        self._present: dict[WorkerLife, WorkerRecord] = {}
        self._news: dict[Fact, None] = {}
        self.num_changes = 0
        """Of what is known of lost workers: while there is none, `blames` answers the same."""

    def __len__(self) -> int:
        return len(self._convicted_s) + len(self._suspects) + len(self._losses)

    def take_news(self) -> list[Fact]:
        """What has become so here since the last call, in order."""
        news, self._news = list(self._news), {}
        return news

    def hear(self, facts: Mapping[Fact, float], now_s: float) -> None:
        """What other replicas have told, or this one, and when. What makes no sense says nothing."""
        for fact, at_s in sorted(
            facts.items(), key=lambda each: _ORDER.get(each[0][0] if each[0] else "", -1)
        ):
            match fact:
                case ("cleared", prompt):
                    self._clear(prompt, at_s)
                case ("lost", worker_id, incarnation, model):
                    life = WorkerLife(worker_id, incarnation)
                    if not self._is_back(life, at_s, now_s):
                        self._note(life, model, at_s)
                case ("excused", prompt, worker_id, incarnation):
                    self._excuse(WorkerLife(worker_id, incarnation), prompt)
                case ("had", worker_id, incarnation, prompt):
                    self._note_had(WorkerLife(worker_id, incarnation), prompt, at_s)
                case ("suspect", prompt, worker_id, incarnation):
                    self._suspect(prompt, {WorkerLife(worker_id, incarnation)}, at_s)
                case ("convicted", prompt):
                    self._convict(prompt, at_s)

    def suspect(self, prompt: str, killed: Set[WorkerLife], now_s: float) -> None:
        """A run with this prompt ended before its output did, and had lost these workers."""
        self._suspect(prompt, killed, now_s)
        self._tell(*(("suspect", prompt, *life) for life in sorted(killed)))

    def num_killed(self, prompt: str, now_s: float) -> int:
        """Workers that were lost to runs with this prompt that have ended, none of them with its output."""
        known = self._suspects.get(prompt)
        return 0 if known is None or known.since_s + CONVICTED_S <= now_s else len(known.killed)

    def note_loss(self, target: WorkerRecord, prompt: str | None, now_s: float) -> None:
        """A target went away or fell silent while a run with this prompt was there; None: before a run came."""
        life = WorkerLife.of(target)
        self._note(life, target.model_name, now_s)
        self._tell(("lost", *life, target.model_name))
        if prompt is not None:
            self._note_had(life, prompt, now_s)
            self._tell(("had", *life, prompt))

    def excuse(self, prompt: str, killed: Set[WorkerLife]) -> None:
        """A run with this prompt that had lost these workers has gone well beyond where it was lost."""
        for life in killed:
            if life in self._losses and prompt not in self._losses[life].excused:
                self._excuse(life, prompt)
                self._tell(("excused", prompt, *life))

    def regain(self, target: WorkerRecord) -> None:
        """One that was noted as lost is there after all: only the connection to it had broken."""
        self._losses.pop(WorkerLife.of(target), None)
        self.num_changes += 1

    def look(self, targets: Sequence[WorkerRecord], now_s: float) -> None:
        """The targets that there are now. Those that have gone since the last look, and were not leaving, were lost,
        whether or not a run of ours was there; those that are there for long after their loss were not."""
        present = {WorkerLife.of(target): target for target in targets}
        for life, target in self._present.items():
            if life not in present and target.state != "draining":
                self.note_loss(target, None, now_s)
        self._present = present
        for life, target in present.items():
            if life in self._losses and self._is_back(life, self._losses[life].lost_s, now_s):
                self.regain(target)

    def blames(
        self,
        prompt_digest: str,
        num_losses: int,
        killed: Set[WorkerLife],
        *,
        has_passed_trial: bool,
        num_losses_max: int,
        num_sequences: int,
        targets: Mapping[str, bool],
        model: str,
        since_s: float,
    ) -> bool:
        """Whether a run with this prompt, which has lost `num_losses` workers, is to be ended.

        That is so at `num_losses_max`, with two exceptions. Where other targets of the model were lost since `since_s`,
        it is a binomial test: if it were not the run's doing, each of the workers lost would have been one of
        the run's with the probability `num_sequences` / number of targets. The run is ended where as many as it has
        lost, or more, have a probability below CHANCE_MAX, and at the latest with LOSSES_PER_OTHER more for each other
        one. A run that had passed its trial at the last one is always tested: what happened before did not happen
        again, and others came to that target meanwhile. At LOSSES_MAX any is ended.

        `killed`: those that it lost here and that did not say what had failed. `targets`: by the ids of those
        there are, whether the run can go there: elsewhere it could not have been.
        """
        if num_losses >= LOSSES_MAX:
            return True
        if num_losses < num_losses_max:
            return False
        recent = {
            life: loss for life, loss in self._losses.items() if loss.model == model and loss.lost_s > since_s
        }
        num_elsewhere = sum(
            life not in killed and prompt_digest not in loss.had for life, loss in recent.items()
        )
        if not has_passed_trial and num_losses >= num_losses_max + LOSSES_PER_OTHER * num_elsewhere:
            return True
        num_targets = len(
            {worker_id for worker_id, takes in targets.items() if takes}
            | {worker_id for worker_id, _ in recent if worker_id not in targets}
        )
        share = min(num_sequences / max(num_targets, 1), 1.0)
        chance = probability_of_at_least(num_losses, num_losses + num_elsewhere, share)
        return chance < CHANCE_MAX

    def convict(self, prompt: str, now_s: float) -> None:
        """A run with this prompt has lost as many workers as a run may."""
        self._convict(prompt, now_s)
        self._tell(("convicted", prompt))

    def acquit(self, prompt: str, now_s: float) -> bool:
        """A run with this prompt has come to its end: no worker was lost to it. Whether that changes anything."""
        is_known = prompt in self._suspects or prompt in self._convicted_s
        if is_known or any(prompt in loss.had for loss in self._losses.values()):
            self._clear(prompt, now_s)
            self._tell(("cleared", prompt))
        return is_known

    def time_left_s(self, prompt: str, now_s: float) -> float:
        """For how long this prompt is refused; 0 when it is not."""
        return max(self._convicted_s.get(prompt, -math.inf) + CONVICTED_S - now_s, 0.0)

    def convicted(self, now_s: float) -> list[str]:
        """The prompts that are refused now."""
        since_s = now_s - CONVICTED_S
        self._convicted_s = {prompt: at_s for prompt, at_s in self._convicted_s.items() if at_s > since_s}
        self._suspects = {prompt: each for prompt, each in self._suspects.items() if each.since_s > since_s}
        since_s = now_s - NOTED_S_MAX
        self._losses = {life: each for life, each in self._losses.items() if each.lost_s > since_s}
        self._cleared_s = {prompt: at_s for prompt, at_s in self._cleared_s.items() if at_s > since_s}
        return list(self._convicted_s)

    def _tell(self, *facts: Fact) -> None:
        self._news |= dict.fromkeys(facts)
        _keep_latest(self._news, NEWS_MAX)

    def _note(self, life: WorkerLife, model: str, at_s: float) -> None:
        if life not in self._losses:
            self._losses[life] = _Loss(model, at_s, {}, set())
            _keep_latest(self._losses, NOTED_MAX)
            self.num_changes += 1

    def _note_had(self, life: WorkerLife, prompt: str, at_s: float) -> None:
        loss = self._losses.get(life)
        if loss is None or prompt in loss.had or prompt in loss.excused or self._is_cleared(prompt, at_s):
            return
        loss.had[prompt] = at_s
        self.num_changes += 1

    def _excuse(self, life: WorkerLife, prompt: str) -> None:
        loss = self._losses.get(life)
        if loss is not None and prompt not in loss.excused:
            loss.excused.add(prompt)
            loss.had.pop(prompt, None)
            self.num_changes += 1

    def _suspect(self, prompt: str, killed: Set[WorkerLife], at_s: float) -> None:
        if self._is_cleared(prompt, at_s):
            return
        known = self._suspects.pop(prompt, _Suspect(set(), at_s))
        if known.since_s + CONVICTED_S <= at_s:
            known.killed.clear()
        known.killed |= killed
        known.killed = set(sorted(known.killed)[:LIVES_MAX])
        known.since_s = max(known.since_s, at_s)
        self._suspects[prompt] = known
        _keep_latest(self._suspects, SUSPECTS_MAX)

    def _convict(self, prompt: str, at_s: float) -> None:
        if not self._is_cleared(prompt, at_s):
            self.num_changes += prompt not in self._convicted_s
            self._convicted_s[prompt] = max(at_s, self._convicted_s.pop(prompt, -math.inf))
            _keep_latest(self._convicted_s, CONVICTIONS_MAX)

    def _clear(self, prompt: str, at_s: float) -> None:
        if self._is_cleared(prompt, at_s):
            return
        self._cleared_s.pop(prompt, None)
        self._cleared_s[prompt] = at_s
        _keep_latest(self._cleared_s, SUSPECTS_MAX)
        for loss in self._losses.values():
            if loss.had.get(prompt, math.inf) <= at_s:
                del loss.had[prompt]
        if prompt in self._suspects and self._suspects[prompt].since_s <= at_s:
            del self._suspects[prompt]
        if self._convicted_s.get(prompt, math.inf) <= at_s:
            del self._convicted_s[prompt]
        self.num_changes += 1

    def _is_back(self, life: WorkerLife, lost_s: float, now_s: float) -> bool:
        there = self._present.get(life)
        return there is not None and there.state == "ready" and now_s - lost_s > BACK_S

    def _is_cleared(self, prompt: str, at_s: float) -> bool:
        return at_s <= self._cleared_s.get(prompt, -math.inf)


def _keep_latest(known: dict[Any, Any], num_max: int) -> None:
    while len(known) > num_max:
        del known[next(iter(known))]


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
