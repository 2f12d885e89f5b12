"""Who may come in, and who gets a place when. Pure.

A session is refused at once when it cannot be served or too many wait already; else it waits until the KV of its whole
length is reserved, so that a step never runs out of blocks.
"""

from __future__ import annotations

from collections import deque

from outrider.engine.kv_cache import BlockAllocator
from outrider.errors import InvalidRequest, Overloaded
from target_worker.limits import SchedulerLimits
from target_worker.messages import StartSession
from target_worker.session import Session


def check_request(event: StartSession, limits: SchedulerLimits, vocab_size: int) -> None:
    """Raises InvalidRequest for what this worker could never serve."""
    num_tokens = len(event.token_ids)
    if not 0 < event.num_prompt_tokens <= num_tokens:
        raise InvalidRequest(
            "token_ids", f"{event.num_prompt_tokens} prompt tokens of {num_tokens} token ids"
        )
    if num_tokens >= limits.max_model_len:
        raise InvalidRequest(
            "token_ids",
            f"{num_tokens} tokens leave no room to generate: the longest context is {limits.max_model_len}",
        )
    if num_tokens - event.num_prompt_tokens >= event.sampling.max_tokens:
        raise InvalidRequest("max_tokens", "as many tokens as max_tokens permits are already committed")
    if not all(0 <= token_id < vocab_size for token_id in event.token_ids):
        raise InvalidRequest("token_ids", f"a token id is outside the vocabulary of {vocab_size}")
    event.sampling.check_vocabulary(vocab_size)


class Places:
    """Sessions that run and sessions that wait for it, with the KV blocks that are reserved for the former."""

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self.waiting: deque[Session] = deque()
        self.running: dict[str, Session] = {}
        self.num_reserved_blocks = 0

    def check_room(self, event: StartSession) -> None:
        """Raises InvalidRequest for a session that does not fit even alone, Overloaded when too many wait."""
        if self.num_blocks_for(event) > self._allocator.num_blocks - 1:
            capacity = (self._allocator.num_blocks - 1) * self._allocator.block_size
            raise InvalidRequest(
                "max_tokens", f"prompt and output do not fit the KV cache of {capacity} tokens"
            )
        if len(self.waiting) >= self._limits.max_num_waiting:
            raise Overloaded(f"{len(self.waiting)} sessions wait already", retry_after_s=1.0)

    def num_blocks_for(self, event: StartSession) -> int:
        """KV blocks for the session at its longest, hints being verified included."""
        longest = min(event.num_prompt_tokens + event.sampling.max_tokens, self._limits.max_model_len)
        return self._allocator.blocks_for(longest + self._limits.num_speculative_tokens + 1)

    def promote(self, now: float) -> None:
        """Gives waiting sessions a place, first come first served, as long as their whole length fits.

        One whose prompt is just being computed for another session lets others pass, and then shares the result.
        """
        for session in list(self.waiting):
            if len(self.running) >= self._limits.max_num_seqs:
                return
            if self.num_reserved_blocks + session.num_reserved_blocks > self._allocator.num_blocks - 1:
                return
            if self.shares_prefix(session):
                if self._is_prefix_under_way(session):
                    continue
                num_cached = session.blocks.adopt(session.token_ids)
                session.num_cached_tokens = min(num_cached, session.num_prompt_tokens)
            self.waiting.remove(session)
            self.num_reserved_blocks += session.num_reserved_blocks
            session.first_step_at = now
            self.running[session.session_id] = session

    def remove(self, session: Session) -> None:
        if self.running.pop(session.session_id, None) is not None:
            self.num_reserved_blocks -= session.num_reserved_blocks
        else:
            self.waiting.remove(session)

    def shares_prefix(self, session: Session) -> bool:
        """Whether a session takes part in prefix caching: log probabilities of a prompt need its forward pass."""
        return self._limits.enable_prefix_caching and session.sampling.num_prompt_logprobs is None

    def _is_prefix_under_way(self, session: Session) -> bool:
        """Whether a running session's prefill is about to compute the first block that this one lacks."""
        computing = [
            other for other in self.running.values() if other.num_pending > 1 and self.shares_prefix(other)
        ]
        if not computing:
            return False
        missing = session.blocks.first_missing(session.token_ids)
        return missing is not None and any(
            missing in other.blocks.digests(other.token_ids, other.committed_len) for other in computing
        )
