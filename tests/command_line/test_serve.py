"""`outrider serve` over fake workers: arguments, early checks, start, and a stop that leaves nothing."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line.conftest import commands, family, write_head, write_model, write_weights
from tests.command_line.fakes import expect_eventually, is_alive
from tests.engine.test_kv_plan import SHAPES, SMALL

Run = Callable[..., subprocess.Popen[str]]
FREE_PORTS = ("--port", "0", "--grpc-port", "0")


def models(pair: tuple[Path, Path]) -> tuple[object, ...]:
    return ("--target", pair[0], "--draft", pair[1])


def refusal(process: subprocess.Popen[str]) -> str:
    """The message of a command that must fail with status 1, as one line."""
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 1, stderr
    return " ".join(stderr.split())


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_one_line_says_where_it_listens(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider("serve", *models(pair), *FREE_PORTS, "--served-model-name", "mine")
    assert re.fullmatch(
        r"Outrider is ready: http://127\.0\.0\.1:\d+/v1 \(OpenAI\), 127\.0\.0\.1:\d+ \(gRPC\), "
        r"model mine, logs in .+\n",
        ready_line(process),
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_stops_everything(
    outrider: Run, pair: tuple[Path, Path], number: signal.Signals, status: int
) -> None:
    process = outrider("serve", *models(pair), *FREE_PORTS)
    assert ready_line(process)
    pids = family(process)
    assert len(pids) >= 8, "itself, Redis, three tethers and what they hold"
    process.send_signal(number)
    assert process.wait(20) == status
    assert not [pid for pid in pids if is_alive(pid)]


async def test_nothing_outlives_a_killed_serve(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider("serve", *models(pair), *FREE_PORTS)
    assert ready_line(process)
    pids = family(process)
    process.kill()
    await expect_eventually(lambda: not [pid for pid in pids if is_alive(pid)], "every process gone")


async def test_a_worker_that_dies_comes_back_and_is_mentioned(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider("serve", *models(pair), *FREE_PORTS)
    assert ready_line(process)

    def drafts() -> list[int]:
        return [pid for pid, words in commands(process).items() if words[1:3] == ["-m", "draft_worker"]]

    (first,) = drafts()
    os.kill(first, signal.SIGKILL)
    await expect_eventually(lambda: drafts() not in ([], [first]), "another draft worker")
    process.terminate()
    _, stderr = process.communicate(timeout=20)
    assert "died draft-0 was ended by SIGKILL; starting it again in 0.5 s" in stderr


def test_a_worker_that_cannot_start_is_quoted_and_stops_the_rest(outrider: Run, pair: tuple[Path, Path]) -> None:
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS, FAKE_FAULT="draft"))
    assert "draft-0 ended with exit status 1" in message
    assert "no room for these weights" in message


def test_no_draft_starts_no_draft_worker(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider("serve", "--target", pair[0], "--no-draft", *FREE_PORTS)
    assert ready_line(process)
    running = list(commands(process).values())
    assert any("target_worker" in command for command in running)
    assert not any("draft_worker" in command for command in running)


def test_a_draft_head_runs_on_draft_workers_and_is_told_to_the_target(
    outrider: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head")
    process = outrider("serve", "--target", pair[0], "--draft", head, *FREE_PORTS)
    assert ready_line(process)
    assert flags_of(process, "target_worker")["--draft-head"] == str(head)
    draft = flags_of(process, "draft_worker")
    assert (draft["--model"], draft["--target-tokenizer"]) == (str(head), str(pair[0]))


@pytest.mark.parametrize(("kind", "flag"), [("medusa", "--draft"), ("eagle3", "--draft-head"), ("mtp", "--draft")])
def test_a_head_beside_the_target_starts_no_draft_worker(
    outrider: Run, pair: tuple[Path, Path], tmp_path: Path, kind: str, flag: str
) -> None:
    if kind == "mtp":
        head = pair[0]
        (head / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    else:
        head = write_head(tmp_path / "head", kind)
    process = outrider("serve", "--target", pair[0], flag, head, *FREE_PORTS)
    assert ready_line(process)
    assert flags_of(process, "target_worker")["--draft-head"] == str(head)
    assert not any("draft_worker" in command for command in commands(process).values())


def test_a_draft_head_is_checked_before_a_process_starts(
    outrider: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def said(folder: Path, flag: str = "--draft") -> str:
        return refusal(outrider("serve", "--target", pair[0], flag, folder, *FREE_PORTS))

    assert "there is no config.json" in said(tmp_path / "nowhere", "--draft-head")
    other = write_head(tmp_path / "other")
    shutil.copy(write_model(tmp_path / "model", "b", "a") / "tokenizer.json", other)
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", said(other)))) == 2
    pickled = write_head(tmp_path / "pickled", "medusa")
    (pickled / "medusa.safetensors").rename(pickled / "medusa_lm_head.pt")
    assert "pickled ones (*.bin, *.pt) are not read" in said(pickled)
    old = write_head(tmp_path / "old")
    text = (old / "eagle3.safetensors").read_bytes().replace(b"hidden_norm", b"another_one")
    (old / "eagle3.safetensors").write_bytes(text)
    assert "is a head of EAGLE 1 or 2" in said(old)
    (pair[1] / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    assert "MTP layers, which draft for that model alone" in said(pair[1], "--draft-head")
    assert "is no draft head of a known kind" in said(pair[0], "--draft-head")


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use_is_named_by_its_flag(outrider: Run, pair: tuple[Path, Path], flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = refusal(outrider("serve", *models(pair), *FREE_PORTS, flag, port))
    assert f"{flag} {port}: cannot listen on 127.0.0.1:{port}" in message


def test_missing_folder_names_the_flag(outrider: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    message = refusal(outrider("serve", "--target", tmp_path / "nowhere", "--draft", pair[1], *FREE_PORTS))
    assert f"outrider: --target {tmp_path / 'nowhere'}: there is no such folder" in message


def test_missing_weights_are_named(outrider: Run, pair: tuple[Path, Path]) -> None:
    (pair[1] / "model.safetensors").unlink()
    assert "weights are missing: model.safetensors" in refusal(outrider("serve", *models(pair), *FREE_PORTS))


def test_weights_that_are_none_are_named(outrider: Run, pair: tuple[Path, Path]) -> None:
    (pair[1] / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS))
    assert f"--draft {pair[1]}: model.safetensors is no safetensors file" in message


def test_more_weights_than_memory_are_refused_with_the_numbers(outrider: Run, pair: tuple[Path, Path]) -> None:
    write_weights(pair[0], 10**13)
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS, "--num-target-workers", 2))
    assert "2 × 18626.5 GiB for the target workers and 1 × 0.0 GiB for the draft worker" in message


def flags_of(process: subprocess.Popen[str], name: str) -> dict[str, str]:
    (words,) = (words for words in commands(process).values() if words[1:3] == ["-m", name])
    return dict(itertools.pairwise(words))


def test_small_models_are_given_shares_that_add_up_to_less_than_what_is_there(
    outrider: Run, pair: tuple[Path, Path]
) -> None:
    process = outrider("serve", *models(pair), *FREE_PORTS, "--memory-utilization", 0.5)
    assert ready_line(process)
    shares = [float(flags_of(process, name)["--memory-utilization"]) for name in ("target_worker", "draft_worker")]
    assert 0.49 < sum(shares) <= 0.5


def test_large_models_are_given_kv_by_a_plan(outrider: Run, pair: tuple[Path, Path]) -> None:
    for folder in pair:
        shutil.copy(SHAPES / SMALL / "config.json", folder)
        write_weights(folder, 1_235_814_400)
    process = outrider("serve", *models(pair), *FREE_PORTS, "--max-model-len", "auto", "--max-num-seqs", 2)
    assert ready_line(process)
    target, draft = (flags_of(process, name) for name in ("target_worker", "draft_worker"))
    assert target["--max-model-len"] == draft["--max-model-len"]
    assert target["--kv-cache-gib"] == draft["--kv-cache-gib"]
    needed = (int(target["--max-model-len"]) + 256) * 32 / 2**20
    assert float(target["--kv-cache-gib"]) >= needed


def test_models_that_do_not_fit_together_are_refused_before_anything_starts(
    outrider: Run, pair: tuple[Path, Path]
) -> None:
    shutil.copy(SHAPES / SMALL / "config.json", pair[0])
    write_weights(pair[0], 1_235_814_400)
    shutil.copy(SHAPES / SMALL / "config.json", pair[1])
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS, "--memory-utilization", 0.05))
    assert "that 2 processes may use together (--memory-utilization 0.05)" in message
    assert "are missing for the weights" in message


def test_different_tokenizers_are_refused_with_both_fingerprints(
    outrider: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", "b", "a")
    message = refusal(outrider("serve", "--target", pair[0], "--draft", other, *FREE_PORTS))
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", message))) == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:secret@127.0.0.1:1/0", "Redis at redis://127.0.0.1:1/0 does not answer"),
        ("redis+sentinel://:secret@127.0.0.1:1/main", "redis+sentinel://127.0.0.1:1/main does not answer"),
        ("http://:secret@127.0.0.1:1/0", "not the URL of a Redis"),
    ],
)
def test_redis_that_does_not_answer_is_named_without_its_password(
    outrider: Run, pair: tuple[Path, Path], url: str, said: str
) -> None:
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS, OUTRIDER_REDIS_URL=url))
    assert said in message
    assert "secret" not in message
    assert "redis.asyncio" not in message


def test_redis_may_be_named_in_a_file(outrider: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("redis://:secret@127.0.0.1:1/0\n")
    message = refusal(outrider("serve", *models(pair), *FREE_PORTS, "--redis-url-file", path))
    assert "Redis at redis://127.0.0.1:1/0 does not answer" in message


def test_draft_and_no_draft_exclude_each_other(outrider: Run, pair: tuple[Path, Path]) -> None:
    process = outrider("serve", *models(pair), "--no-draft")
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "exclude each other" in stderr


def test_a_chat_template_is_checked_before_a_process_starts(
    outrider: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    start = ("serve", *models(pair), *FREE_PORTS, "--chat-template", path)
    assert f"--chat-template {path}: No such file or directory" in refusal(outrider(*start))
    path.write_text("{% for %}")
    assert f"--chat-template {path} is not valid: Expected an expression" in refusal(outrider(*start))


@pytest.mark.parametrize("weight", ["gold", "gold=much", "gold=0", "gold=nan", "gold=1e9"])
def test_a_tenant_s_weight_that_is_none_is_refused_before_a_process_starts(
    outrider: Run, pair: tuple[Path, Path], weight: str
) -> None:
    process = outrider("serve", *models(pair), "--tenant-weight", weight)
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "--tenant-weight" in stderr
    assert "gold" in stderr


@pytest.mark.parametrize("command", ["target-worker", "draft-worker", "coordinator"])
def test_single_process_commands_pass_their_flags_on(outrider: Run, command: str) -> None:
    flags = ("--host", "127.0.0.1", "--port", "0", "--redis-url", "redis://somewhere")
    process = outrider(command, *flags, "--model", "x y")
    assert '"event": "ready"' in ready_line(process)
    process.terminate()
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 0, "the process itself, not a parent of it, got the signal"
    assert "['--model', 'x y']" in stderr
