"""Grammars that the output must follow, over llguidance; pure, never imports torch.

Invariant: which tokens may follow is a function of the grammar and the committed tokens. Queries about guesses walk
on copies, so no guess, however false or hostile, changes what a later query answers.

Where the grammar forces text, exactly one token may follow: the one the tokenizer itself would write. So a forced
token is certain, and a draft that proposes it is always right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from outrider.errors import ConfigurationError, InvalidRequest, Overloaded
from outrider.grammar.position import GrammarViolation, Position, Vocabulary
from outrider.grammar.source import to_llguidance
from outrider.grammar.tokenizer import load_tokenizer
from outrider.sampling_params import GrammarSpec

__all__ = ["GrammarCompiler", "GrammarState", "GrammarViolation"]

COMPILER_STACK_BYTES: Final = 512 * 2**20
MAX_COMPILING: Final = 4  # at once, each with a stack of that size
MAX_LEXER_STATES: Final = 50_000  # of one sequence, 1 to 2 kB each

_T = TypeVar("_T")
_stack_size_lock = threading.Lock()  # the size that new threads get belongs to the process


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer_json: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size` is the number of rows of the model's output layer; the tokenizer may know more or fewer
        ids. The file is read when the first grammar comes."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._lock = threading.Lock()
        self._compiling = threading.BoundedSemaphore(MAX_COMPILING)
        self._loaded: Vocabulary | None = None

    def check(self, spec: GrammarSpec) -> None:
        """Raises InvalidRequest("grammar") with llguidance's reason when the grammar does not compile."""
        self.compile(spec)

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """The state before the first token. Raises as `check` does, and Overloaded when there is no room for it."""
        try:
            vocabulary = self._vocabulary()
        except ConfigurationError as error:
            raise InvalidRequest("grammar", f"this model cannot follow grammars: {error}") from error
        grammar = to_llguidance(spec)
        try:
            with self._compiling:
                return self._start(vocabulary, grammar)
        except InvalidRequest:
            raise
        except (RuntimeError, MemoryError) as error:  # no thread or no stack to be had
            raise Overloaded(f"no room to compile the grammar now: {error}", retry_after_s=1.0) from error

    def _start(self, vocabulary: Vocabulary, grammar: str) -> GrammarState:
        def start() -> Position:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            return Position(
                vocabulary,
                _on_a_deep_stack(
                    lambda: LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
                ),
            )

        position = start()
        try:
            position.check()
            position.mask()
        except GrammarViolation as error:
            raise InvalidRequest("grammar", f"the grammar does not compile: {error}") from error
        return GrammarState(position, start)

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._loaded is None:
                tokenizer, num_known = load_tokenizer(self._tokenizer_json)
                num_usable = min(num_known, self._vocab_size)
                self._loaded = Vocabulary(tokenizer, num_usable, self._vocab_size, self._eos_token_ids)
            return self._loaded


class GrammarState:
    """Where one sequence stands in its grammar. Not thread-safe: one thread at a time.

    Token ids may be any integers: what is no token is simply not permitted. Queries raise GrammarViolation when
    a limit of the parser is reached.
    """

    def __init__(self, position: Position, start: Callable[[], Position]) -> None:
        self._position = position
        self._start = start
        self._committed_token_ids: list[int] = []
        self._is_suspect = False

    def advance(self, token_ids: Sequence[int]) -> None:
        """Appends committed tokens; raises GrammarViolation, and stays, when one is not permitted."""
        with self._walking() as walker:
            num_valid = walker.consume_all(token_ids)
        if num_valid < len(token_ids):
            place = len(self._committed_token_ids) + num_valid
            raise GrammarViolation(
                f"the grammar does not permit token {token_ids[num_valid]} at position {place}"
            )
        self._position = walker
        self._committed_token_ids += token_ids

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end of sequence."""
        with self._walking() as walker:
            return walker.is_complete()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these, one after the other from here, the grammar permits; nothing follows an end."""
        with self._walking() as walker:
            return walker.consume_all(token_ids)

    def masks(self, continuations: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
        """[len(continuations), vocab_size], True where a token may follow the current position extended by the
        continuation. All False after one that is itself not permitted, and after an end of sequence."""
        rows = np.zeros((len(continuations), self._position.vocabulary.vocab_size), dtype=np.bool_)
        with self._walking() as walker:
            # Continuations share beginnings: each starts from the longest one that was walked before it.
            reached: dict[tuple[int, ...], Position] = {(): walker}
            for row, continuation in zip(rows, continuations, strict=True):
                path = tuple(continuation)
                known_len = next(length for length in range(len(path), -1, -1) if path[:length] in reached)
                position = reached[path[:known_len]]
                if known_len < len(path):
                    position = position.copy()
                    if position.consume_all(path[known_len:]) < len(path) - known_len:
                        continue
                    reached[path] = position
                row[:] = position.mask()
        return rows

    def forced_after(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that must follow the current position extended by `token_ids`; none when that
        is not permitted. The last one may be the lowest end-of-sequence id."""
        forced: list[int] = []
        with self._walking() as walker:
            if walker.consume_all(token_ids) == len(token_ids):
                while len(forced) < limit:
                    token_id = walker.forced_token_id()
                    if token_id is None or not walker.consume(token_id):
                        break
                    forced.append(token_id)
        return forced

    def fork(self) -> GrammarState:
        """An independent copy. The two share a lexer until either runs into a limit, which both then report once."""
        state = GrammarState(self._position.copy(), self._start)
        state._committed_token_ids = list(self._committed_token_ids)
        state._is_suspect = self._is_suspect
        return state

    @contextmanager
    def _walking(self) -> Iterator[Position]:
        """A copy of the current position to walk on.

        Copies share one lexer, and an error in it stays. So after one the next walk starts on a new lexer: a
        guess that ran into a limit must not end a sequence that would never have gone there.
        """
        if self._is_suspect:
            position = self._start()
            if position.consume_all(self._committed_token_ids) < len(self._committed_token_ids):
                raise GrammarViolation("the grammar no longer permits what is committed")
            self._position = position
            self._is_suspect = False
        try:
            yield self._position.copy()
        except GrammarViolation:
            self._is_suspect = True
            raise


def _on_a_deep_stack(function: Callable[[], _T]) -> _T:
    """Runs the function on a thread of its own and returns what it returned; raises what it raised.

    llguidance follows references by recursion. A chain of them as long as a grammar may be would overflow a common
    stack, which ends the process. Only what is touched of this one takes memory.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="grammar") as executor:
        with _stack_size_lock:
            previous_bytes = threading.stack_size(COMPILER_STACK_BYTES)
            try:
                future = executor.submit(function)  # starts the thread
            finally:
                threading.stack_size(previous_bytes)
        return future.result()
