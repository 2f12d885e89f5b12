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
from collections.abc import Iterable, Sequence
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
    digests = list(known)
    root = _root(salt)
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        content = np.asarray(token_ids[start : start + block_size], dtype=np.int64).tobytes()
        previous = digests[-1] if digests else root
        digests.append(hashlib.blake2b(previous + content, digest_size=16).digest())
    return digests


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
        digests = self.digests(token_ids, len(token_ids) - 1)
        self.kv.adopt(digests[: self.kv.allocator.num_published(digests)])
        return self.kv.length

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """Blocks that `adopt` would share with others that use them now."""
        return self.kv.allocator.num_shared(self.digests(token_ids, len(token_ids) - 1))

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
            self.kv.publish(self.digests(token_ids, num_final), self._num_published)
            self._num_published = num_full

    def first_missing(self, token_ids: Sequence[int]) -> Digest | None:
        """The first block of this sequence that is not published; None when all are."""
        digests = self.digests(token_ids, len(token_ids) - 1)
        num_published = self.kv.allocator.num_published(digests)
        return digests[num_published] if num_published < len(digests) else None

    def is_under_way(self, token_ids: Sequence[int], computing: Iterable[tuple[SequenceBlocks, Sequence[int]]]) -> bool:
        """Whether a sequence in `computing` is about to publish the first block that this one lacks."""
        missing = self.first_missing(token_ids)
        return missing is not None and any(
            missing in other.digests(others_ids, len(others_ids)) for other, others_ids in computing
        )

    def digests(self, token_ids: Sequence[int], length: int) -> list[Digest]:
        """Digests of the full blocks of the first `length` tokens; the tokens must extend those of earlier calls."""
        size = self.kv.allocator.block_size
        num_full = length // size
        if len(self._digests) < num_full:
            self._digests = block_digests(token_ids[:length], size, self._digests, self.salt)
        return self._digests[:num_full]
