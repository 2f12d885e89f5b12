"""The supervisor keeps its children running and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from outrider.local.child import StartError, describe_status
from outrider.local.child_spec import ChildEvent, Phase, RestartPolicy, parse_ready_line
from outrider.local.supervisor import Supervisor
from tests.command_line.fakes import expect_eventually, fake_spec, is_alive

FAST = RestartPolicy(first_delay_s=0.05, delay_s_max=0.2, stable_after_s=60)
HOLDER = Path(__file__).parent / "supervisor_holder.py"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


@pytest.fixture
def events() -> list[ChildEvent]:
    return []


@pytest.fixture
async def supervisor(tmp_path: Path, events: list[ChildEvent]) -> AsyncIterator[Supervisor]:
    made = Supervisor(tmp_path / "logs", FAST, events.append)
    yield made
    await made.stop()


def num_of(events: list[ChildEvent], phase: Phase, name: str) -> int:
    return sum(event.phase is phase and event.name == name for event in events)


async def test_ready_lines_come_back_in_the_order_asked(supervisor: Supervisor) -> None:
    ready = await supervisor.start([fake_spec("target-0"), fake_spec("draft-0")])
    assert [line["role"] for line in ready] == ["target", "draft"]
    assert all(is_alive(pid) for pid in supervisor.pids().values())


async def test_a_child_that_dies_is_started_again(supervisor: Supervisor, events: list[ChildEvent]) -> None:
    await supervisor.start([fake_spec("draft-0")])
    first_pid = supervisor.pids()["draft-0"]
    os.kill(first_pid, signal.SIGKILL)
    await expect_eventually(lambda: num_of(events, Phase.READY, "draft-0") == 2, "second ready line")
    assert supervisor.pids()["draft-0"] != first_pid
    died = next(event for event in events if event.phase is Phase.DIED)
    assert died.detail.startswith("was ended by SIGKILL; starting it again in")


async def test_delays_grow_to_their_bound_while_a_child_keeps_dying(
    supervisor: Supervisor, events: list[ChildEvent]
) -> None:
    await supervisor.start([fake_spec("draft-0", "--die-after-s", "0")])
    await expect_eventually(lambda: num_of(events, Phase.DIED, "draft-0") >= 4, "four deaths")
    details = [event.detail for event in events if event.phase is Phase.DIED]
    assert [detail.rpartition(" in ")[2] for detail in details[:4]] == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]


async def test_a_child_that_cannot_start_is_explained_by_its_last_lines(supervisor: Supervisor) -> None:
    with pytest.raises(StartError, match=r"(?s)target-0 ended with exit status 3.*no such weights"):
        await supervisor.start([fake_spec("draft-0"), fake_spec("target-0", "--fail", "no such weights")])


async def test_a_command_that_does_not_exist_is_a_start_error(supervisor: Supervisor) -> None:
    spec = fake_spec("target-0")
    missing = type(spec)(spec.name, spec.role, ("/nowhere/at-all",))
    with pytest.raises(StartError, match="No such file"):
        await supervisor.start([missing])


async def test_a_child_that_stays_silent_is_given_up(supervisor: Supervisor) -> None:
    with pytest.raises(StartError, match=r"not ready within 0\.3 s"):
        await supervisor.start([fake_spec("target-0", "--silent", ready_timeout_s=0.3)])


async def test_stop_goes_in_reverse_order(tmp_path: Path) -> None:
    note = tmp_path / "note"
    supervisor = Supervisor(tmp_path / "logs", FAST)
    await supervisor.start([fake_spec("redis", "--note", str(note))])
    await supervisor.start([fake_spec(name, "--note", str(note)) for name in ("target-0", "coordinator")])
    await supervisor.stop()
    stopped = [line.split()[0] for line in note.read_text().splitlines() if " stopped " in line]
    assert stopped == ["coordinator", "target", "redis"]


async def test_a_stubborn_child_and_its_hidden_family_are_killed(tmp_path: Path) -> None:
    family = tmp_path / "family"
    supervisor = Supervisor(tmp_path / "logs", FAST)
    await supervisor.start([fake_spec("target-0", "--stubborn", "--family", str(family), stop_grace_s=0.2)])
    pids = [*supervisor.pids().values(), int(family.read_text())]
    await asyncio.wait_for(supervisor.stop(), 5)
    assert not any(is_alive(pid) for pid in pids)


async def test_stop_during_a_restart_delay_starts_nothing(tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    supervisor = Supervisor(tmp_path / "logs", RestartPolicy(first_delay_s=30), events.append)
    await supervisor.start([fake_spec("draft-0", "--die-after-s", "0")])
    await expect_eventually(lambda: num_of(events, Phase.DIED, "draft-0"), "death")
    await asyncio.wait_for(supervisor.stop(), 5)
    assert num_of(events, Phase.STARTING, "draft-0") == 1


async def test_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "note"
    supervisor = Supervisor(tmp_path / "logs", FAST)
    start = asyncio.create_task(supervisor.start([fake_spec("target-0", "--silent", "--note", str(note))]))
    await expect_eventually(note.exists, "child process")
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await asyncio.wait_for(supervisor.stop(), 5)
    assert not is_alive(int(note.read_text().split()[2]))


async def hold(tmp_path: Path) -> tuple[asyncio.subprocess.Process, list[int]]:
    """A supervisor in a process of its own; its pid's process and those of two children and a grandchild."""
    family = tmp_path / "family"
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HOLDER), str(tmp_path / "logs"), str(family)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert holder.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(holder.stdout.readline(), 20)).split()]
    return holder, [*pids, int(family.read_text())]


@linux_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_nothing_outlives_the_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    holder, pids = await hold(tmp_path)
    assert all(is_alive(pid) for pid in pids)
    holder.send_signal(number)
    await asyncio.wait_for(holder.wait(), 10)
    await expect_eventually(lambda: not any(is_alive(pid) for pid in pids), "every process gone")


@linux_only
async def test_nothing_outlives_a_killed_tether(tmp_path: Path, supervisor: Supervisor) -> None:
    await supervisor.start([fake_spec("target-0")])
    child = supervisor.pids()["target-0"]
    os.kill(psutil.Process(child).ppid(), signal.SIGKILL)
    await expect_eventually(lambda: not is_alive(child), "child gone")


async def test_output_is_logged_by_name(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start([fake_spec("target-0")])
    log = tmp_path / "logs" / "target-0.log"
    await expect_eventually(lambda: "target begins" in log.read_text(), "the child's line in its log")


@pytest.mark.parametrize(
    "line", ["", "ready", "{", "{}", '{"event": "other"}', "[1]", '{"event": ["ready"]}', "{1: 2}"]
)
def test_other_lines_are_not_ready_lines(line: str) -> None:
    assert parse_ready_line(line) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with exit status 0"), (3, "ended with exit status 3"), (-9, "was ended by SIGKILL")],
)
def test_statuses_read_as_words(status: int, words: str) -> None:
    assert describe_status(status) == words
    if status < 0:
        assert describe_status(128 - status) == words


def test_delays_never_overflow() -> None:
    assert RestartPolicy().delay_s(1) == 0.5
    assert RestartPolicy().delay_s(10_000) == 30.0


async def test_hurry_cuts_the_grace_short(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "logs", FAST)
    await supervisor.start([fake_spec("target-0", "--stubborn", stop_grace_s=60)])
    pid = supervisor.pids()["target-0"]
    stop = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.1)
    assert is_alive(pid)
    supervisor.hurry()
    await asyncio.wait_for(stop, 5)
    assert not is_alive(pid)
