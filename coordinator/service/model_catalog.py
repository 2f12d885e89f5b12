"""The models that are served now, and the reasons not to use registered workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from coordinator.placement.routing import Exclusion, Router
from outrider.errors import InvalidRequest, ModelNotFound, Unavailable
from outrider.registry.worker_record import Pool, Snapshot, WorkerRecord


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Current status of one served model."""

    model: str
    max_model_len: int  # of the target with the longest context, tokens
    num_target_workers: int
    num_draft_workers: int


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """Answers queries about models from the last snapshot of the registry."""

    _router: Router
    _snapshot: Callable[[], Snapshot]
    _now_s: Callable[[], float]
    _served_model_names: Collection[str]
    _last_departure: Callable[[Pool], str | None]  # the worker that left a pool last

    def served(self) -> list[ModelStatus]:
        """Models with at least one usable target, in order of their names."""
        snapshot, now_s = self._snapshot(), self._now_s()
        drafts, _ = self._router.usable(snapshot.drafts, now_s)
        return [
            ModelStatus(model, max(target.max_model_len for target in targets), len(targets), len(drafts))
            for model, targets in self._router.models(snapshot, now_s).items()
        ]

    def exclusions(self) -> list[Exclusion]:
        """Registered workers that are not used, with reasons."""
        snapshot, now_s = self._snapshot(), self._now_s()
        _, excluded = self._router.usable((*snapshot.targets, *snapshot.drafts), now_s)
        return excluded

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound for a name that is not served; an empty one is the only model."""
        self._check_name(name, self._router.models(self._snapshot(), self._now_s()))

    def _check_name(self, name: str, models: Mapping[str, object]) -> list[str]:
        """Returns the names that are served. Raises ModelNotFound."""
        served = sorted(models.keys() | set(self._served_model_names))
        if name and served and name not in served:
            raise ModelNotFound(f"The model {name!r} does not exist; there is {', '.join(served)}")
        return served

    def find(self, name: str) -> tuple[str, list[WorkerRecord]]:
        """The model's name and its usable targets. Raises NotFound naming those served, or Unavailable."""
        models = self._router.models(self._snapshot(), self._now_s())
        served = self._check_name(name, models)
        if not name:
            if len(served) > 1:
                raise InvalidRequest("model", f"model is required, for there are several: {', '.join(served)}")
            name = served[0] if served else ""
        if name not in models:
            raise Unavailable(self._why_no_target(), 2.0)
        return name, models[name]

    def has_draft(self, model_name: str) -> bool:
        """Whether a draft worker of this model could be used."""
        usable, _ = self._router.usable(self._snapshot().drafts, self._now_s())
        return any(worker.model_name == model_name for worker in usable)

    def _why_no_target(self) -> str:
        reasons = [f"{each.worker_id}: {each.reason}" for each in self.exclusions() if each.pool == "target"]
        if not reasons:
            reasons += filter(None, [self._last_departure("target")])
        if self._snapshot().degraded:
            reasons.append("the registry does not answer")
        return "no target worker is live" + (f" ({'; '.join(reasons)})" if reasons else "")
