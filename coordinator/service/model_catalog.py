"""The models that are served now, and the reasons not to use registered workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.models.model_table import ModelTable
from coordinator.models.models_file import ServedModels
from coordinator.models.served_model import ServedModel
from coordinator.placement.draft_heads import UnpairedWorkers, unpaired
from coordinator.placement.routing import Exclusion, Router
from outrider.errors import InvalidRequest, ModelNotFound, Unavailable
from outrider.registry.worker_record import Pool, Snapshot, WorkerRecord
from outrider.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Current status of one served model."""

    model: str
    max_model_len: int  # of the target with the longest context, tokens
    num_target_workers: int
    num_draft_workers: int
    has_chat_template: bool


class FoundModel(NamedTuple):
    """A served model that has a usable target."""

    served: ServedModel
    name: str
    targets: list[WorkerRecord]


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """Answers queries about models from the last snapshot of the registry."""

    _models: ServedModels
    _router: Router
    _snapshot: Callable[[], Snapshot]
    _now_s: Callable[[], float]
    # The worker of this model that left its pool last.
    _last_departure: Callable[[Pool, str], str | None]

    def served(self) -> list[ModelStatus]:
        """Models with at least one usable target, in order of their names."""
        snapshot, now_s = self._snapshot(), self._now_s()
        drafts, _ = self._router.usable(snapshot.drafts, now_s)
        return [
            ModelStatus(
                name,
                max(target.max_model_len for target in targets),
                len(targets),
                sum(served.admits_draft(each) and any(map(each.can_read, targets)) for each in drafts),
                served.tokenizer.has_chat_template,
            )
            for served, name, targets in self._live(self._models.current()).values()
        ]

    def names(self) -> Collection[str]:
        """The models that requests may name, with or without a target."""
        table = self._models.current()
        return self._live(table).keys() | table.by_name.keys()

    def num_drafts(self) -> int:
        """The number of draft workers that some model may use."""
        return len(self._router.usable(self._snapshot().drafts, self._now_s())[0])

    def exclusions(self) -> list[Exclusion]:
        """Registered workers that are not used, with reasons."""
        snapshot, now_s = self._snapshot(), self._now_s()
        _, excluded = self._router.usable((*snapshot.targets, *snapshot.drafts), now_s)
        return excluded

    def unpaired(self) -> list[UnpairedWorkers]:
        """Usable workers that are not paired because of their draft heads."""
        snapshot, now_s, table = self._snapshot(), self._now_s(), self._models.current()
        drafts, targets = (self._router.usable(each, now_s)[0] for each in (snapshot.drafts, snapshot.targets))

        def admits(model: str, draft: WorkerRecord) -> bool:
            served = table.get(model)
            return served is not None and served.admits_draft(draft)

        return unpaired(drafts, targets, admits)

    def tokenizer_of(self, asked: str) -> tuple[Tokenizer, int | None]:
        """The tokenizer of a model, which need not have a target, and its longest context, in tokens, if it has one. An
        empty name is the only tokenizer. Raises ModelNotFound and InvalidRequest."""
        table = self._models.current()
        live = self._live(table)
        name = self._name_of(asked, table, live)
        served = table.get(name) if name else table.only
        if served is None:
            raise _ambiguous(live.keys() | table.by_name.keys())
        targets = [target for found in live.values() for target in found.targets if name in ("", found.name)]
        return served.tokenizer, max((target.max_model_len for target in targets), default=None)

    def find(self, asked: str) -> FoundModel:
        """A model with its usable targets; an empty name is the only one. Raises ModelNotFound naming those served,
        InvalidRequest if a name is required, or Unavailable."""
        table = self._models.current()
        live = self._live(table)
        name = self._name_of(asked, table, live)
        if not name:
            served = live.keys() | table.by_name.keys()
            if len(served) > 1:
                raise _ambiguous(served)
            name = next(iter(served), "")
        if name not in live:
            raise Unavailable(self._why_no_target(name, table), 2.0)
        return live[name]

    def has_draft(self, model_name: str) -> bool:
        """Whether a draft worker of this model could be used."""
        usable, _ = self._router.usable(self._snapshot().drafts, self._now_s())
        return any(worker.model_name == model_name for worker in usable)

    def _live(self, table: ModelTable) -> dict[str, FoundModel]:
        """The models of a table that have a usable target, by name."""
        targets_by_name = self._router.models(self._snapshot(), self._now_s())
        return {
            name: FoundModel(served, name, targets)
            for name, targets in targets_by_name.items()
            if (served := table.get(name)) is not None
        }

    def _name_of(self, asked: str, table: ModelTable, live: dict[str, FoundModel]) -> str:
        """The name of the model that a client means. Raises ModelNotFound."""
        name, served = table.name_of(asked), live.keys() | table.by_name.keys()
        if name and served and name not in served:
            raise ModelNotFound(f"The model {name!r} does not exist; there is {', '.join(sorted(served))}")
        return name

    def _why_no_target(self, name: str, table: ModelTable) -> str:
        """The reason, from the targets of this name and those of names that are not served; an empty name is any."""
        concerned = [
            each
            for each in self._snapshot().targets
            if name in ("", each.model_name) or table.get(each.model_name) is None
        ]
        _, excluded = self._router.usable(concerned, self._now_s())
        reasons = [f"{each.worker_id}: {each.reason}" for each in excluded]
        if not reasons:
            reasons += filter(None, [self._last_departure("target", name)])
        if self._snapshot().degraded:
            reasons.append("the registry does not answer")
        of_model = f" of {name}" if len(table.by_name) > 1 else ""
        return f"no target worker{of_model} is live" + (f" ({'; '.join(reasons)})" if reasons else "")


def _ambiguous(names: Collection[str]) -> InvalidRequest:
    return InvalidRequest("model", f"model is required, for there are several: {', '.join(sorted(names))}")
