"""`outrider batch run --ray` with a real Ray, against a coordinator's own HTTP edge with a fake target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line.batch import pieces
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
