"""`outrider demo` and `outrider chat` over fake workers: what they print and how they exit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.command_line.conftest import family, write_head
from tests.command_line.fakes import expect_eventually, is_alive

Run = Callable[..., subprocess.Popen[str]]


def arguments(pair: tuple[Path, Path]) -> tuple[object, ...]:
    return ("demo", "--target", pair[0], "--draft", pair[1], "--num-tokens", "6", "--json")


def test_json_is_the_last_line(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair))
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert result["identical"] is True
    assert len(result["prompts"]) >= 3
    assert result["prompts"][0]["text"] == " w0 w1 w2 w3 w4 w5"
    assert result["on"]["draft_acceptance_rate"] == 0.5
    assert result["on"]["mean_acceptance_length"] == 2.0
    assert result["off"]["draft_acceptance_rate"] is None
    assert result["speedup"] > 0
    assert result["target"] == "target"
    assert "\x1b[" not in stdout, "no colour where there is no terminal"
    assert "outputs identical" in stdout


def test_a_changed_text_is_a_failure(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair), FAKE_FAULT="differ")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert json.loads(stdout.splitlines()[-1])["identical"] is False


def test_sources_are_compared_and_one_is_recommended(outrider: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    (pair[0] / "config.json").write_text('{"num_hidden_layers": 8}')
    named = ("--draft", head, "--drafter", "draft", "--drafter", "local-head", "--drafter", "lookup")
    process = outrider(*arguments(pair), *named, "--budget-s", "0")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert [each["drafter"] for each in result["sources"]] == ["draft", "local-head", "lookup"]
    assert all(each["identical"] for each in result["sources"])
    assert result["recommended"] in ("draft", "local-head", "lookup")
    for words in ("draft, a model", "head, beside the target", "the request's own text"):
        assert words in stdout
    assert "outrider serve --target" in stdout or "No source is worth it" in stdout


def test_several_drafts_need_to_be_compared(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair), "--draft", pair[1])
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--drafter all" in stderr


def test_a_source_that_no_folder_offers_is_named(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair), "--drafter", "head")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no folder offers --drafter head" in stderr


def test_a_refusal_by_the_server_is_shown(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair), "--num-tokens", "501")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "400: max_tokens is too large" in stderr


async def test_an_interrupted_demo_leaves_nothing(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider(*arguments(pair))
    await expect_eventually(lambda: len(family(process)) >= 8, "every process")
    pids = family(process)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not [pid for pid in pids if is_alive(pid)]


def test_chat_streams_an_answer_and_its_statistics(outrider: Run, pair: tuple[Path, Path]) -> None:
    server = outrider("serve", "--target", pair[0], "--draft", pair[1], "--port", "0", "--grpc-port", "0")
    assert server.stdout is not None
    url = server.stdout.readline().split()[3]
    assert url.endswith("/v1"), "as clients of OpenAI need it, and as a person copies it"
    stdout, stderr = outrider("chat", "--url", url, "--complete").communicate("hello\n\nagain\n", timeout=30)
    assert stdout.count(" w0 w1 w2 w3 w4 w5") == 2, stderr
    assert "6 tokens · TTFT" in stdout
    assert "accepted 50% of 6 hints · 2.00 tokens a step" in stdout
