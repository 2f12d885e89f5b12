"""Draft heads beside a real engine: drafts are those of the head's own logits, however the sequence has grown."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.model import Engine
from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sequence_chunk import SequenceChunk
from outrider.hints.confidence import Calibration
from outrider.sampling_params import SamplingParams
from target_worker.local_heads import AttentiveDrafter, MedusaDrafter
from target_worker.messages import Drafted, HeadItem, HeadTurn
from tests.exactness.heads import head_engine
from tests.exactness.in_process import LARGE, engine
from tests.exactness.local_heads import medusa_heads

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
TEXT = [5, 17, 80, 3, 90, 2, 33, 61, 12, 50, 44, 44, 9, 71, 30, 2, 33, 8, 19, 64]
DEPTH = 4


@pytest.fixture
def target() -> Engine:
    return engine(LARGE, "beside eagle3")


class Sequence:
    """A sequence on the target, and beside it on a head."""

    def __init__(self, target: Engine, head_kv: KVSequence | None) -> None:
        self.target, self.head_kv = target, head_kv
        self.kv = KVSequence(target.allocator)
        self.num_run = 0  # by the head

    def run_target(self, length: int) -> None:
        """Runs the target up to so many tokens of TEXT."""
        start = self.kv.length
        self.kv.extend(length - start)
        self.target.forward([SequenceChunk(self.kv, TEXT[start:length], 1)])

    def item(self, length: int, start: int | None = None, sampling: SamplingParams = GREEDY) -> HeadItem:
        """The head's part when `length` tokens are committed, the last of which the target has not run."""
        committed = TEXT[:length]
        first = self.num_run if start is None else start
        self.num_run = length
        context = LogitContext(committed, 4, [[]])
        return HeadItem(
            *("a", committed, first, length, self.head_kv, self.kv, context, sampling),
            seed=11,
            records=[0.8] * DEPTH,
        )

    def free(self) -> None:
        self.kv.free()
        if self.head_kv is not None:
            self.head_kv.free()


def naive_draft(target: Engine, length: int) -> list[int]:
    """The head over the whole sequence at once for each token, on the target's features as far as these are known."""
    head, kv = head_engine(target), KVSequence(target.allocator)
    kv.extend(length)
    target.forward([SequenceChunk(kv, TEXT[:length], 1)])
    assert target.features is not None
    known = target.features[torch.from_numpy(kv.slots(0, length - 1))]
    drafted: list[int] = []
    for _ in range(DEPTH):
        own = head.new_sequence()
        own.extend(length + len(drafted))
        head.set_features(own.slots(0, length - 1), known)
        logits = head.forward([SequenceChunk(own, [*TEXT[:length], *drafted], 1)])
        drafted.append(int(logits.argmax()))
        own.free()
    kv.free()
    return drafted


def test_drafts_are_those_of_the_whole_sequence_run_anew(target: Engine) -> None:
    """Tokens come one by one and several at a time; rows of drafts that were wrong are run again."""
    head = head_engine(target)
    drafter = AttentiveDrafter(target, head, lambda _: None)
    sequence = Sequence(target, head.new_sequence())
    for length in (5, 6, 7, 11, 12, 20):
        sequence.run_target(length - 1)
        (found,) = drafter.draft(HeadTurn([sequence.item(length)])).drafts
        assert found.token_ids == naive_draft(target, length)
        assert all(1 <= level <= 127 for level in found.levels)
        assert sequence.head_kv is not None
        assert sequence.head_kv.length == length
    sequence.free()


def test_a_prompt_that_comes_in_parts_gives_the_same_draft(target: Engine) -> None:
    head = head_engine(target)
    drafter = AttentiveDrafter(target, head, lambda _: None)
    sequence = Sequence(target, head.new_sequence())
    sequence.run_target(19)
    for start, end in ((0, 8), (8, 15)):
        part = replace(sequence.item(20, start), end=end, context=None)
        assert drafter.draft(HeadTurn([part])).drafts == [Drafted([], [])]
    (found,) = drafter.draft(HeadTurn([sequence.item(20, start=15)])).drafts
    assert found.token_ids == naive_draft(target, 20)
    sequence.free()


def test_sessions_drafted_for_together_get_what_they_get_alone(target: Engine) -> None:
    head = head_engine(target)
    drafter = AttentiveDrafter(target, head, lambda _: None)
    sequences = [Sequence(target, head.new_sequence()) for _ in range(3)]
    lengths = (7, 12, 20)
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.run_target(length - 1)
    items = [sequence.item(length) for sequence, length in zip(sequences, lengths, strict=True)]
    result = drafter.draft(HeadTurn(items))
    assert [each.token_ids for each in result.drafts] == [naive_draft(target, length) for length in lengths]
    assert [rows for rows, _ in result.passes] == [sum(lengths), 3, 3, 3]
    for sequence in sequences:
        sequence.free()


def test_a_parameter_of_the_request_counts_for_its_draft(target: Engine) -> None:
    head = head_engine(target)
    drafter = AttentiveDrafter(target, head, lambda _: None)
    sequence = Sequence(target, head.new_sequence())
    sequence.run_target(19)
    banned = set(naive_draft(target, 20))
    sampling = replace(GREEDY, allowed_token_ids=frozenset(range(LARGE.vocab_size)) - banned)
    (found,) = drafter.draft(HeadTurn([sequence.item(20, sampling=sampling)])).drafts
    assert len(found.token_ids) == DEPTH
    assert not banned & set(found.token_ids)
    sequence.free()


def test_medusa_guesses_from_the_last_state_that_is_known() -> None:
    target = engine(LARGE, "beside medusa")
    heads = medusa_heads(target)
    drafter = MedusaDrafter(target, heads, lambda _: None)
    sequence = Sequence(target, None)
    sequence.run_target(19)
    (found,) = drafter.draft(HeadTurn([sequence.item(20)])).drafts
    assert target.features is not None
    state = target.features[torch.from_numpy(sequence.kv.slots(18, 19))]
    assert found.token_ids == heads(state)[:, 0].argmax(-1).tolist()[:DEPTH]
    (first,) = drafter.draft(HeadTurn([replace(sequence.item(20), end=1)])).drafts
    assert first == Drafted([], []), "before the second token no state is known"
    sequence.free()


def test_a_draft_ends_where_a_further_pass_promises_too_little(target: Engine) -> None:
    """By the acceptance of earlier hints, and where it may count by the head's confidence."""
    head = head_engine(target)
    drafter = AttentiveDrafter(target, head, lambda _: None)
    sequence = Sequence(target, head.new_sequence())
    sequence.run_target(19)
    full = naive_draft(target, 20)

    def drafted(turn: HeadTurn) -> list[int]:
        (found,) = drafter.draft(turn).drafts
        sequence.num_run = 0
        assert sequence.head_kv is not None
        sequence.head_kv.truncate(0)
        return found.token_ids

    item = sequence.item(20, start=0)
    assert drafted(HeadTurn([item])) == full
    assert drafted(HeadTurn([item], pass_worth=0.55)) == full[:2]  # 0.8 * 0.8 for the second, 0.51 for the third
    assert drafted(HeadTurn([item], row_worth=0.45)) == full[:3]
    assert drafted(HeadTurn([item], pass_worth=2.0)) == full[:1]
    unsure = replace(item, calibration=Calibration(bias=-9.0))
    assert drafted(HeadTurn([unsure], row_worth=0.1)) == full[:1]
    sequence.free()
