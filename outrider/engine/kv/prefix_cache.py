"""Sharing of KV blocks between sequences with a common prefix. Pure.

A full block of committed tokens is published under a digest of all tokens up to its end; a later sequence with the same
prefix adopts it instead of computing it again. That changes no bit of the output, because KV entries do not depend on
how they were computed (invariant I2).

Both kinds of worker use this code, each with its own cache: a hit in one says nothing about the other, and neither
reads what it has not computed itself.

Digests are salted: sequences of different salts share no block, so that neither response times nor the number of cached
tokens reveal the prompts of another salt. Coordinators choose the salts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.engine.kv.kv_cache import Digest, KVSequence
from outrider.errors import InvalidRequest

CACHE_SALT_CHARS_MAX: Final = 128


def check_cache_salt(salt: str) -> None:
    """Raises InvalidRequest for a salt that is longer than workers take."""
    if len(salt) > CACHE_SALT_CHARS_MAX:
        raise InvalidRequest(
            "cache_salt", f"cache_salt may have at most {CACHE_SALT_CHARS_MAX} characters, got {len(salt)}"
        )


def block_digests(
    token_ids: Sequence[int], block_size: int, known: Sequence[Digest] = (), salt: str = ""
) -> list[Digest]:
    """Digests of all full blocks of a sequence, of which the first `len(known)` are known already."""
    previous = known[-1] if known else _root(salt)
    return [*known, *_following(token_ids[len(known) * block_size :], block_size, previous)]


def _following(token_ids: Sequence[int], block_size: int, previous: Digest) -> Iterator[Digest]:
    """Digests of the full blocks of tokens that follow a block with the digest `previous`."""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = np.asarray(token_ids[start : start + block_size], dtype=np.int64).tobytes()
        previous = hashlib.blake2b(previous + content, digest_size=16).digest()
        yield previous


def _root(salt: str) -> Digest:
    """The start of the digest chain; distinct for each salt and from every block's digest."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest() if salt else b""


@dataclass(slots=True)
class SequenceBlocks:
    """The KV blocks of one sequence's committed tokens, which other sequences may share."""

    kv: KVSequence
    salt: str = ""  # of the sequences it shares blocks with
    # Of the sequence's full blocks, as far as requested.
    _digests: list[Digest] = field(default_factory=list)
    _num_published: int = 0

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Starts with the published blocks of this sequence; returns the number of entries.

        The last token's entry is always left out: its logits are needed, so it has to be computed.
        """
        digests = self._digests_before(token_ids, len(token_ids) - 1)
        self.kv.adopt(digests[: self.kv.allocator.num_published(digests)])
        return self.kv.length

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """Blocks that `adopt` would share with others that use them now."""
        return self.kv.allocator.num_shared(self._digests_before(token_ids, len(token_ids) - 1))

    def release(self) -> None:
        """Returns all blocks; the KV can be computed again, or adopted while it is still cached."""
        self.kv.free()
        self._num_published = 0

    def publish(self, token_ids: Sequence[int], num_final: int) -> None:
        """Publishes the blocks that have been filled since the last call.

        Entries [0, num_final) belong to committed tokens and will never be written again; entries beyond them need not.
        """
        assert num_final <= self.kv.length, "only what has been computed can be offered"
        num_full = num_final // self.kv.allocator.block_size
        if num_full > self._num_published:
            self._know(token_ids, num_full)
            self.kv.publish(self._digests, self._num_published, num_full)
            self._num_published = num_full

    def is_under_way(self, token_ids: Sequence[int], computing: Iterable[tuple[SequenceBlocks, Sequence[int]]]) -> bool:
        """Whether a sequence in `computing` is about to publish the first block that this one lacks."""
        digests = self._digests_before(token_ids, len(token_ids) - 1)
        index = self.kv.allocator.num_published(digests)
        return index < len(digests) and any(
            other._has(others_ids, index, digests[index]) for other, others_ids in computing
        )

    def _has(self, token_ids: Sequence[int], index: int, digest: Digest) -> bool:
        """Whether a block of these tokens has the digest, which stands for all tokens up to it and so for its place."""
        if (index + 1) * self.kv.allocator.block_size > len(token_ids):
            return False
        self._know(token_ids, index + 1)
        return self._digests[index] == digest

    def _digests_before(self, token_ids: Sequence[int], length: int) -> list[Digest]:
        """Digests of the full blocks of the first `length` tokens."""
        num_full = length // self.kv.allocator.block_size
        self._know(token_ids, num_full)
        return self._digests[:num_full]

    def _know(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Makes the digests of the first blocks, as far as they are not known: of each token once. The tokens must
        extend those of earlier calls."""
        size, num_known = self.kv.allocator.block_size, len(self._digests)
        if num_known < num_blocks:
            previous = self._digests[-1] if num_known else _root(self.salt)
            self._digests += _following(token_ids[num_known * size : num_blocks * size], size, previous)
