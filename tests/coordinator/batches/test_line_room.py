"""Each model has a room for its lines, and none waits for another's."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http import line_calls
from coordinator.api.http.line_calls import LineCalls
from coordinator.batches import batch_results
from coordinator.batches.batch import Batch
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.line_room import LineRoom, RoomSize, Turn
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import a_batch, created, desk_over, line, until
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.test_several_models import NAMES, PLAIN, Fleet, fleet, tokenizers

__all__ = ["fleet", "tokenizers"]


class Rooms(LineRoom):
    """The rooms, and the models of the lines that have begun."""

    def __init__(self, most: int, **num_slots: int) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.resize(RoomSize(most, num_slots))

    def enter(self, model: str, num: int = 1, *, tenant: str | None = None) -> Turn:
        turn = Turn(model, a_batch(batch_id=f"of {tenant}", tenant=tenant), num, lambda: self.begun.append(model))
        self.ask(turn)
        return turn


def begun(*turns: Turn) -> list[bool]:
    """Whether lines have begun."""
    return [turn.has_begun for turn in turns]


class TestRooms:
    def test_lines_of_a_busy_model_hold_up_no_other(self) -> None:
        rooms = Rooms(256, busy=4, idle=4)
        for _ in range(20):
            rooms.enter("busy")
        rooms.enter("idle", tenant="other")
        assert rooms.begun == ["busy"] * 4 + ["idle"]

    def test_what_a_tenant_has_at_one_model_counts_at_no_other(self) -> None:
        rooms = Rooms(256, busy=4, idle=2)
        for _ in range(4):
            rooms.enter("busy", tenant="a")
        running = [rooms.enter("idle", tenant="b") for _ in range(2)]
        rooms.enter("idle", tenant="b")
        first = rooms.enter("idle", tenant="a")
        rooms.leave(running[0])
        assert first.has_begun

    def test_together_they_have_a_bound_and_each_model_a_part_of_it(self) -> None:
        rooms = Rooms(12, a=20, b=20, c=20)
        for _ in range(20):
            rooms.enter("a")
        assert rooms.begun == ["a"] * 8, "2 are kept for each of the others"
        for _ in range(5):
            rooms.enter("b")
            rooms.enter("c")
        assert sorted(rooms.begun) == ["a"] * 8 + ["b"] * 2 + ["c"] * 2

    def test_the_only_model_has_all_of_it(self) -> None:
        rooms = Rooms(12, a=20)
        for _ in range(20):
            rooms.enter("a")
        assert rooms.num_held == 12

    def test_a_line_beyond_its_room_runs_alone_there(self) -> None:
        rooms = Rooms(256, a=4, b=4)
        small, large, last = rooms.enter("a"), rooms.enter("a", 64), rooms.enter("a")
        assert begun(small, large, last) == [True, False, False]
        rooms.leave(small)
        assert begun(large, last, rooms.enter("b")) == [True, False, True]
        rooms.leave(large)
        assert begun(last) == [True]

    def test_without_a_target_nothing_begins(self) -> None:
        rooms = Rooms(12, a=2)
        waiting = rooms.enter("b")
        rooms.resize(RoomSize())
        assert begun(rooms.enter("a"), waiting) == [False, False]
        rooms.resize(RoomSize(12, {"b": 1}))
        assert begun(waiting) == [True]

    @given(
        st.integers(3, 60),
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 9)), max_size=80),
    )
    def test_no_order_takes_a_models_part_or_goes_beyond_a_bound(
        self, most: int, events: list[tuple[str, int, int]]
    ) -> None:
        num_slots = {"a": 4, "b": 9, "c": 30}
        rooms = Rooms(most, **num_slots)
        turns: list[Turn] = []
        for model, num, leaver in events:
            turns.append(rooms.enter(model, num, tenant=str(leaver % 3)))
            if leaver < len(turns):
                rooms.leave(turns.pop(leaver))
            for each, slots in num_slots.items():
                runs = [turn.num_sequences for turn in turns if turn.model == each and turn.has_begun]
                waits = [turn.num_sequences for turn in turns if turn.model == each and not turn.has_begun]
                assert sum(runs) <= max(slots, max(runs, default=0))
                if waits:
                    assert sum(runs) + max(waits) > min(slots, most // 6), "its part is its own"
            # A line that finds nothing of its model begins in any case.
            assert rooms.num_held <= most + sum(turn.num_sequences for turn in _first_ones(turns))


def _first_ones(turns: list[Turn]) -> list[Turn]:
    begun = [turn for turn in turns if turn.has_begun]
    largest = [max((each for each in begun if each.model == model), key=_size, default=None) for model in "abc"]
    return [turn for turn in largest if turn is not None]


def _size(turn: Turn) -> int:
    return turn.num_sequences


async def test_lines_that_wait_for_a_slot_of_one_model_hold_up_no_batch_of_another(
    clusters: ClusterFactory, fleet: Fleet, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_results, "WAIT_S", 0.05)
    monkeypatch.setattr(batch_results, "LOOK_S", 0.02)
    monkeypatch.setattr(line_calls, "SEQUENCES_MAX", 8)  # both models have more slots
    may_go = asyncio.Event()
    targets = fleet.targets(held_s_max=120)
    busy = targets[0]
    busy.may_step = lambda num_tokens: may_go.is_set()
    desk = desk_over(registry, tmp_path / "files")

    def content(model: str, num: int) -> bytes:
        bodies = ({"model": model, "prompt": "import", **PLAIN} for _ in range(num))
        return b"".join(line(f"r{number}", body=body) + b"\n" for number, body in enumerate(bodies))

    settings = {"queue_wait_max_s": 600}
    async with fleet.open(clusters, targets, settings=settings, max_num_seqs=16) as cluster:
        calls = [asyncio.create_task(cluster.complete(model=NAMES[0])) for _ in range(16)]
        await eventually(lambda: busy.num_open == 16, "all its slots are taken", 30)
        waiting = await created(desk, content(NAMES[0], 40))
        async with BatchRunner(desk, LineCalls(cluster.service), poll_s=0.05) as runner:
            room = runner._room
            await eventually(lambda: room.num_held > 0, "lines have begun", 30)
            await eventually(
                lambda: cluster.service._background.num == room.num_held, "all of them wait for a slot", 30
            )
            other = await created(desk, content(NAMES[1], 20))
            done = await until(desk, other, over)
            assert done.counts.num_completed == 20
            assert busy.num_open == 16
            may_go.set()
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 16
            assert (await until(desk, waiting, over)).counts.num_completed == 40


def over(batch: Batch) -> bool:
    return batch.is_over


async def test_what_the_room_gives_out_the_replica_takes_in(clusters: ClusterFactory, fleet: Fleet) -> None:
    """Otherwise a line would be prepared, refused, and prepared again."""
    may_go = asyncio.Event()
    targets = fleet.targets(held_s_max=120)
    for target in targets:
        target.may_step = lambda num_tokens: may_go.is_set()
    fleet.add("third", like=NAMES[0])  # which has no target, and needs no room
    async with fleet.open(clusters, targets, settings={"requests_max": 64}, max_num_seqs=64) as cluster:
        calls, room = LineCalls(cluster.service), LineRoom()
        room.resize(calls.room())
        turns = [Turn(NAMES[0], a_batch(), 1, lambda: None) for _ in range(40)]
        for turn in turns:
            room.ask(turn)
        assert room.num_held == 24, "of 32, 8 are kept for the other model"
        others = [Turn(NAMES[1], a_batch(batch_id="other"), 1, lambda: None) for _ in range(40)]
        for turn in others:
            room.ask(turn)
        assert room.num_held == 32
        runs = []
        for turn in itertools.chain(turns, others):
            if turn.has_begun:
                body = json.dumps({"model": turn.model, "prompt": "import", **PLAIN}).encode()
                runs.append(asyncio.create_task(calls.run(turn.batch, "/v1/completions", body, "r", no_wait)))
        await eventually(lambda: cluster.service._background.num == 32, "none is refused", 30)
        may_go.set()
        assert [each.status for each in await asyncio.gather(*runs)] == [200] * 32


def no_wait(model: str, num_sequences: int) -> nullcontext[None]:
    """There is room for every line."""
    return nullcontext()
