"""KV blocks that sequences which begin alike share. Pure.

A full block of final text is published under a digest of all text up to its end; a later sequence that begins with
the same text takes it over instead of computing it again. That changes no bit of what follows, because KV entries do
not depend on how they were computed (invariant I2).

Both kinds of worker do this by the same code, each with its own cache: what one of them finds says nothing about the
other, and neither ever reads what it has not computed itself.

Digests are salted: sequences of different salts share no block, so that nobody can tell by the time an answer takes,
or by the number of cached tokens, what those of another salt began with. Coordinators choose the salts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.engine.kv_cache import Digest, KVSequence
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
    """Digests of all full blocks of a text, of which the first `len(known)` are known already."""
    digests = list(known)
    root = _root(salt)
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        content = np.asarray(token_ids[start : start + block_size], dtype=np.int64).tobytes()
        previous = digests[-1] if digests else root
        digests.append(hashlib.blake2b(previous + content, digest_size=16).digest())
    return digests


def _root(salt: str) -> Digest:
    """What the first block's digest goes on from; no salt's is another's, or a block's digest."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest() if salt else b""


@dataclass(slots=True)
class TextBlocks:
    """One sequence's KV as far as it holds final text, which others may begin with."""

    kv: KVSequence
    salt: str = ""  # of those that it shares blocks with
    # Of the text's full blocks, as far as they were asked for.
    _digests: list[Digest] = field(default_factory=list)
    _num_published: int = 0

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Begins with what others published of this text; returns how many entries that are.

        The last token's entry is left out always: its logits are wanted, so it has to be computed.
        """
        digests = self.digests(token_ids, len(token_ids) - 1)
        self.kv.adopt(digests[: self.kv.allocator.num_published(digests)])
        return self.kv.length

    def num_held(self, token_ids: Sequence[int]) -> int:
        """Blocks that `adopt` would share with others that use them now."""
        return self.kv.allocator.num_held(self.digests(token_ids, len(token_ids) - 1))

    def release(self) -> None:
        """Gives all blocks back; the text's KV can be computed again, or adopted as far as it is still there."""
        self.kv.free()
        self._num_published = 0

    def publish(self, token_ids: Sequence[int], num_final: int) -> None:
        """Offers the blocks that have been filled since.

        Entries [0, num_final) are those of the text, and will never be written again; the text may go on beyond them,
        and there may be entries beyond them that are no text.
        """
        assert num_final <= self.kv.length, "only what has been computed can be offered"
        num_full = num_final // self.kv.allocator.block_size
        if num_full > self._num_published:
            self.kv.publish(self.digests(token_ids, num_final), self._num_published)
            self._num_published = num_full

    def first_missing(self, token_ids: Sequence[int]) -> Digest | None:
        """The first block of this text that nobody has published; None when all are to be had."""
        digests = self.digests(token_ids, len(token_ids) - 1)
        num_published = self.kv.allocator.num_published(digests)
        return digests[num_published] if num_published < len(digests) else None

    def is_under_way(
        self, token_ids: Sequence[int], computing: Iterable[tuple[TextBlocks, Sequence[int]]]
    ) -> bool:
        """Whether one of those that are being computed, each with its text, is about to publish the first block that
        this text lacks."""
        missing = self.first_missing(token_ids)
        return missing is not None and any(
            missing in other.digests(others_ids, len(others_ids)) for other, others_ids in computing
        )

    def digests(self, token_ids: Sequence[int], length: int) -> list[Digest]:
        """Of the full blocks of a text's first `length` tokens; the text must go on as those before it did."""
        size = self.kv.allocator.block_size
        num_full = length // size
        if len(self._digests) < num_full:
            self._digests = block_digests(token_ids[:length], size, self._digests, self.salt)
        return self._digests[:num_full]
