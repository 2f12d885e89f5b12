"""`outrider batch` against a coordinator's own HTTP edge, with real lines at a fake target."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner, Result

from command_line import app
from command_line.batch import follow
from command_line.batch.client import BatchClient
from command_line.batch.follow import Pace
from command_line.client import ApiError
from coordinator.api.http.application import create_app
from coordinator.api.http.line_calls import LineCalls
from coordinator.batches import batch_results
from coordinator.batches.batch_runner import BatchRunner
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import desk_over, line
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.tiny_model import write_model_dir


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_results, "WAIT_S", 0.05)
    monkeypatch.setattr(batch_results, "LOOK_S", 0.02)
    monkeypatch.setattr(follow, "POLL_S", 0.05)


@contextmanager
def served(redis_url: str, tmp_path: Path, *, has_batches: bool = True) -> Iterator[str]:
    """The address of a coordinator on a loop of its own."""
    address: list[str] = []
    is_ready, loop, end = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        clusters = ClusterFactory(write_model_dir(tmp_path / "model"))
        registry = Registry(redis_url)
        desk = desk_over(registry, tmp_path / "files") if has_batches else None
        async with clusters.open([clusters.target()]) as cluster:
            config = uvicorn.Config(create_app(cluster.service, desk), port=0, log_level="warning", lifespan="off")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve())
            await eventually(lambda: server.started, "the server has started")
            address.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
            is_ready.set()
            if desk is None:
                await end.wait()
            else:
                async with BatchRunner(desk, LineCalls(cluster.service), poll_s=0.05):
                    await end.wait()
            server.should_exit = True
            await serving
        await registry.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.close()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["batch", *arguments])


def write(path: Path, num: int, **changes: Any) -> Path:
    body = {"prompt": "import", "max_tokens": 3, "temperature": 0}
    path.write_bytes(b"".join(line(f"r{number}", body=body, **changes) + b"\n" for number in range(num)))
    return path


def ids(path: Path) -> list[str]:
    return sorted(json.loads(each)["custom_id"] for each in path.read_text().splitlines())


def test_run_writes_every_answer_and_finds_the_batch_again(redis_url: str, tmp_path: Path) -> None:
    with served(redis_url, tmp_path) as url:
        file = write(tmp_path / "requests.jsonl", 6)
        first = call("run", str(file), "--url", url)
        assert first.exit_code == 0, first.output
        output = tmp_path / "requests.output.jsonl"
        assert ids(output) == [f"r{number}" for number in range(6)]
        output.unlink()
        again = call("run", str(file), "--url", f"{url}/v1", "--output", str(tmp_path / "again.jsonl"))
        assert "has already" in again.output
        assert ids(tmp_path / "again.jsonl") == [f"r{number}" for number in range(6)]
        batch_id = next(word for word in again.output.replace(",", " ").split() if word.startswith("batch_"))
        shown = json.loads(call("status", batch_id, "--url", url).output)
        assert (shown["status"], shown["request_counts"]["completed"]) == ("completed", 6)
        too_late = call("cancel", batch_id, "--url", url)
        assert "completed" in str(too_late.exception)
        other = call("run", str(file), "--url", url, "--new", "--detach")
        assert other.exit_code == 0
        assert batch_id not in other.output


def test_lines_that_fail_go_to_a_file_of_their_own(redis_url: str, tmp_path: Path) -> None:
    with served(redis_url, tmp_path) as url:
        file = write(tmp_path / "requests.jsonl", 1)
        with file.open("ab") as opened:
            opened.write(line("long", body={"prompt": "word " * 5000}))
        result = call("run", str(file), "--url", url)
        assert result.exit_code == 3, result.output
        assert ids(tmp_path / "requests.errors.jsonl") == ["long"]


def test_a_file_that_is_refused_says_which_line(redis_url: str, tmp_path: Path) -> None:
    with served(redis_url, tmp_path) as url:
        file = write(tmp_path / "requests.jsonl", 1)
        with file.open("ab") as opened:
            opened.write(line("bad", body={"prompt": "a", "temprature": 1}))
        result = call("run", str(file), "--url", url)
        assert result.exit_code == 1
        assert "line 2: unknown parameter 'temprature'" in result.output


def test_a_server_without_batches_names_the_flag(redis_url: str, tmp_path: Path) -> None:
    with served(redis_url, tmp_path, has_batches=False) as url:
        result = call("run", str(write(tmp_path / "requests.jsonl", 1)), "--url", url)
    assert "--batch-files" in str(result.exception)


@pytest.mark.parametrize("content", ["", "{}", "hello"])
def test_a_file_of_something_else_is_refused_with_an_example(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    result = call("run", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 2
    assert "custom_id" in result.output


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert call("run", str(tmp_path / "none.jsonl")).exit_code == 2


@pytest.mark.parametrize(("status", "is_followed"), [(503, True), (429, True), (404, False), (401, False)])
async def test_a_batch_is_followed_while_its_server_is_away(status: int, is_followed: bool) -> None:
    batch = {"id": "batch_404", "status": "in_progress", "request_counts": {"total": 1, "completed": 0, "failed": 0}}
    answers = iter([httpx.Response(status, json={}), httpx.Response(200, json=batch | {"status": "completed"})])
    transport = httpx.MockTransport(lambda request: next(answers))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        following = follow.follow(BatchClient(client), batch, lambda text: None, lambda text: None)
        if is_followed:
            assert (await following)["status"] == "completed"
        else:
            with pytest.raises(ApiError, match=str(status)):
                await following


def test_the_pace_tells_speed_and_time_left() -> None:
    pace = Pace()

    def batch(completed: int, total: int = 100, failed: int = 0) -> dict[str, Any]:
        counts = {"total": total, "completed": completed, "failed": failed}
        return {"status": "in_progress", "request_counts": counts}

    assert pace.describe(batch(0, 0), 0.0) == "in_progress"
    assert pace.describe(batch(10), 1.0) == "in_progress: 10 of 100 lines"
    assert pace.describe(batch(20, failed=10), 11.0) == (
        "in_progress: 30 of 100 lines, 10 of them failed, 2.0 per second, about 35 s left"
    )
