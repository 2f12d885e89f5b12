"""The served models by name, at one moment. Pure.

Invariant: a table never changes. Where models come and go, a new table replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.models.served_model import ServedModel
from outrider.registry.worker_record import WorkerRecord


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Finds served models by the name that a client or a target gives."""

    by_name: Mapping[str, ServedModel] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names that clients may use
    others: ServedModel | None = None  # serves every other name; None: no other is served

    def name_of(self, asked: str) -> str:
        """The name of the model that a client means."""
        return self.aliases.get(asked, asked)

    def get(self, name: str) -> ServedModel | None:
        """The model that targets serve under this name; None if it is not served here."""
        return self.by_name.get(name, self.others)

    @property
    def models(self) -> list[ServedModel]:
        """All models, each once."""
        found = [*self.by_name.values(), *([] if self.others is None else [self.others])]
        return list(dict.fromkeys(found))

    @property
    def only(self) -> ServedModel | None:
        """The model, if there is just one."""
        models = self.models
        return models[0] if len(models) == 1 else None

    def reason_against(self, worker: WorkerRecord) -> str | None:
        """Why no model here can use a worker; None if one can."""
        return self._against_target(worker) if worker.pool == "target" else self._against_draft(worker)

    def _against_target(self, worker: WorkerRecord) -> str | None:
        model = self.get(worker.model_name)
        if model is None:
            return f"serves {worker.model_name!r}, this coordinator serves {', '.join(sorted(self.by_name))}"
        if worker.tokenizer_fingerprint != model.fingerprint:
            return f"tokenizer fingerprint {worker.tokenizer_fingerprint}, ours is {model.fingerprint}"
        return None

    def _against_draft(self, worker: WorkerRecord) -> str | None:
        if any(model.admits_draft(worker) for model in self.models):
            return None
        ours = sorted({model.fingerprint for model in self.models})
        if worker.tokenizer_fingerprint in ours:
            return f"no served model of its tokenizer names {worker.model_name!r} among its draft models"
        return f"tokenizer fingerprint {worker.tokenizer_fingerprint}, ours is {' or '.join(ours)}"
