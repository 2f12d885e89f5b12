"""Requests that bring target workers down, recognized by the losses of their runs. Pure.

A lost worker takes all its runs with it, innocent ones too. So a run that one more loss would end is tried alone: a
target has at most one such run at a time, and if it dies then, that run is to blame. A target refuses a second one,
whichever replica sends it; `Trials` spares the replicas calls in vain. Other such runs wait, so only those are tried
that must be: after all targets died at once, hardly any is.

A run that loses more workers than chance explains is ended (`PoisonRecord.blames`): if no others die, after as many as
a run may cost, the last one on its trial. A digest of tenant, prompt and grammar is remembered, so that the client's
retries do not cost as many workers again: for CONVICTED_S every replica refuses the same request at once, since they
exchange losses (`coordinator.recovery.loss_exchange`). A run may end earlier, when its client leaves or its deadline is
over. Then the workers lost to it are remembered as long, and the next run with the prompt starts with their number.

A prompt is always one tenant's. Parameters outside the digest can bring targets down, too, so that otherwise a tenant
could have a prompt that all use refused to all, or clear it for another one whose runs it really kills. In return a
prompt that kills for everybody costs each tenant's runs their own losses.

Innocent requests lose workers too, and popular prompts more often than others. So a run that completes clears its
prompt; one that goes well beyond the position of a loss is excused from it; a running one is charged with its own
losses only; and other runs' losses can at most put a run on trial. Below LOSSES_MAX no run is ended, and no prompt
convicted, without a loss on trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from coordinator.intake.run_identity import WorkerLife
from coordinator.placement.routing import WorkerKey, key_of
from outrider.registry.worker_record import WorkerRecord

ON_TRIAL: Final = "on trial"
"""The restriction of a run that must be tried alone."""
TRIAL_TOKENS: Final = 24
"""A run has passed its trial with so many more tokens than it got at the target that it was lost with. Three steps: one
generates one to nine tokens, depending on its hints."""
TRIAL_TOKENS_MAX: Final = 96
"""Or with so many in all, for others wait for their trial. A loss caused by the sequence's length repeats at once: the
earlier tokens are part of its prompt now."""
CHANCE_MAX: Final = 0.001
"""A run is not ended while an innocent one would lose as many workers, or more, with a higher probability."""
LOSSES_PER_OTHER: Final = 2
"""Additional workers that a run may cost for each other one that dies; in a small fleet chance explains much."""
LOSSES_MAX: Final = 8
"""Workers that a run may cost however many others die. A replica that reads this number in the journal refuses it."""
NOTED_MAX: Final = 256
"""Lost workers remembered, of all runs, the latest ones."""
NOTED_S: Final = 300.0
"""Losses up to so long before a run, or since, show it the fleet's rate: longer than most runs take, so that there is
something to compare with at their third loss."""
BACK_S: Final = 15.0
"""A target that is registered as ready so long after its loss was not lost: leases run out sooner, and frozen models
are noticed."""
NEW_FACTS_MAX: Final = 512
"""Facts that wait to be sent, the latest ones."""
NOTED_S_MAX: Final = 3600.0
"""Time for which lost workers are remembered: longer than nearly all runs take."""
CONVICTED_S: Final = 120.0
AGAIN_AFTER_S: Final = 0.3
"""Pause before a target that tries another replica's run is asked to try one of this replica's."""
TRYING_S: Final = 5.0
"""Time during which a target may still be trying another replica's run: a run that ends then was ended by that."""
CONVICTIONS_MAX: Final = 16
"""Prompts refused at once, the latest ones; each is a label of a metric."""
SUSPECTS_MAX: Final = 1024
"""Prompts with remembered losses, the latest ones."""
LIVES_MAX: Final = 16
"""Workers remembered for one prompt, more than a run may cost."""


Fact = tuple[str, ...]
"""A fact that replicas exchange, each with the moment at which it became true:

    ("lost", worker id, incarnation, model)        a target disappeared without notice
    ("had", worker id, incarnation, prompt)        it had a run with this prompt then
    ("excused", prompt, worker id, incarnation)    a run with it went well beyond the position of that loss elsewhere
    ("suspect", prompt, worker id, incarnation)    a run with this prompt lost it, and ended without its output
    ("convicted", prompt)                          a run with this prompt was ended for its losses
    ("cleared", prompt)                            a run with this prompt completed: no loss was its fault
"""
_ORDER: Final = {"cleared": 0, "lost": 1, "excused": 2, "had": 3, "suspect": 3, "convicted": 3}
REPORTED_AGAIN: Final = frozenset({"suspect", "convicted", "cleared"})
"""Facts whose latest moment counts, not the first."""


@dataclass(slots=True)
class _Suspect:
    killed: set[WorkerLife]
    since_s: float


@dataclass(frozen=True, slots=True)
class _Loss:
    model: str
    lost_s: float
    had: dict[str, float]  # prompts that the worker had, as far as known, and when that was reported
    excused: set[str]  # prompts that it was not lost to


class PoisonRecord:
    """Prompts that cost workers, convicted prompts, and lost workers. Its length is 0 while there are none. Prompts are
    digests, times seconds on the caller's clock."""

    def __init__(self) -> None:
        self._convicted_s: dict[str, float] = {}  # when; oldest first
        self._suspects: dict[str, _Suspect] = {}  # oldest first
        self._losses: dict[WorkerLife, _Loss] = {}  # oldest first
        self._cleared_s: dict[str, float] = {}  # oldest first
        self._present: dict[WorkerLife, WorkerRecord] = {}
        self._new_facts: dict[Fact, None] = {}
        self.num_changes = 0
        """Number of changes to the known losses; while it stays, so does `blames`' answer."""

    def __len__(self) -> int:
        return len(self._convicted_s) + len(self._suspects) + len(self._losses)

    def take_new_facts(self) -> list[Fact]:
        """New facts of this replica since the last call, in order."""
        new_facts, self._new_facts = list(self._new_facts), {}
        return new_facts

    def merge(self, facts: Mapping[Fact, float], now_s: float) -> None:
        """Takes facts that replicas reported, with their times; malformed ones are ignored."""
        for fact, at_s in sorted(facts.items(), key=lambda each: _ORDER.get(each[0][0] if each[0] else "", -1)):
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
        """Records workers lost by a run with this prompt that ended without its output."""
        self._suspect(prompt, killed, now_s)
        self._report(*(("suspect", prompt, *life) for life in sorted(killed)))

    def num_killed(self, prompt: str, now_s: float) -> int:
        """Number of workers lost to ended runs with this prompt, none of which completed."""
        known = self._suspects.get(prompt)
        return 0 if known is None or known.since_s + CONVICTED_S <= now_s else len(known.killed)

    def note_loss(self, target: WorkerRecord, prompt: str | None, now_s: float) -> None:
        """Records a target that disappeared or fell silent while it had a run with this prompt; None: before it had
        one."""
        life = WorkerLife.of(target)
        self._note(life, target.model_name, now_s)
        self._report(("lost", *life, target.model_name))
        if prompt is not None:
            self._note_had(life, prompt, now_s)
            self._report(("had", *life, prompt))

    def excuse(self, prompt: str, killed: Set[WorkerLife]) -> None:
        """Excuses a prompt from these losses: a run with it has gone well beyond their position."""
        for life in killed:
            if life in self._losses and prompt not in self._losses[life].excused:
                self._excuse(life, prompt)
                self._report(("excused", prompt, *life))

    def regain(self, target: WorkerRecord) -> None:
        """Removes a loss that was none: only the connection to the target had broken."""
        self._losses.pop(WorkerLife.of(target), None)
        self.num_changes += 1

    def look(self, targets: Sequence[WorkerRecord], now_s: float) -> None:
        """Compares the targets with those of the last call. One that has disappeared without draining is lost, whether
        or not it had a run of this replica; one that is present long after its loss was not lost."""
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

        It is ended at `num_losses_max`, with two exceptions. First, if other targets of the model were lost since
        `since_s`, a binomial test decides: if the run is innocent, each lost worker was one of the run's with
        probability `num_sequences` / number of targets. The run is ended if its number of losses, or more, has a
        probability below CHANCE_MAX, and at the latest with LOSSES_PER_OTHER more for each other loss. Second, a run
        that had passed its trial at the last lost target is always tested: the earlier failure did not repeat, and that
        target had other runs by then. At LOSSES_MAX any run is ended.

        `killed`: the workers it lost here that did not report a failure. `targets`: by worker id, whether the run can
        go there; it cannot have been elsewhere.
        """
        if num_losses >= LOSSES_MAX:
            return True
        if num_losses < num_losses_max:
            return False
        recent = {life: loss for life, loss in self._losses.items() if loss.model == model and loss.lost_s > since_s}
        num_elsewhere = sum(life not in killed and prompt_digest not in loss.had for life, loss in recent.items())
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
        """Records that a run with this prompt has lost as many workers as a run may."""
        self._convict(prompt, now_s)
        self._report(("convicted", prompt))

    def acquit(self, prompt: str, now_s: float) -> bool:
        """Clears a prompt that a run has completed: no worker was lost to it. Returns whether that changes anything."""
        is_known = prompt in self._suspects or prompt in self._convicted_s
        if is_known or any(prompt in loss.had for loss in self._losses.values()):
            self._clear(prompt, now_s)
            self._report(("cleared", prompt))
        return is_known

    def time_left_s(self, prompt: str, now_s: float) -> float:
        """Time for which this prompt is still refused; 0 if it is not."""
        return max(self._convicted_s.get(prompt, -math.inf) + CONVICTED_S - now_s, 0.0)

    def convicted(self, now_s: float) -> list[str]:
        """The prompts that are refused now; forgets what has expired."""
        since_s = now_s - CONVICTED_S
        self._convicted_s = {prompt: at_s for prompt, at_s in self._convicted_s.items() if at_s > since_s}
        self._suspects = {prompt: each for prompt, each in self._suspects.items() if each.since_s > since_s}
        since_s = now_s - NOTED_S_MAX
        self._losses = {life: each for life, each in self._losses.items() if each.lost_s > since_s}
        self._cleared_s = {prompt: at_s for prompt, at_s in self._cleared_s.items() if at_s > since_s}
        return list(self._convicted_s)

    def _report(self, *facts: Fact) -> None:
        self._new_facts |= dict.fromkeys(facts)
        _keep_latest(self._new_facts, NEW_FACTS_MAX)

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
    """Targets with a run that one more loss would end, as far as this replica knows: at most one such run at each.
    Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._at: set[WorkerKey] = set()
        self._refused_s: dict[WorkerKey, float] = {}  # when each target had another replica's run

    def may_begin(self, target: WorkerRecord, now_s: float) -> bool:
        """Whether the target seems to have no such run."""
        key = key_of(target)
        return key not in self._at and now_s >= self._refused_s.get(key, -math.inf) + AGAIN_AFTER_S

    def refuse(self, target: WorkerRecord, now_s: float) -> None:
        """Records that the target has such a run of another replica."""
        self._refused_s = {key: at_s for key, at_s in self._refused_s.items() if now_s - at_s < TRYING_S}
        self._refused_s[key_of(target)] = now_s

    def has_another(self, target: WorkerRecord, now_s: float) -> bool:
        """Whether the target has tried another replica's run within TRYING_S."""
        return now_s < self._refused_s.get(key_of(target), -math.inf) + TRYING_S

    def begin(self, target: WorkerRecord) -> None:
        """Records that the target has such a run, until `end`."""
        self._at.add(key_of(target))

    def end(self, target: WorkerRecord) -> None:
        """Ends a run's trial: it has ended, was lost, or has passed."""
        self._at.discard(key_of(target))


def probability_of_at_least(num: int, num_trials: int, probability: float) -> float:
    """Probability of `num` or more successes in independent trials with this probability of success each."""
    return sum(
        math.comb(num_trials, each) * probability**each * (1.0 - probability) ** (num_trials - each)
        for each in range(num, num_trials + 1)
    )
