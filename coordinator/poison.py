"""Requests that bring target workers down, known by what they had computed. Pure.

With a worker all runs are lost that it had, innocent ones too. So a run that one more loss would end is tried alone: no
target gets two such runs at a time, and a worker that dies then was brought down by the one that it had. A target
refuses a second one, whichever replica sends it; `Trials` keeps a replica from asking in vain.

A run that loses as many workers as one run may is ended. What it asked for is remembered under a digest of its prompt
and grammar, so that its client's retries do not cost as many workers again: for CONVICTED_S the same is refused at
once. A run may also end before that: its client leaves, or its deadline is over. Then the workers that were lost to it
are remembered as long, and the next run with the prompt begins with their number.

Innocent requests meet dying workers too, and popular prompts more often than others. So whoever completes the same
prompt meanwhile clears it; a run that goes on answers for its own losses only; and what other runs lost makes a run one
that is tried alone, at most: no prompt is convicted without a loss of the run that is ended. A trial is about the place
where the run before was lost, and lasts until it has been passed. A run that is lost after that, or long before, is
ended by its own losses alone.

Two kinds of loss do not count:

- A worker that never answered the request: it stood still before that came.
- A worker lost to a run that was not on trial, where workers were lost in that time that the run was not at: then
  workers die of something else. PARDONS_MAX of these at most.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from coordinator.routing import WorkerKey, key_of
from coordinator.run_identity import Losses, WorkerLife
from outrider.worker_record import WorkerRecord

ON_TRIAL: Final = "on trial"
"""What restricts a run, beside targets, that has to be tried alone."""
TRIAL_TOKENS: Final = 24
"""A run is on trial from so many tokens before the place where it was lost last until so many behind it; lost farther
from there it was lost to something else. Three steps: one generates nine tokens or one, as its hints happen to be."""
CONVICTED_S: Final = 120.0
AGAIN_AFTER_S: Final = 0.3
"""How long a target that tries a run of another replica is not asked to try one of ours."""
CONVICTIONS_MAX: Final = 16
"""Prompts refused at once, the latest ones; each is a label of a metric."""
SUSPECTS_MAX: Final = 1024
"""Prompts whose losses are remembered at once, the latest ones."""
LIVES_MAX: Final = 16
"""Workers remembered of one prompt, more than a run may cost."""
LOSSES_MAX: Final = 256
"""Workers remembered that were lost, whatever they had, the latest ones."""
PARDONS_MAX: Final = 3
"""Losses of one run that do not count because workers are lost anyway."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    killed: frozenset[WorkerLife]
    num_tokens: int  # generated at the last one
    until_s: float


class PoisonRecord:
    """Digests of prompts that cost workers, and of those that cost too many. Times are in seconds on the caller's
    clock."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}  # oldest first
        self._suspects: dict[str, _Suspect] = {}  # likewise
        self._lost_s: dict[WorkerLife, float] = {}  # likewise: when each worker was lost

    def __len__(self) -> int:
        return len(self._until_s) + len(self._suspects)

    def note_loss(self, life: WorkerLife, now_s: float) -> None:
        """A worker went away or fell silent."""
        self._lost_s.setdefault(life, now_s)
        while len(self._lost_s) > LOSSES_MAX:
            del self._lost_s[next(iter(self._lost_s))]

    def lost_since(self, moment_s: float) -> list[WorkerLife]:
        """Workers that were lost from then on, as far as this replica knows."""
        return [life for life, lost_s in self._lost_s.items() if lost_s >= moment_s]

    def suspect(self, prompt_digest: str, killed: Set[WorkerLife], num_tokens: int, now_s: float) -> None:
        """A run with this prompt ended before its output did, and had lost these workers, or earlier runs had some;
        `num_tokens` were generated at the last one."""
        known = self._suspects.pop(prompt_digest, None)
        if known is not None and known.until_s > now_s:
            killed = known.killed | killed
        lives = frozenset(sorted(killed)[:LIVES_MAX])
        self._suspects[prompt_digest] = _Suspect(lives, num_tokens, now_s + CONVICTED_S)
        while len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]

    def losses(self, prompt_digest: str, now_s: float) -> Losses:
        """Workers that were lost to runs with this prompt that have ended, none of them with its output."""
        known = self._suspects.get(prompt_digest)
        if known is None or known.until_s <= now_s:
            return Losses()
        return Losses(len(known.killed), known.num_tokens)

    def convict(self, prompt_digest: str, now_s: float) -> None:
        """A run with this prompt has lost as many workers as a run may."""
        self._until_s.pop(prompt_digest, None)
        self._until_s[prompt_digest] = now_s + CONVICTED_S
        while len(self._until_s) > CONVICTIONS_MAX:
            del self._until_s[next(iter(self._until_s))]

    def acquit(self, prompt_digest: str) -> bool:
        """A run with this prompt has come to its end. Whether that changes anything."""
        was_suspected = self._suspects.pop(prompt_digest, None) is not None
        return self._until_s.pop(prompt_digest, None) is not None or was_suspected

    def time_left_s(self, prompt_digest: str, now_s: float) -> float:
        """For how long this prompt is refused; 0 when it is not."""
        return max(self._until_s.get(prompt_digest, now_s) - now_s, 0.0)

    def convicted(self, now_s: float) -> list[str]:
        """The prompts that are refused now."""
        self._until_s = {digest: until_s for digest, until_s in self._until_s.items() if until_s > now_s}
        self._suspects = {digest: each for digest, each in self._suspects.items() if each.until_s > now_s}
        return list(self._until_s)


class Trials:
    """The targets that have a run which one more loss would end, as far as this replica knows: at most one at each.
    Times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._at: set[WorkerKey] = set()
        self._refused_until_s: dict[WorkerKey, float] = {}

    def may_begin(self, target: WorkerRecord, now_s: float) -> bool:
        """Whether the target seems to have no such run."""
        key = key_of(target)
        return key not in self._at and self._refused_until_s.get(key, now_s) <= now_s

    def refuse(self, target: WorkerRecord, now_s: float) -> None:
        """The target has one of another replica."""
        self._refused_until_s = {
            key: until_s for key, until_s in self._refused_until_s.items() if until_s > now_s
        }
        self._refused_until_s[key_of(target)] = now_s + AGAIN_AFTER_S

    def begin(self, target: WorkerRecord) -> None:
        """It has one from now on, until `end`."""
        self._at.add(key_of(target))

    def end(self, target: WorkerRecord) -> None:
        """That run has ended, was lost, or has gone on for long enough."""
        self._at.discard(key_of(target))
