"""Which sequences are tried where targets are full: none is hidden, and few are tried."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.slot_search import Restrictions, SlotSearch
from outrider.registry.worker_record import WorkerRecord
from tests.coordinator.fakes import record_of

LENGTHS = (10, 20, 40, 80)
Asked = tuple[int, frozenset[int]]  # tokens, and the numbers of targets that are not to be had


def targets(lengths: list[int]) -> list[WorkerRecord]:
    return [
        replace(
            record_of("target", f"127.0.0.1:{7000 + number}", "0" * 16, max_model_len=length),
            incarnation=str(number),
        )
        for number, length in enumerate(lengths)
    ]


def search(workers: list[WorkerRecord], with_room: set[str], queue: list[Asked]) -> tuple[int | None, int]:
    """As admission does it: which one has found a slot, and how many asked for one."""
    looking, num_tried = SlotSearch(), 0

    def rank(asked: Asked) -> list[WorkerRecord]:
        return [
            worker for worker in workers if worker.max_model_len >= asked[0] and int(worker.incarnation) not in asked[1]
        ]

    for number, asked in enumerate(queue):
        restrictions: Restrictions = asked[1]
        if looking.is_in_vain(asked[0], restrictions):
            continue
        ranked = rank(asked)
        num_tried += 1
        if any(worker.incarnation in with_room for worker in looking.not_full(ranked)):
            return number, num_tried
        looking.found_full(asked[0], restrictions, ranked)
        looking.look_shorter(restrictions, rank(min((each for each in queue if each[1] == asked[1]), key=lambda each: each[0])))  # fmt: skip  # noqa: E501
    return None, num_tried


@given(
    st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=8),
    st.sets(st.integers(0, 7), max_size=3),
    st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([frozenset(), frozenset({0}), frozenset({1, 2})])),
        max_size=40,
    ),
)
def test_the_first_sequence_that_fits_somewhere_is_found_with_few_tries(
    lengths: list[int], with_room: set[int], queue: list[Asked]
) -> None:
    workers = targets(lengths)
    room = {worker.incarnation for worker in workers if int(worker.incarnation) in with_room}
    fitting = [
        number
        for number, (num_tokens, excluded) in enumerate(queue)
        if any(
            worker.max_model_len >= num_tokens and int(worker.incarnation) not in excluded
            for worker in workers
            if worker.incarnation in room
        )
    ]
    found, num_tried = search(workers, room, queue)
    assert found == (fitting[0] if fitting else None)
    # For each kind of restriction: one for each length of a target, one that is too long for all, and the one found.
    assert num_tried <= 3 * (len(set(lengths)) + 1) + 1


def test_a_sequence_that_no_target_could_take_is_tried_so_that_it_can_be_told() -> None:
    looking, (worker,) = SlotSearch(), targets([40])
    looking.found_full(30, frozenset(), [worker])
    assert looking.is_in_vain(40, frozenset())
    assert not looking.is_in_vain(41, frozenset())
    looking.found_full(50, frozenset(), [])
    assert looking.is_in_vain(41, frozenset())
    assert looking.is_in_vain(10**9, frozenset())


def test_what_was_full_is_not_asked_again_for_those_behind() -> None:
    looking, workers = SlotSearch(), targets([80, 40])
    looking.found_full(50, frozenset(), workers[:1])
    assert looking.not_full(workers) == workers[1:]
