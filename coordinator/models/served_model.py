"""One model that clients may ask for: how its prompts are read and its output written, and who may send it hints.
Pure but for loading the vocabulary of its grammars.

Everything that depends on a model and not on a worker is found here. A request keeps the served model that it began
with, so it is finished in the same way when the model's entry changes or goes away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.formats.output_format import OutputFormat
from outrider.errors import ConfigurationError
from outrider.registry.worker_record import WorkerRecord
from outrider.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from outrider.grammar import GrammarCompiler


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model under one or several names. Thread-safe."""

    tokenizer: Tokenizer
    output_format: OutputFormat
    draft_models: frozenset[str] = frozenset()  # names of the draft models that may send hints; empty: any
    deadline_default_s: float | None = None  # of requests that carry none; None: the coordinator's
    compilers: dict[int, GrammarCompiler] = field(default_factory=dict)
    """Grammar compilers by vocabulary size, which targets of one tokenizer may pad differently."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer, which targets and draft workers must have, too."""
        return self.tokenizer.fingerprint

    def admits_draft(self, worker: WorkerRecord) -> bool:
        """Whether a draft worker may send hints for this model."""
        has_name = not self.draft_models or worker.model_name in self.draft_models
        return has_name and worker.tokenizer_fingerprint == self.fingerprint

    def new_compiler(self, vocab_size: int) -> GrammarCompiler:
        """Makes a grammar compiler. The first time there are modules to import, which blocks."""
        from outrider.grammar import GrammarCompiler

        return GrammarCompiler(
            self._tokenizer_json,
            vocab_size=vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            load=self._load_vocabulary,
        )

    def load_grammars(self) -> None:
        """Loads what the first grammar needs, before the first request. Blocks.

        It takes 0.5 s of imports, and llguidance reads the vocabulary in one call that keeps the interpreter's lock.
        """
        with suppress(ConfigurationError):  # a request with a grammar reports it
            self._load_vocabulary(self._tokenizer_json)

    @property
    def _tokenizer_json(self) -> Path:
        return self.tokenizer.model_dir / "tokenizer.json"

    @cached_property
    def _load_vocabulary(self) -> Callable[[Path], tuple[LLTokenizer, int]]:
        """The vocabulary that all compilers share; it goes away with this model."""
        from outrider.grammar.tokenizer import load_tokenizer

        return lru_cache(maxsize=1)(load_tokenizer)
