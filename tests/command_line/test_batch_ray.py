"""`outrider batch run --ray` with a real Ray, against a coordinator's own HTTP edge with a fake target."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line.batch import command, follow, pieces
from command_line.batch.client import BatchClient, RequestFile
from command_line.batch.options import RunOptions
from command_line.batch.ray_data import PieceRunner
from coordinator.api.http.line_calls import LineCalls
from coordinator.batches import batch_results
from coordinator.batches.batch import Batch
from coordinator.batches.batch_lines import LineResult
from coordinator.batches.line_journal import LineJournal
from outrider.registry.registry import Registry
from tests.command_line.test_batch import call, served
from tests.coordinator.batches.desks import line

BODY = {"prompt": "import", "max_tokens": 3, "temperature": 0}
PIECE_BYTES = 2000

# A process of its own: Ray can be started once in each.
PROGRAM = f"""
import sys
from command_line import main
from command_line.batch import pieces
pieces.cut.__defaults__ = ({PIECE_BYTES},)
sys.argv[0] = "outrider"
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "batch", "run", *arguments, "--ray"],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write(path: Path, ids: range, **changes: Any) -> None:
    path.write_bytes(b"".join(line(f"r{number}", body=BODY, **changes) + b"\n" for number in ids))


def custom_ids(folder: Path, name: str) -> list[str]:
    files = sorted(folder.glob(f"*.{name}.jsonl"))
    return sorted(json.loads(each)["custom_id"] for file in files for each in file.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_files_of_any_size_run_once_and_are_found_again(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "requests", tmp_path / "answers"
    source.mkdir()
    write(source / "a.jsonl", range(40))
    write(source / "b.jsonl", range(40, 60))
    (source / "notes.txt").write_text("not a request")
    lines = (source / "b.jsonl").read_bytes()
    (source / "b.jsonl").write_bytes(lines + b"{}\n")
    sizes = [path.stat().st_size for path in sorted(source.glob("*.jsonl"))]
    num_pieces = sum(len(pieces.cut("f", size, PIECE_BYTES)) for size in sizes)
    assert num_pieces > 3
    with served(redis_url, tmp_path) as url:
        first = run(str(source), "--url", url, "--output", str(output))
        assert first.returncode == 1, first.stderr
        assert f"{num_pieces} pieces" in first.stderr
        assert "refused: its line" in first.stderr  # which costs the lines of one piece
        assert "the same command tries these again" in first.stderr
        found = custom_ids(output, "output")
        assert len(found) == len(set(found)) > 40
        # What is there is not computed again; answers that are lost are.
        (source / "b.jsonl").write_bytes(lines + line("long", body={"prompt": "word " * 5000}) + b"\n")
        min(output.glob("a.*.output.jsonl")).unlink()
        again = run(str(source), "--url", url, "--output", str(output))
        assert again.returncode == 3, again.stderr
        assert "done before" in again.stderr
        assert "60 answers, 1 requests without an answer" in again.stderr
        assert "WARNING" not in again.stderr, "Ray's own messages say nothing to who runs a batch"
        assert custom_ids(output, "output") == sorted(f"r{number}" for number in range(60))
        assert custom_ids(output, "errors") == ["long"]
        assert not list(output.glob("*.part"))


async def end_the_time(redis_url: str, batch: Batch, *, after_lines: int) -> None:
    """Moves the end of a batch's time to now, once so many lines have ended."""
    registry = Registry(redis_url)
    journal, key = LineJournal(registry), f"{{or:batch:{batch.batch_id}}}:batch"
    found = None
    for _ in range(1500):
        found = await journal.get(batch.batch_id)
        if found is not None and found.counts.num_ended >= after_lines:
            break
        await asyncio.sleep(0.02)
    assert found is not None
    about = replace(found, expires_at=found.created_at).to_fields()["about"]
    script = registry.register_script("return redis.call('HSET', KEYS[1], 'about', ARGV[1])")
    await registry.ask(script(keys=[key], args=[about]))
    await registry.close()


async def run_out(options: RunOptions, url: str, path: Path) -> None:
    """Creates the batch of a file, whose time is up before anybody takes its answers."""
    async with BatchClient.at(options, url) as client:
        batch = await client.create(RequestFile.read(path))
        batch = await follow.follow(client, batch, lambda _: None, lambda _: None)
        assert batch["status"] == "expired"


@pytest.mark.parametrize("is_followed", [True, False])
def test_lines_whose_time_was_up_run_the_next_time_and_no_others(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_followed: bool
) -> None:
    for owner, name, seconds in (
        (follow, "POLL_S", 0.05),
        (batch_results, "WAIT_S", 0.05),
        (batch_results, "LOOK_S", 0.02),
    ):
        monkeypatch.setattr(owner, name, seconds)
    is_stuck, ran, answer = [True], Counter[str](), LineCalls.run

    async def run(self: LineCalls, batch: Batch, url: str, body: bytes, *rest: Any) -> LineResult:
        name = json.loads(body)["user"]
        if is_stuck[0] and int(name) >= 2:
            if name == "2":
                await end_the_time(redis_url, batch, after_lines=2)
            await asyncio.sleep(3600)
        ran[name] += 1
        return await answer(self, batch, url, body, *rest)

    monkeypatch.setattr(LineCalls, "run", run)
    source, output = tmp_path / "requests.jsonl", tmp_path / "answers"
    source.write_bytes(b"".join(line(f"r{number}", body={**BODY, "user": f"{number}"}) + b"\n" for number in range(10)))
    row = {"path": str(source), "start": 0, "end": source.stat().st_size}
    with served(redis_url, tmp_path) as url:
        options = RunOptions(file=str(source), output=str(output), ray=True)
        runner = PieceRunner(options, url, output.as_uri())
        if not is_followed:
            asyncio.run(run_out(options, url, source))
        (first,) = runner(row)
        assert (first["status"], first["num_completed"]) == ("expired", 2)
        is_stuck[0] = False
        (second,) = runner(row)
        assert (second["status"], second["num_completed"]) == ("completed", 10)
        assert (first["num_left"], second["num_left"]) == (8, 0)
        assert "8 of 10 lines have no answer" in first["message"]
        (third,) = runner(row)
        assert (third["status"], third["num_completed"], third["num_failed"]) == ("done before", 10, 0)
    assert ran == Counter(str(number) for number in range(10))
    assert custom_ids(output, "output") == sorted(f"r{number}" for number in range(10))
    assert len(list(output.iterdir())) == 1, "what was partial has gone"


def test_failed_lines_of_an_earlier_run_are_told_again(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "requests.jsonl", tmp_path / "answers"
    source.write_bytes(line("a", body=BODY) + b"\n" + line("long", body={"prompt": "word " * 5000}) + b"\n")
    row = {"path": str(source), "start": 0, "end": source.stat().st_size}
    with served(redis_url, tmp_path) as url:
        runner = PieceRunner(RunOptions(file=str(source), output=str(output), ray=True), url, output.as_uri())
        sums = [(each["num_completed"], each["num_failed"]) for _ in range(2) for each in runner(row)]
    assert sums == [(1, 1), (1, 1)]


@pytest.mark.parametrize(("totals", "status"), [({"num_left": 8}, 3), ({"num_failed": 1}, 3), ({}, 0)])
def test_the_exit_status_says_whether_all_lines_have_answers(
    monkeypatch: pytest.MonkeyPatch, totals: dict[str, int], status: int
) -> None:
    monkeypatch.setattr(command, "run_pieces", lambda *_: Counter({"num_completed": 2} | totals))
    result = call("run", "requests", "--ray")
    assert result.exit_code == status
    assert ("the same command runs these" in result.output) is ("num_left" in totals)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((".",), "--ray runs all files in one"),
        (("nothing.jsonl", "--ray"), "no file with requests"),
        (("s3:/", "--ray"), "no file with requests"),
        (("requests.jsonl", "--ray", "--detach"), "leave out --detach and --new"),
        (("requests.jsonl", "--ray", "--at-once", "0"), "permitted: 1 to 32"),
    ],
)
def test_wrong_words_are_refused_before_ray_starts(arguments: tuple[str, ...], said: str) -> None:
    result = call("run", *arguments, "--url", "http://127.0.0.1:9")
    assert result.exit_code != 0
    assert said in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())
