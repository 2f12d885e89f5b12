"""The models that are served now, for whom, and the reasons not to use registered workers.

Invariant: whatever turns a name from outside into a model or its tokenizer passes through `find` or `tokenizer_of`,
with its caller. A model that a caller may not use does not exist for it: no answer tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.access.api_keys import Caller
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

    def served(self, caller: Caller) -> list[ModelStatus]:
        """The caller's models with at least one usable target, in order of their names."""
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
            if caller.may_use(name)
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

    def tokenizer_of(self, asked: str, caller: Caller) -> tuple[Tokenizer, int | None]:
        """The tokenizer of a model, which need not have a target, and its longest context, in tokens, if it has one. An
        empty name is the only tokenizer. Raises ModelNotFound, InvalidRequest, and Unavailable if none of the caller's
        models is served."""
        table = self._models.current()
        live = self._live(table)
        names = _names(table, live, caller)
        name = _name_of(asked, table, live, caller)
        if not name and caller.models is not None:
            name = _only(names)
            if not name:
                raise Unavailable(self._why_no_target("", table, caller), 2.0)
        served = table.get(name) if name else table.only
        if served is None:
            raise _ambiguous(names)
        targets = [target for found in live.values() for target in found.targets if name in ("", found.name)]
        return served.tokenizer, max((target.max_model_len for target in targets), default=None)

    def find(self, asked: str, caller: Caller) -> FoundModel:
        """A model with its usable targets; an empty name is the only one. Raises ModelNotFound naming the caller's,
        InvalidRequest if a name is required, or Unavailable."""
        table = self._models.current()
        live = self._live(table)
        name = _name_of(asked, table, live, caller) or _only(_names(table, live, caller))
        if name not in live:
            raise Unavailable(self._why_no_target(name, table, caller), 2.0)
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

    def _why_no_target(self, name: str, table: ModelTable, caller: Caller) -> str:
        """The reason, from the targets of this name and those of names that are not served; an empty name is any. It
        names workers, so that a tenant gets none; the log and `/health` tell it to the operator."""
        if caller.tenant is not None:
            return f"no target worker of {name or 'your models'} is live"
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


def _names(table: ModelTable, live: Collection[str], caller: Caller) -> Collection[str]:
    """The models that the caller may name, with or without a target."""
    return {name for name in {*live, *table.by_name} if caller.may_use(name)}


def _name_of(asked: str, table: ModelTable, live: Collection[str], caller: Caller) -> str:
    """The name of the model that a client means. Raises ModelNotFound."""
    name, known = table.name_of(asked), {*live, *table.by_name}
    if name and ((known and name not in known) or not caller.may_use(name)):
        names = _names(table, live, caller)
        told = f"; there is {', '.join(sorted(names))}" if names else ""
        hidden = "" if caller.models is None else " or you do not have access to it"
        raise ModelNotFound(f"The model {asked!r} does not exist{hidden}{told}")
    return name


def _only(names: Collection[str]) -> str:
    """The only model; empty if there is none. Raises InvalidRequest if there are several."""
    if len(names) > 1:
        raise _ambiguous(names)
    return next(iter(names), "")


def _ambiguous(names: Collection[str]) -> InvalidRequest:
    return InvalidRequest("model", f"model is required, for there are several: {', '.join(sorted(names))}")
