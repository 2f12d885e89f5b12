"""One model that clients may ask for: how its prompts are read and its output written, and who may send it hints.
Pure.

Everything that depends on a model and not on a worker is found here. A request keeps the served model that it began
with, so it is finished in the same way when the model's entry changes or goes away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coordinator.formats.output_format import OutputFormat
from coordinator.models.model_grammars import ModelGrammars
from outrider.registry.worker_record import WorkerRecord
from outrider.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model under one or several names. Thread-safe."""

    tokenizer: Tokenizer
    output_format: OutputFormat
    draft_models: frozenset[str] = frozenset()  # names of the draft models that may send hints; empty: any
    deadline_default_s: float | None = None  # of requests that carry none; None: the coordinator's

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer, which targets and draft workers must have, too."""
        return self.tokenizer.fingerprint

    @cached_property
    def grammars(self) -> ModelGrammars:
        """The compilers of the model's grammars."""
        return ModelGrammars(self.tokenizer)

    def admits_draft(self, worker: WorkerRecord) -> bool:
        """Whether a draft worker may send hints for this model."""
        has_name = not self.draft_models or worker.model_name in self.draft_models
        return has_name and worker.tokenizer_fingerprint == self.fingerprint
