"""Choice of the targets that one sequence may go to next. Pure: reads the last snapshot, reserves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.intake.generation_request import GenerationSpec
from coordinator.placement.routing import Router, WorkerKey, key_of, prefix_key
from coordinator.placement.slot_search import Restrictions
from coordinator.recovery.poison import ON_TRIAL
from coordinator.request.sequence_losses import SequenceLosses
from outrider.errors import OutriderError, Unavailable
from outrider.registry.worker_record import Snapshot, WorkerRecord


class TargetChoice:
    """Ranks the targets of a sequence: its model's, with its run's weights, not tried yet and able to try it."""

    def __init__(
        self,
        spec: GenerationSpec,
        router: Router,
        snapshot: Callable[[], Snapshot],
        losses: SequenceLosses,
        preferred: WorkerRecord | None = None,
    ) -> None:
        """A `preferred` target comes first while it has room, until a first one has been tried."""
        self._spec = spec
        self._router = router
        self._snapshot = snapshot
        self._losses = losses
        self._preferred = preferred
        self._prefix = prefix_key(spec.prompt_token_ids, spec.cache_salt)
        self._tried: set[WorkerKey] = set()

    def targets(self) -> Mapping[str, bool]:
        """The model's targets by id, with or without room, and whether they have the run's weights."""
        run = self._spec.run
        return {
            target.worker_id: run.accepts(target)
            for target in self._snapshot().targets
            if self._spec.model_key.fits(target)
        }

    def rank(self, now_s: float) -> list[WorkerRecord]:
        """The targets that may take the sequence, the one to ask first in front."""
        needs_trial = self.needs_trial(now_s)
        run, losses = self._spec.run, self._losses
        ranked = self._router.rank_targets(
            self._snapshot(),
            now_s,
            model=self._spec.model_key,
            num_tokens=self._spec.num_tokens_max,
            excluded=self._tried,
            prefix=self._prefix,
            accepts=lambda target: (
                run.accepts(target) and not (needs_trial and not losses.trials.may_begin(target, now_s))
            ),
        )
        preferred = self._preferred
        if preferred in ranked and self._router.has_room(preferred):
            return [preferred, *(worker for worker in ranked if worker != preferred)]
        return ranked

    def restrictions(self, now_s: float) -> Restrictions:
        """Restrictions of this sequence beside its length: tried targets, the run's weights, a trial."""
        bound_to = {self._spec.run.weights_digest} - {None}
        return frozenset(self._tried) | bound_to | ({ON_TRIAL} if self.needs_trial(now_s) else set())

    def needs_trial(self, now_s: float) -> bool:
        """Whether only a target that tries no other run may take it."""
        return self._losses.needs_trial(self.targets, now_s)

    def is_hopeless(self) -> bool:
        """Whether all targets have been tried. One that just failed to answer another sequence may answer soon."""
        return not self._router.expects_target(
            self._snapshot(),
            model=self._spec.model_key,
            num_tokens=self._spec.num_tokens_max,
            excluded=self._tried,
            accepts=self._spec.run.accepts,
        )

    def is_leaving(self, target: WorkerRecord) -> bool:
        """Whether this process of the target is draining."""
        return any(
            worker.incarnation == target.incarnation and worker.state == "draining"
            for worker in self._snapshot().targets
        )

    def try_now(self, target: WorkerRecord) -> None:
        """Records that the sequence goes to this target, and does not come back for now."""
        self._preferred = None
        self._tried.add(key_of(target))

    def note_full(self, target: WorkerRecord, now_s: float) -> None:
        """Records that the target had no room after all; the sequence may come back to it."""
        self._router.note_full(target, now_s)
        self.forgive(target)

    def forgive(self, target: WorkerRecord) -> None:
        """Lets the sequence come back to this target."""
        self._tried.discard(key_of(target))

    def forgive_all(self) -> None:
        """Lets the sequence come back to all targets: lost ones may be back."""
        self._tried.clear()

    def why_none(self, refusal: OutriderError | None, num_tokens: int, now_s: float) -> OutriderError:
        """The error of a sequence with so many tokens that no target takes; `refusal` is the last target's answer."""
        others = self._router.targets_of(self._snapshot(), now_s, self._spec.model_key)
        if others and not any(map(self._spec.run.accepts, others)):
            why = "none of the target workers that are there has the weights and numerics that it began with"
            return Unavailable(
                f"the sequence stops after {num_tokens} tokens: {why}"
                + ("" if refusal is None else f" ({refusal.told})")
            )
        return refusal or Unavailable(f"no target worker is free to serve {self._spec.model!r}")
