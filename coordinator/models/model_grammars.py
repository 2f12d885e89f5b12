"""The grammar compilers of one served model, over one vocabulary that is loaded once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigurationError
from outrider.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from outrider.grammar import GrammarCompiler


class ModelGrammars:
    """Makes and keeps grammar compilers. What it has loaded goes away with the model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_json = tokenizer.model_dir / "tokenizer.json"
        self.compilers: dict[int, GrammarCompiler] = {}
        """By vocabulary size, which targets of one tokenizer may pad differently."""

    def new_compiler(self, vocab_size: int) -> GrammarCompiler:
        """Makes a compiler. The first time there are modules to import, which blocks."""
        from outrider.grammar import GrammarCompiler

        return GrammarCompiler(
            self._tokenizer_json,
            vocab_size=vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            load=self._load_vocabulary,
        )

    def load(self) -> None:
        """Loads what the first grammar needs, before the first request. Blocks.

        It takes 0.5 s of imports, and llguidance reads the vocabulary in one call that keeps the interpreter's lock.
        """
        with suppress(ConfigurationError):  # a request with a grammar reports it
            self._load_vocabulary(self._tokenizer_json)

    @cached_property
    def _load_vocabulary(self) -> Callable[[Path], tuple[LLTokenizer, int]]:
        from outrider.grammar.tokenizer import load_tokenizer

        return lru_cache(maxsize=1)(load_tokenizer)
