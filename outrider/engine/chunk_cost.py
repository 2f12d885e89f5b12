"""Cost of prompt chunks, learned while serving, and the chunk length that fits a step. Pure.

Sessions that decode beside a long prompt wait for one of its chunks at each step. A token costs more the more tokens
precede it, all of which it reads. Late chunks are shorter, so that they delay others no longer than early ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_CHUNK_LEN = 16
"""Least chunk length in tokens: shorter chunks would spend most of their time on the fixed cost of a step."""
FORGETTING = 0.98
"""Decay per step with chunks; it covers about the last fifty."""
OUTLIER = 3.0
"""Most times the expected step time that one step counts: longer ones were delayed by something else."""


class Chunk(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence."""

    start: int
    num_tokens: int

    @property
    def num_read(self) -> float:
        """Tokens read, summed over the chunk's tokens; in thousands."""
        return self.num_tokens * (self.start + self.num_tokens / 2) / 1e3


@dataclass(slots=True)
class ChunkCost:
    """Fits a chunk's time as a sum of a part per token fed and a part per thousand tokens read.

    Least squares with exponential forgetting, and a weak prior that reading costs nothing.
    """

    token_ms: float = 0.0  # 0.0: unknown
    read_ms: float = 0.0
    num_steps_without: int = 0  # since the last chunk
    # Weighted sums of the normal equations over (tokens, thousands read) and milliseconds.
    _tokens_tokens: float = 0.0
    _tokens_read: float = 0.0
    _read_read: float = 0.0
    _tokens_ms: float = 0.0
    _read_times_ms: float = 0.0

    def observe(self, chunks: Iterable[Chunk], ms: float) -> None:
        """Takes one step: its chunks, and its time beyond that of a step without them."""
        chunks, self.num_steps_without = list(chunks), 0
        if self.token_ms:
            ms = min(ms, OUTLIER * sum(self.ms(chunk) for chunk in chunks))
        num_tokens, num_read = sum(each.num_tokens for each in chunks), sum(each.num_read for each in chunks)
        self._tokens_tokens = FORGETTING * self._tokens_tokens + num_tokens * num_tokens
        self._tokens_read = FORGETTING * self._tokens_read + num_tokens * num_read
        self._read_read = FORGETTING * self._read_read + num_read * num_read
        self._tokens_ms = FORGETTING * self._tokens_ms + num_tokens * ms
        self._read_times_ms = FORGETTING * self._read_times_ms + num_read * ms
        self._solve()

    def _solve(self) -> None:
        prior = 1e-3 * self._tokens_tokens  # as if every token had read thirty at no cost
        determinant = self._tokens_tokens * (self._read_read + prior) - self._tokens_read**2
        if determinant <= 0.0:
            return
        read_ms = self._tokens_tokens * self._read_times_ms - self._tokens_read * self._tokens_ms
        mean_ms = self._tokens_ms / self._tokens_tokens
        # A token that reads nothing still costs something, and reading does not make it cheaper.
        self.read_ms = max(read_ms / determinant, 0.0)
        token_ms = mean_ms - self.read_ms * self._tokens_read / self._tokens_tokens
        self.token_ms = max(token_ms, 0.05 * mean_ms, 0.0)

    def ms(self, chunk: Chunk) -> float:
        """Estimated time of one chunk in milliseconds; 0.0 while unknown."""
        return self.token_ms * chunk.num_tokens + self.read_ms * chunk.num_read

    def weight(self, chunk: Chunk) -> float:
        """Number of tokens that would cost as much as the chunk if they read nothing."""
        return self.ms(chunk) / self.token_ms if self.token_ms else float(chunk.num_tokens)

    def num_tokens_within(self, ms: float, start: int) -> int:
        """Length of the longest chunk at `start` that takes at most `ms`; unbounded while costs are unknown."""
        if not self.token_ms:
            return 1 << 30
        # read_ms / 2000 * n² + each_ms * n = ms
        each_ms = self.token_ms + self.read_ms * start / 1e3
        root = math.sqrt(each_ms**2 + self.read_ms * max(ms, 0.0) / 500)
        return int(2 * max(ms, 0.0) / (each_ms + root) + 1e-6)

    def shorten(self, chunk: Chunk, ms: float, *, is_first: bool) -> Chunk:
        """Shortens a chunk to at most `ms`: the whole, at least MIN_CHUNK_LEN tokens, or none. The first chunk of a
        step gets the minimum in any case."""
        num_tokens = self.num_tokens_within(ms, chunk.start)
        if num_tokens < min(MIN_CHUNK_LEN, chunk.num_tokens):
            num_tokens = MIN_CHUNK_LEN if is_first else 0
        return Chunk(chunk.start, min(num_tokens, chunk.num_tokens))
