"""An engine finds the target worker that has started it, and does not outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engines.frames import FrameKind
from outrider.engines.hint_link import HintLink
from outrider.engines.target_door import Door
from outrider.hint_service.messages import CommitPublished, HintsArrived, SubscribeDraft
from outrider.hints.hint_tree import Hint
from protos.outrider.v1 import draft_pb2, hints_pb2
from target_worker.vllm.hints import EngineDoor, SessionHints

LAST_RESORT_S = 30.0
TIED = """
import sys, time
from outrider.engines.target_door import Door
Door(sys.argv[1]).tie()
print(1, flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).parents[2]


async def until_hints(link: HintLink) -> hints_pb2.HintFrame:
    async with asyncio.timeout(LAST_RESORT_S):
        while not (frames := list(link.receive(0.0))):  # noqa: ASYNC110 - an engine reads between its steps
            await asyncio.sleep(0.001)
    return frames[0][0]


async def test_hints_and_commits_pass_between_engine_and_draft_workers() -> None:
    commits = list[CommitPublished]()
    hints = SessionHints(commits.append)
    async with EngineDoor(hints) as door:
        link = HintLink({}, Door(door.path).hand_over)
        assert link.open(0.0)
        hints.open("s x", [1, 2, 3], is_on=True)
        hints.submit(SubscribeDraft(1, "s x", 3))
        hints.submit(HintsArrived("s x", 1, 3, [Hint(1, 0, 9)], 0.0))
        link.send(FrameKind.OPEN, draft_pb2.AttachRequest(session_id="s x", token_ids=[1, 2, 3]).SerializeToString(), 5)
        link.flush(0.0)
        frame = await until_hints(link)
        assert [(each.channel, list(each.token_ids)) for each in frame.nodes] == [(5, [9])]
        commit = hints_pb2.SessionCommit(channel=5, from_len=3, token_ids=[9], is_paused=True)
        link.send(FrameKind.COMMITS, hints_pb2.CommitFrame(commits=[commit]).SerializeToString())
        link.flush(0.0)
        async with asyncio.timeout(LAST_RESORT_S):
            while not hints.is_resting("s x"):  # noqa: ASYNC110 - turns of the loop are what it waits for
                await asyncio.sleep(0)
        assert commits[-1].token_ids == [9]
        # The engine's link breaks, and it opens another one.
        link.close()
        again = HintLink({}, Door(door.path).hand_over)
        assert again.open(0.0)
        again.send(FrameKind.OPEN, draft_pb2.AttachRequest(session_id="s x").SerializeToString(), 1)
        again.flush(0.0)
        async with asyncio.timeout(LAST_RESORT_S):
            while (request := hints.named("s x")) is None or request.number != 1:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.001)
        hints.submit(HintsArrived("s x", 2, 4, [Hint(1, 0, 8)], 0.0))
        assert [each.channel for each in (await until_hints(again)).nodes] == [1]
        again.close()


async def test_nonsense_from_the_engine_breaks_its_link_alone() -> None:
    hints = SessionHints(lambda commit: None)
    async with EngineDoor(hints) as door:
        link = HintLink({}, Door(door.path).hand_over)
        link.open(0.0)
        link.send(FrameKind.OPEN, b"\xff\xff", 5)
        link.flush(0.0)
        async with asyncio.timeout(LAST_RESORT_S):
            while link.is_open:
                list(link.receive(0.0))
                await asyncio.sleep(0.001)
        hints.open("s", [1], is_on=True)
        assert not hints.is_resting("s")


def test_a_worker_that_is_not_there_is_an_error_for_the_link(tmp_path: Path) -> None:
    link = HintLink({}, Door(str(tmp_path / "none")).hand_over)
    assert not link.open(0.0)


@pytest.mark.timeout(120)
async def test_an_engine_ends_with_its_worker() -> None:
    door = EngineDoor(SessionHints(lambda commit: None))
    async with door:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            TIED,
            door.path,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": "."},
        )
        assert process.stdout is not None
        assert await process.stdout.readline()
        async with asyncio.timeout(LAST_RESORT_S):
            while not door._tethers:  # noqa: ASYNC110 - turns of the loop are what it waits for
                await asyncio.sleep(0.001)
        assert process.returncode is None
    assert await asyncio.wait_for(process.wait(), LAST_RESORT_S) == -signal.SIGKILL
