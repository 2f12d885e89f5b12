"""Blocks are counted right whatever is done to sequences, and no shared block is ever written."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.kv.kv_cache import NULL_BLOCK, BlockAllocator, KVSequence, OutOfBlocksError
from outrider.engine.kv.prefix_cache import block_digests


class KVCacheMachine(RuleBasedStateMachine):
    """A cache of real entries beside the bookkeeping: what a sequence wrote is what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(num_blocks=9, block_size=3)
        self.cache = [-1] * (9 * 3)
        self.sequences: list[KVSequence] = []
        self.contents: list[list[int]] = []
        self.published: list[list[int]] = []
        self.next_value = 0

    def pick(self, index: int) -> int:
        return index % len(self.sequences)

    @rule()
    def start(self) -> None:
        if len(self.sequences) < 5:
            self.sequences.append(KVSequence(self.allocator))
            self.contents.append([])

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), num_entries=st.integers(0, 8))
    def extend(self, index: int, num_entries: int) -> None:
        i = self.pick(index)
        sequence = self.sequences[i]
        if num_entries and sequence.length % 3 and not self.allocator.may_write(sequence.block_ids[-1]):
            with pytest.raises(AssertionError, match="published block"):
                sequence.extend(num_entries)
            return
        before = (list(sequence.block_ids), sequence.length, self.allocator.num_free)
        num_missing = sequence.num_missing(num_entries)
        has_room = num_entries <= sequence.room(self.allocator.num_free)
        assert has_room == (num_missing <= self.allocator.num_free)
        try:
            sequence.extend(num_entries)
            assert has_room
            assert num_missing == before[2] - self.allocator.num_free
        except OutOfBlocksError:
            assert not has_room
            assert (sequence.block_ids, sequence.length, self.allocator.num_free) == before
            assert num_entries > 0
            return
        values = list(range(self.next_value, self.next_value + num_entries))
        self.next_value += num_entries
        written = sequence.slots(before[1], sequence.length).tolist()
        assert all(self.allocator.may_write(slot // self.allocator.block_size) for slot in written)
        for slot, value in zip(written, values, strict=True):
            self.cache[slot] = value
        self.contents[i] += values

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, index: int, share: float) -> None:
        i = self.pick(index)
        length = int(share * self.sequences[i].length)
        self.sequences[i].truncate(length)
        del self.contents[i][length:]

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9))
    def publish(self, index: int) -> None:
        i = self.pick(index)
        digests = block_digests(self.contents[i], self.allocator.block_size)
        self.sequences[i].publish(digests, 0)
        assert self.allocator.num_published(digests) == len(digests)
        self.published.append(list(self.contents[i]))

    @precondition(lambda self: self.published and len(self.sequences) < 5)
    @rule(index=st.integers(0, 9))
    def adopt(self, index: int) -> None:
        """Adopts the blocks that are left of a sequence published earlier; the cache must contain its values."""
        content = self.published[index % len(self.published)]
        digests = block_digests(content, self.allocator.block_size)
        num_blocks = self.allocator.num_published(digests)
        num_free, num_shared = self.allocator.num_free, self.allocator.num_shared(digests)
        sequence = KVSequence(self.allocator)
        sequence.adopt(digests[:num_blocks])
        assert num_free - self.allocator.num_free == num_blocks - num_shared
        self.sequences.append(sequence)
        self.contents.append(content[: num_blocks * self.allocator.block_size])

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 9))
    def free(self, index: int) -> None:
        i = self.pick(index)
        self.sequences.pop(i).free()
        self.contents.pop(i)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.allocator.check_integrity(self.sequences)

    @invariant()
    def everyone_reads_what_he_wrote(self) -> None:
        for sequence, content in zip(self.sequences, self.contents, strict=True):
            assert sequence.length == len(content)
            assert [self.cache[slot] for slot in sequence.slots(0, sequence.length)] == content
            assert len(sequence.block_ids) == self.allocator.blocks_for(sequence.length)
            assert NULL_BLOCK not in sequence.block_ids


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


def test_extension_without_room_changes_nothing() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=2)
    first, second = KVSequence(allocator), KVSequence(allocator)
    first.extend(3)
    second.extend(2)
    blocks = list(first.block_ids)
    with pytest.raises(OutOfBlocksError):
        first.extend(2)
    assert (first.block_ids, first.length, allocator.num_free) == (blocks, 3, 0)
    first.extend(1)  # room within its last block
    allocator.check_integrity([first, second])


def test_integrity_check_can_fail() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=2)
    sequence = KVSequence(allocator)
    sequence.extend(2)
    with pytest.raises(AssertionError):
        allocator.check_integrity([])
    with pytest.raises(AssertionError):
        allocator.check_integrity([sequence, sequence])


def test_truncation_beyond_what_is_there_is_an_error() -> None:
    sequence = KVSequence(BlockAllocator(num_blocks=4, block_size=2))
    sequence.extend(3)
    for length in (-1, 4):
        with pytest.raises(ValueError, match="cannot truncate 3"):
            sequence.truncate(length)
    assert sequence.length == 3


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0)])
def test_allocator_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="need at least 2 blocks"):
        BlockAllocator(num_blocks, block_size)


class TestPublishedBlocks:
    def test_a_digest_names_the_whole_text_up_to_the_block(self) -> None:
        first = block_digests([1, 2, 3, 4, 5], 2)
        assert len(first) == 2
        assert block_digests([1, 2, 3, 4], 2) == first
        assert block_digests([9, 2, 3, 4], 2)[1] != first[1]
        assert block_digests([1, 2, 3, 4, 5, 6], 2, known=first)[:2] == first

    def test_digests_of_different_salts_have_nothing_in_common(self) -> None:
        found = [block_digests([1, 2, 1, 2], 2, salt=salt) for salt in ("", "a", "b", "ab", "x" * 128)]
        assert len({digest for digests in found for digest in digests}) == 10
        whole = block_digests([1, 2, 3, 4, 5, 6], 2, salt="a")
        assert block_digests([1, 2, 3, 4, 5, 6], 2, block_digests([1, 2], 2, salt="a"), "a") == whole

    def test_unused_ones_are_given_up_oldest_first_and_only_when_there_is_no_other(self) -> None:
        allocator = BlockAllocator(num_blocks=5, block_size=1)
        for token_id in (1, 2):
            sequence = KVSequence(allocator)
            sequence.extend(1)
            sequence.publish(block_digests([token_id], 1), 0)
            sequence.free()
        assert allocator.num_free == 4
        other = KVSequence(allocator)
        other.extend(2)
        assert [allocator.num_published(block_digests([token_id], 1)) for token_id in (1, 2)] == [1, 1]
        other.extend(1)
        assert [allocator.num_published(block_digests([token_id], 1)) for token_id in (1, 2)] == [0, 1]
        other.extend(1)
        with pytest.raises(OutOfBlocksError):
            other.extend(1)
        allocator.check_integrity([other])

    def test_of_what_one_sequence_leaves_the_beginning_is_kept_longest(self) -> None:
        """Its end is of no use to others without it."""
        allocator = BlockAllocator(num_blocks=5, block_size=2)
        digests = block_digests([1, 2, 3, 4, 5, 6], 2)
        sequence = KVSequence(allocator)
        sequence.extend(6)
        sequence.publish(digests, 0)
        sequence.free()
        other = KVSequence(allocator)
        for num_left in (3, 2, 1):
            other.extend(2)
            assert allocator.num_published(digests) == num_left

    def test_a_published_block_is_not_written_by_its_owner_either(self) -> None:
        allocator = BlockAllocator(num_blocks=4, block_size=2)
        sequence = KVSequence(allocator)
        sequence.extend(2)
        sequence.publish(block_digests([1, 2], 2), 0)
        sequence.truncate(1)
        with pytest.raises(AssertionError, match="published block"):
            sequence.extend(1)
        assert sequence.length == 1
