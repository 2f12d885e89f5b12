"""Hints arrive as they were sent; a message that makes no sense is told from one that does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.hints.confidence import NUM_LEVELS
from outrider.hints.hint_tree import DraftDistribution, Hint, HintTree
from outrider.hints.hint_wire import MAX_NODES_PER_MESSAGE, HintDecoder, HintEncoder
from protos.outrider.v1 import hints_pb2

VOCAB_SIZE = 50
UINT32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 60)


@st.composite
def distributions(draw: st.DrawFn) -> DraftDistribution:
    token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6, unique=True))
    return DraftDistribution(tuple(token_ids), tuple(draw(st.integers(1, 255)) for _ in token_ids))


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, list[Hint]]]:
    """Messages of one channel: (base_len, hints). Ids go on mostly, and leave gaps or begin anew at times."""
    messages, base_len, node_id = [], draw(st.integers(1, 300)), 1
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 3)) == 0:
            base_len, node_id = base_len + draw(st.integers(1, 9)), draw(st.integers(1, 4))
        hints = []
        for _ in range(draw(st.integers(1, 5))):
            distribution = draw(st.none() | distributions())
            token_id = draw(st.integers(0, VOCAB_SIZE - 1))
            if distribution is not None:
                token_id = draw(st.sampled_from(distribution.token_ids))
            confidence = 0 if distribution is not None else draw(st.integers(0, NUM_LEVELS))
            is_promoted = draw(st.integers(0, 4)) == 0
            parent_id = draw(st.integers(0, node_id - 1))
            hints.append(Hint(node_id, parent_id, token_id, distribution, confidence, is_promoted))
            node_id += draw(st.sampled_from([1, 1, 1, 1, 3]))
        messages.append((base_len, hints))
    return messages


def as_dict(hint: Hint) -> Any:
    """A distribution is the same in any order."""
    given_by = hint.distribution
    weights = given_by and dict(zip(given_by.token_ids, given_by.weights, strict=True))
    return hint.node_id, hint.parent_id, hint.token_id, weights, hint.confidence, hint.is_promoted


@settings(max_examples=300, deadline=None, derandomize=True)
@given(messages=trees())
def test_what_is_sent_arrives(messages: list[tuple[int, list[Hint]]]) -> None:
    """I5: distributions to the last weight."""
    encoder, decoder = HintEncoder(), HintDecoder()
    for base_len, hints in messages:
        message = hints_pb2.HintNodes()
        encoder.encode(message, base_len, hints)
        arrived = decoder.decode(hints_pb2.HintNodes.FromString(message.SerializeToString()), VOCAB_SIZE)
        assert arrived is not None
        assert decoder.base_len == base_len
        assert [as_dict(hint) for hint in arrived] == [as_dict(hint) for hint in hints]


def test_the_next_node_of_a_path_needs_neither_root_nor_ids_nor_sizes() -> None:
    """Eight entries of a vocabulary of 4096 in less than 40 bytes."""
    encoder = HintEncoder()
    distribution = DraftDistribution(tuple(range(1000, 1008)), (100, 60, 40, 20, 16, 10, 6, 4))
    sizes = []
    for node_id in (1, 2):
        message = hints_pb2.HintNodes(channel=3)
        encoder.encode(message, 500, [Hint(node_id, node_id - 1, 1003, distribution)])
        sizes.append(message.ByteSize())
    assert sizes[1] < 35 < sizes[0] < 40


def nodes(**columns: Any) -> hints_pb2.HintNodes:
    return hints_pb2.HintNodes(channel=4, base_len=3, **columns)


@pytest.mark.thorough
@settings(max_examples=500, deadline=None, derandomize=True)
@given(base_len=UINT32, first_node_id=SMALL | UINT32, num_nodes=st.integers(0, 5), data=st.data())
def test_columns_of_any_length_never_raise_and_never_give_nonsense(
    base_len: int, first_node_id: int, num_nodes: int, data: st.DataObject
) -> None:
    """I7: a bad message fails its session, never a loop."""
    lengths = st.sampled_from([num_nodes, num_nodes, num_nodes, 0, num_nodes + 1])

    def column(values: st.SearchStrategy[int], of: st.SearchStrategy[int] = lengths) -> list[int]:
        length = data.draw(of)
        return data.draw(st.lists(values, min_size=length, max_size=length))

    message = hints_pb2.HintNodes(
        base_len=base_len,
        first_node_id=first_node_id,
        node_ids=column(SMALL | UINT32),
        parent_ids=column(SMALL | UINT32),
        token_ids=column(st.integers(0, VOCAB_SIZE)),
        support_sizes=column(st.integers(0, 3) | UINT32),
        support_token_ids=column(st.integers(0, VOCAB_SIZE + 1), st.integers(0, 8)),
        support_weights=column(st.sampled_from([0, 1, 32768, 65535, 65536, 2**32 - 1]), st.integers(0, 8)),
        confidences=column(st.integers(0, NUM_LEVELS) | UINT32),
    )
    decoder = HintDecoder()
    hints = decoder.decode(message, VOCAB_SIZE)
    if hints is None:
        assert decoder == HintDecoder(), "a message that was dropped has left something behind"
        return
    assert len(hints) <= len(message.parent_ids)
    for hint in hints:
        assert 0 <= hint.token_id < VOCAB_SIZE
        assert 0 <= hint.confidence <= NUM_LEVELS
        if hint.distribution is not None:
            assert hint.distribution.is_valid(VOCAB_SIZE)
            assert hint.token_id in hint.distribution.token_ids
    HintTree().add([1, 2, 3], 1, decoder.base_len, hints)


@pytest.mark.parametrize(
    ("token_ids", "weights"),
    [([7, 5], [60000, 5537]), ([7, 5], [60000, 0]), ([7, 7], [32768, 32768]), ([7, 50], [32768, 32768])],
    ids=["weights add up to too much", "weight of nothing", "token twice", "outside the vocabulary"],
)
def test_a_distribution_that_is_none_costs_the_hint_its_distribution_only(
    token_ids: list[int], weights: list[int]
) -> None:
    """I5: taken as certain it cannot bias the output."""
    message = nodes(
        first_node_id=1,
        parent_ids=[0],
        support_sizes=[2],
        support_token_ids=token_ids,
        support_weights=weights,
    )
    hints = HintDecoder().decode(message, VOCAB_SIZE)
    assert hints == [Hint(1, 0, 7, None)]


def test_a_token_outside_the_vocabulary_loses_its_own_node_only() -> None:
    message = nodes(first_node_id=1, parent_ids=[0, 0], token_ids=[VOCAB_SIZE, 3])
    assert HintDecoder().decode(message, VOCAB_SIZE) == [Hint(2, 0, 3)]


def test_a_confidence_that_is_none_is_not_believed() -> None:
    message = nodes(first_node_id=1, parent_ids=[0, 1], token_ids=[5, 3], confidences=[NUM_LEVELS + 1, 7])
    assert HintDecoder().decode(message, VOCAB_SIZE) == [Hint(1, 0, 5), Hint(2, 1, 3, confidence=7)]


def test_too_many_nodes_are_nonsense() -> None:
    many = MAX_NODES_PER_MESSAGE + 1
    assert HintDecoder().decode(nodes(parent_ids=[0] * many, token_ids=[1] * many), VOCAB_SIZE) is None
