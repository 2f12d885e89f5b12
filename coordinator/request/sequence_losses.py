"""Losses of targets that had one sequence: they decide whether its run is tried alone, and whether it ends. Pure.

Each loss is recorded with the run (`RunIdentity`) and with the replica's record of poisonous prompts
(`coordinator.recovery.poison`), which explains trials and blame. A trial lasts until the sequence has gone beyond the
position of its last loss, or has left the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import cached_property

from coordinator.intake.generation_request import GenerationSpec
from coordinator.recovery.poison import (
    LOSSES_MAX,
    NOTED_S,
    TRIAL_TOKENS,
    TRIAL_TOKENS_MAX,
    PoisonRecord,
    Trials,
)
from outrider.errors import (
    OutriderError,
    WorkerFailed,
    WorkerLost,
    WorkerLostAtOnce,
    WorkerSilent,
    WorkerUnanswered,
    WorkerUnreached,
)
from outrider.registry.worker_record import WorkerRecord

Targets = Callable[[], Mapping[str, bool]]


class Loss(Enum):
    """Whether a target that was left was lost to the sequence."""

    NONE = auto()
    POSSIBLE = auto()
    """Its process has to be asked."""
    CERTAIN = auto()


class SequenceLosses:
    """The losses of one sequence, and its trial at the current target. Times are seconds on the caller's clock.

    `num_tokens`: output tokens that the sequence has. `targets` returns the ids of the model's targets, and whether
    each has the weights of the run.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        index: int,
        poison: PoisonRecord,
        trials: Trials,
        *,
        num_losses_max: int,
        arrival_s: float,
    ) -> None:
        """`num_losses_max`: workers that a run may cost if no others die."""
        self._spec = spec
        self._index = index
        self._poison = poison
        self.trials = trials
        self._num_losses_max = num_losses_max
        self._since_s = arrival_s - NOTED_S
        self.num_tokens_at_begin = 0  # of output, when it came to the current target
        self._num_tokens_at_loss: int | None = None  # generated at the last lost target
        self._trial: WorkerRecord | None = None  # the target that tries it alone
        self._seen: tuple[int, int] | None = None  # losses and record changes when `_is_tried` was computed
        self._is_tried = False  # whether it had to be tried alone then
        self.was_tried = False  # alone, by the current or last target
        self._has_gone_beyond = False  # the position of its last loss, at the current target

    @cached_property
    def prompt_digest(self) -> str:
        """`GenerationSpec.prompt_digest`, computed once."""
        return self._spec.prompt_digest

    @property
    def trial_tokens(self) -> int:
        """Tokens after which the target may try another run; 0 if it need not try this one alone."""
        return 0 if self._trial is None else self._num_trial_tokens

    @property
    def _num_trial_tokens(self) -> int:
        """Number of tokens beyond which a trial is over. The positions of earlier runs' losses are unknown."""
        if self._num_tokens_at_loss is None:
            return TRIAL_TOKENS_MAX
        return min(self._num_tokens_at_loss + TRIAL_TOKENS, TRIAL_TOKENS_MAX)

    def needs_trial(self, targets: Targets, now_s: float) -> bool:
        """Whether one more loss may end this run, so that a target must try it alone."""
        num_losses = self._spec.run.num_losses
        if num_losses < self._num_losses_max - 1:
            return num_losses > 0 and self._is_convicted(now_s)
        seen = num_losses, self._poison.num_changes
        if self._seen != seen:
            self._seen = seen
            self._is_tried = self._is_blamed_for(num_losses + 1, targets, now_s, has_passed_trial=False)
        return self._is_tried

    def judge(self, error: OutriderError, target: WorkerRecord, now_s: float, *, is_leaving: bool) -> Loss:
        """Judges the error with which a target was left. It was not lost if only the connection broke, if it was
        draining, or if it tried the run of another replica."""
        if isinstance(error, WorkerUnanswered):
            self._poison.note_loss(target, None, now_s)
        if not isinstance(error, WorkerFailed | WorkerLost) or isinstance(error, WorkerUnreached):
            return Loss.NONE
        if isinstance(error, WorkerLostAtOnce) and self.trials.has_another(target, now_s):
            return Loss.NONE
        if is_leaving:
            return Loss.NONE
        return Loss.CERTAIN if isinstance(error, WorkerFailed | WorkerSilent) else Loss.POSSIBLE

    def begin(self, target: WorkerRecord, num_tokens: int, *, on_trial: bool) -> None:
        """Records that the sequence begins at a target."""
        self.num_tokens_at_begin = num_tokens
        self._has_gone_beyond = False
        self.was_tried = on_trial
        if on_trial:
            self.trials.begin(target)
            self._trial = target

    def observe(self, num_tokens: int) -> bool:
        """Records the sequence's growth. True once, when it goes beyond the position of its losses: it is excused
        then."""
        run = self._spec.run
        if self._has_gone_beyond or not (self._trial or run.num_losses):
            return False
        self._has_gone_beyond = num_tokens - self.num_tokens_at_begin > self._num_trial_tokens
        if self._has_gone_beyond:
            self.end_trial()
            self._poison.excuse(self.prompt_digest, run.killed)
        return self._has_gone_beyond

    def end_trial(self) -> None:
        """Ends the trial: the sequence has left the target, or has passed."""
        if self._trial is not None:
            self.trials.end(self._trial)
            self._trial = None

    def regain(self, target: WorkerRecord) -> None:
        """Removes the loss of a target that serves again: the connection had broken, or it had been paused."""
        if target in self._spec.run.doubtful:  # unless another sequence of the run was faster
            self._spec.run.regain(target)
            self._poison.regain(target)

    def lose(self, target: WorkerRecord, num_tokens: int, targets: Targets, now_s: float, *, is_gone: bool) -> bool:
        """Counts a loss. True if it ends the run. `is_gone`: as in `RunIdentity.lose`."""
        run, digest = self._spec.run, self.prompt_digest
        run.lose(self._index, target, is_gone=is_gone)
        self._num_tokens_at_loss = num_tokens - self.num_tokens_at_begin
        if is_gone:
            self._poison.note_loss(target, digest, now_s)
        is_proven = self.was_tried or run.num_losses >= LOSSES_MAX
        if not is_proven or not self._is_blamed_for(
            run.num_losses, targets, now_s, has_passed_trial=self._has_gone_beyond
        ):
            return False
        run.blame()
        if is_gone:
            self._poison.convict(digest, now_s)
        return True

    def _is_blamed_for(self, num_losses: int, targets: Targets, now_s: float, *, has_passed_trial: bool) -> bool:
        """Whether so many losses end the run; one does if another run with its prompt was ended lately."""
        return self._is_convicted(now_s) or self._poison.blames(
            self.prompt_digest,
            num_losses,
            self._spec.run.killed,
            has_passed_trial=has_passed_trial,
            num_losses_max=self._num_losses_max,
            num_sequences=self._spec.num_candidates,
            targets=targets(),
            model=self._spec.model,
            since_s=self._since_s,
        )

    def _is_convicted(self, now_s: float) -> bool:
        return self._poison.time_left_s(self.prompt_digest, now_s) > 0
