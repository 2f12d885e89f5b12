"""`outrider fetch` as processes: killed, interrupted, two at once, and what an engine says with a fetched model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line.checkout import DEMO_DRAFT
from command_line.fetch.place import Place
from command_line.fetch.record import RECORD
from command_line.fetch.transfer import Stopped
from outrider.engine.loading.checkpoint_files import partial_folder
from outrider.errors import ConfigurationError, Unavailable
from outrider.text.tokenizer import Tokenizer
from tests import models
from tests.command_line.fetch.checkpoints import NEEDED, SHARDS
from tests.command_line.fetch.conftest import REPOSITORY, Command, Fetcher, Notes, content_of
from tests.command_line.fetch.hub_server import HubServer, Repository
from tests.engine.sequences import feed

ADDRESS = f"hf://{REPOSITORY}@main"
HELD_BYTES = 1 << 20


def until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits for a condition while a process runs."""
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """The output of a process that ends with this status."""
    out, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    return out, err


@pytest.fixture
def held(hub: HubServer, repository: Repository) -> HubServer:
    """A Hub that sends a megabyte of each large file and then waits."""
    hub.host.faults.stall_after = HELD_BYTES
    return hub


def test_a_killed_fetch_leaves_no_folder_and_the_next_one_goes_on(
    held: HubServer, repository: Repository, command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    first = command(ADDRESS, folder)
    partial = partial_folder(folder)

    def num_bytes() -> dict[str, int]:
        return {shard: path.stat().st_size for shard in SHARDS for path in partial.glob(f"{shard}.*.part")}

    until(lambda: [size >= HELD_BYTES for size in num_bytes().values()] == [True] * len(SHARDS), first)
    assert not folder.exists()
    first.kill()
    first.wait(10)
    assert not folder.exists()
    kept = num_bytes()
    assert all(size >= HELD_BYTES for size in kept.values())
    asked = len(held.host.asked)
    held.host.faults.gate.set()
    out, err = ended(
        command(ADDRESS, folder, "--json", "-")
    )  # at once: a dead process on this machine is known as such
    assert {each.path: each.start for each in held.host.asked[asked:]} == kept, "the first bytes are not sent again"
    document = json.loads(out)
    assert document["state"] == "fetched"
    assert document["revision"] == repository.refs["main"]
    assert document["num_bytes_read"] <= document["num_bytes"] - sum(kept.values())
    assert {file["path"] for file in document["files"]} == NEEDED
    files = repository.commits[repository.refs["main"]]
    found = content_of(folder)
    del found[RECORD]
    assert found == {name: files[name] for name in NEEDED}
    assert f"{ADDRESS} is commit {repository.refs['main']}" in err
    assert f"{len(NEEDED)} files, 0.01 GB" in err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".model", "model"))] == ["model"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_fetch_ends_in_order(
    held: HubServer, command: Command, tmp_path: Path, number: signal.Signals
) -> None:
    process = command(ADDRESS, tmp_path / "model")
    until(lambda: held.host.sent(SHARDS[0]) >= HELD_BYTES, process)
    process.send_signal(number)
    held.host.faults.gate.set()
    _, err = ended(process, 128 + number)
    assert "interrupted: what was fetched is kept" in err
    assert "Traceback" not in err
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.lock").exists(), "nobody need wait for its lease"


@pytest.mark.thorough
def test_two_at_once_end_right_and_fetch_once(
    held: HubServer, repository: Repository, command: Command, tmp_path: Path
) -> None:
    first = command(ADDRESS, tmp_path / "model", "--json", "-")
    until(lambda: len(held.host.asked) == 2, first)
    second = command(ADDRESS, tmp_path / "model", "--json", "-", "--verify")
    assert second.stderr is not None
    line = second.stderr.readline()
    assert "another process fetches" in line
    held.host.faults.gate.set()
    states = [json.loads(ended(process)[0])["state"] for process in (first, second)]
    assert states == ["fetched", "present"]
    assert sorted(each.path for each in held.host.asked) == sorted(SHARDS)


@pytest.mark.thorough
def test_nobody_waits_for_ever(held: HubServer, command: Command, fetch: Fetcher, tmp_path: Path) -> None:
    first = command(ADDRESS, tmp_path / "model")
    until(lambda: len(held.host.asked) == 2, first)
    with pytest.raises(Unavailable, match=r"has fetched .*model for 1 s; wait longer with --max-wait-s"):
        fetch(ADDRESS, tmp_path / "model", max_wait_s=1.0)


@pytest.mark.thorough
def test_errors_are_one_paragraph_and_status_1(hub: HubServer, command: Command, tmp_path: Path) -> None:
    _, err = ended(command("hf://some-org/unknown@main", tmp_path / "model"), 1)
    assert err.startswith("outrider: hf://some-org/unknown@main: 127.0.0.1 knows no such model (401)")
    assert len(err.strip().splitlines()) == 1


class TestLease:
    def test_a_silent_holder_on_another_machine_is_taken_over(
        self, repository: Repository, fetch: Fetcher, tmp_path: Path
    ) -> None:
        place = Place(tmp_path / "model", lease_s=0.5)
        lock = tmp_path / ".model.lock"
        with place.locked(1.0, Notes(), fetch.stop):
            content = lock.read_bytes()
        lock.write_bytes(_of_another_machine(content))
        assert fetch(ADDRESS, tmp_path / "model", lease_s=0.5, max_wait_s=30.0).state == "fetched"
        assert any("another process fetches" in note for note in fetch.shown.notes)

    def test_a_live_holder_on_another_machine_is_not(
        self, repository: Repository, fetch: Fetcher, tmp_path: Path
    ) -> None:
        lock = tmp_path / ".model.lock"
        with Place(tmp_path / "model", lease_s=0.5).locked(1.0, Notes(), fetch.stop):
            lock.write_bytes(_of_another_machine(lock.read_bytes()))  # and the holder goes on to renew it
            with pytest.raises(Unavailable, match=r"has fetched .*model for 2 s"):
                fetch(ADDRESS, tmp_path / "model", lease_s=0.5, max_wait_s=2.0)

    def test_who_lost_the_lease_stops(self, fetch: Fetcher, tmp_path: Path) -> None:
        place = Place(tmp_path / "model", lease_s=0.3)

        def work() -> None:
            with place.locked(1.0, Notes(), fetch.stop):
                (tmp_path / ".model.lock").unlink()
                assert fetch.stop.wait(10)
                raise Stopped

        with pytest.raises(Unavailable, match="another process took over"):
            work()

    def test_a_volume_that_cannot_be_written_is_named(self, repository: Repository, fetch: Fetcher) -> None:
        with pytest.raises(ConfigurationError, match=r"/proc cannot be written .*with write access"):
            fetch(ADDRESS, Path("/proc/model"))


def _of_another_machine(content: bytes) -> bytes:
    lines = content.splitlines()
    changed = [line + b"-elsewhere" if b"host" in line else line for line in lines]
    assert changed != lines, content
    return b"\n".join(changed) + b"\n"


@pytest.mark.thorough
def test_an_engine_generates_the_same_with_a_fetched_model(hub: HubServer, fetch: Fetcher, tmp_path: Path) -> None:
    hub.add("outrider/draft", content_of(DEMO_DRAFT))
    hub.host.faults.break_after = {"model.safetensors": 3 << 20}
    fetch("hf://outrider/draft@main", tmp_path / "draft")
    assert len(hub.host.asked) == 2, "it did break off"
    expected = continued(DEMO_DRAFT)
    assert len(expected) > 20
    assert continued(tmp_path / "draft") == expected


def continued(model_dir: Path, num_tokens: int = 12) -> str:
    """The continuation of a few words by a model, always the likeliest token."""
    engine, tokenizer = models.load(models.engine_config(model_dir)), Tokenizer(model_dir)
    token_ids = tokenizer.encode("Once upon a time there was")
    kv, said, fed = engine.new_sequence(), list[int](), token_ids
    for _ in range(num_tokens):
        fed = [int(feed(engine, kv, fed, 1)[0].argmax())]
        said += fed
    return tokenizer.decode(said)
