"""Compiles grammars for one tokenizer, each one once, within bounds of size, time and memory."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.errors import ConfigurationError, InvalidRequest, detached
from outrider.grammar.compile_queue import TIME_LIMIT_S, CompileQueue
from outrider.grammar.effort import Effort, GrammarViolation, Owners
from outrider.grammar.lexemes import max_items
from outrider.grammar.position import Position, Vocabulary
from outrider.grammar.source import longest_lexeme, to_llguidance
from outrider.grammar.state import GrammarState
from outrider.grammar.tokenizer import load_tokenizer
from outrider.sampling_params import GrammarSpec

MAX_LEXER_STATES: Final = 50_000  # of one grammar, 1 to 2 kB each
MAX_GRAMMAR_SIZE: Final = 20_000  # symbols: keeps compiling below a second, where 1 kB of grammar could take many
MAX_KEPT: Final = 16  # compiled grammars, of up to tens of megabytes
MAX_VERDICTS: Final = 1024  # of grammars that were only checked
DIGEST_BYTES: Final = 32

Verdict = tuple[InvalidRequest | None, float]
"""The refusal of a grammar, if there is one, and the processor time that compiling took, in seconds."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each one once while it is among the latest. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: Path,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        load: Callable[[Path], tuple[LLTokenizer, int]] = load_tokenizer,
    ) -> None:
        """`vocab_size` is the number of rows of the model's output layer; the tokenizer may have more or fewer ids. The
        file is read, by `load`, when the first grammar comes."""
        self._tokenizer_json = tokenizer_json
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._lock = threading.Lock()
        self._loaded: Vocabulary | None = None
        self._owners = Owners()
        self._states = CompileQueue[GrammarState](MAX_KEPT)
        self._verdicts = CompileQueue[Verdict](MAX_VERDICTS)

    async def check_async(self, spec: GrammarSpec, owner: str = "") -> None:
        """Raises InvalidRequest("grammar") with llguidance's reason when the grammar does not compile.

        Only the result is cached. `owner` is the tenant, see `CompileQueue`.
        """
        refusal, _ = await self.judge_async(spec, owner)
        if refusal is not None:
            raise copy.copy(refusal)  # each caller gets its own traceback

    async def judge_async(self, spec: GrammarSpec, owner: str = "") -> Verdict:
        """Returns the reason for which a grammar does not compile, if there is one, and the time that it took, which
        is the same for a cached result. Raises as `check_async` does, but for InvalidRequest."""
        try:
            return await self._verdicts.get_async(digest(spec), owner, lambda: self._verdict(spec))
        except InvalidRequest as error:  # it takes too long
            return detached(error), TIME_LIMIT_S

    async def compile_async(self, spec: GrammarSpec, owner: str = "") -> GrammarState:
        """Returns the state before the first token, for the caller's exclusive use; raises as `check_async` does, and
        Overloaded when there is no room for it. Cancelling gives up the place in the queue."""
        key = digest(spec)
        for _ in range(2):
            start = await self._states.get_async(key, owner, lambda: self._build(spec))
            if not start.has_failed:
                break
            self._states.forget(key)  # other sequences have used up the lexer that all forks share
        return start.fork(self._owners.effort(owner))

    def _verdict(self, spec: GrammarSpec) -> Verdict:
        refusal, began_s = None, time.thread_time()
        try:
            self._vocabulary()
            began_s = time.thread_time()  # reading the vocabulary is no part of a grammar's time
            self._build(spec)
        except InvalidRequest as error:
            refusal = detached(error)  # the verdict is kept
        return refusal, time.thread_time() - began_s

    def _build(self, spec: GrammarSpec) -> GrammarState:
        """Builds a state; needs a thread with a deep stack."""
        vocabulary = self._vocabulary()
        grammar = to_llguidance(spec)
        num_items = max_items(longest_lexeme(spec))

        def start() -> Position:
            limits = LLParserLimits(
                max_lexer_states=MAX_LEXER_STATES,
                max_grammar_size=MAX_GRAMMAR_SIZE,
                step_max_items=num_items,
                verbose_errors=False,
            )
            return Position(vocabulary, LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits))

        position = start()
        try:
            position.check()
            position.learn_to_go_back()
        except GrammarViolation as error:
            raise InvalidRequest("grammar", f"the grammar does not compile: {error}") from error
        return GrammarState(position, start, Effort())

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._loaded is None:
                try:
                    tokenizer, num_known = self._load(self._tokenizer_json)
                except ConfigurationError as error:
                    raise InvalidRequest("grammar", f"this model cannot follow grammars: {error}") from error
                num_usable = min(num_known, self._vocab_size)
                self._loaded = Vocabulary(tokenizer, num_usable, self._vocab_size, self._eos_token_ids)
            return self._loaded


def digest(spec: GrammarSpec) -> bytes:
    """A collision-resistant key of a grammar."""
    head = f"{spec.kind.value} {int(spec.any_whitespace)} "
    return blake2b((head + spec.text).encode(), digest_size=DIGEST_BYTES).digest()
