"""`outrider serve --engine vllm`: clients, coordinator, draft worker and two targets that vLLM runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.system import System, eventually, running_system, text_of
from tests.engines.vllm_server import PYTHON, ROOT, START_S, TARGET, VllmServer, needs_vllm, running, wait_ready

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1800)]

NUM_TOKENS = 100
HELD_OUT = (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[start : start + 160] for start in range(0, 8 * 60, 60)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
ALWAYS = {"enabled": True, "always": True}
OFF = {"enabled": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM by itself."""
    with running(tmp_path_factory.mktemp("plain"), "plain", "--kv-cache-memory-bytes", str(1 << 27)) as server:
        yield server


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, plain: VllmServer) -> Iterator[System]:
    """Two targets, each on half of the machine at most, beside the plain vLLM that they are compared with."""
    flags = [
        *("--engine", "vllm", "--engine-python", PYTHON, "--target", TARGET, "--num-target-workers", 2),
        *("--dtype", "float32", "--max-num-seqs", 8, "--max-model-len", 1024, "--hosting", "plain"),
        *("--vllm-args", "--enforce-eager --kv-cache-memory-bytes 134217728"),
    ]
    folder = tmp_path_factory.mktemp("target") / "system"
    with running_system(folder, *flags, timeout_s=2 * START_S) as made:
        wait_ready(plain)
        yield made


def tokens(answer: dict[str, Any]) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def speculation(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
    return found


def ask(system: System, prompt: str, **parameters: Any) -> dict[str, Any]:
    return system.complete(prompt, return_token_ids=True, **{"max_tokens": NUM_TOKENS} | parameters)


def test_texts_are_plain_vllms_and_hints_are_accepted(plain: VllmServer, system: System) -> None:
    right = [plain.tokens(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(system, prompt, speculation=ALWAYS), PROMPTS))
    assert [tokens(answer) for answer in answers] == right
    assert sum(speculation(answer)["num_accepted_draft_tokens"] for answer in answers) > 0
    assert {answer["metrics"]["exactness"] for answer in answers} == {"distribution"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"min_tokens": 40, "stop": ["the"]},
        {"stop": ["(self", "return"]},
        {"stop_token_ids": [13], "max_tokens": 60},
    ],
)
def test_parameters_mean_the_same(plain: VllmServer, system: System, parameters: dict[str, Any]) -> None:
    prompt, asked = PROMPTS[1], {"max_tokens": 60} | parameters
    theirs = plain.completion(prompt, **asked)["choices"][0]
    ours = ask(system, prompt, speculation=ALWAYS, **asked)["choices"][0]
    assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])


def test_a_json_schema_is_followed(system: System) -> None:
    for setting in (ALWAYS, OFF):
        text = system.text(PROMPTS[0], max_tokens=80, structured_outputs={"json": SCHEMA}, speculation=setting)
        found = json.loads(text)
        assert set(found) == {"name", "count"}
        assert json.dumps(found) == text, "no whitespace but after commas and colons"


def test_log_probabilities_are_vllms(plain: VllmServer, system: System) -> None:
    asked = {"max_tokens": 12, "logprobs": 2}
    theirs = plain.completion(PROMPTS[2], **asked)["choices"][0]["logprobs"]
    ours = ask(system, PROMPTS[2], speculation=ALWAYS, **asked)["choices"][0]["logprobs"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-3)
    echoed = ask(system, PROMPTS[2], max_tokens=1, logprobs=1, echo=True)["choices"][0]["logprobs"]
    assert len([each for each in echoed["token_logprobs"] if each is not None]) > 20


def test_sampled_requests_are_served_and_say_what_holds(system: System) -> None:
    answers = [ask(system, PROMPTS[0], temperature=1.0, seed=seed) for seed in (1, 2)]
    assert tokens(answers[0]) != tokens(answers[1])
    assert {answer["metrics"]["decoding_mode"] for answer in answers} == {"rejection"}


@pytest.mark.parametrize(("name", "value"), [("min_p", 0.1), ("typical_p", 0.5), ("logit_bias", {"5": 1.0})])
def test_what_vllm_lacks_is_refused_by_name(system: System, name: str, value: Any) -> None:
    refused = system.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 1.0, name: value})
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert name in message
    assert "vLLM" in message


def test_an_audit_measures_what_vllm_does_not_promise(system: System) -> None:
    prompts = [word for prompt in PROMPTS[:3] for word in ("--prompt", prompt)]
    report = system.audit("--require-speculation", "--max-tokens", 40, *prompts)
    assert report["has_speculated"]
    assert report["verdict"] in ("identical", "inexact")


def test_vllms_own_metrics_are_beside_ours(system: System) -> None:
    ask(system, PROMPTS[0], max_tokens=4)
    for name in ("vllm:generation_tokens_total", "outrider_generation_tokens_total"):
        assert sum(system.metric(f"target-{index}", name) for index in range(2)) > 0


def test_a_stream_that_is_left_is_aborted(system: System) -> None:
    with system.stream("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 900, "ignore_eos": True}) as events:
        next(events)
    eventually(lambda: num_running(system), lambda seen: seen == 0, "both engines are idle")


def num_running(system: System) -> float:
    return sum(system.metric(f"target-{index}", "outrider_num_requests_running") for index in range(2))


def streamed(system: System, prompt: str, num_tokens: int) -> tuple[str, dict[str, Any]]:
    """A long greedy stream: its text, and its last event's metrics."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    with system.stream("/v1/completions", body) as events:
        seen = list(events)
    return text_of(seen), seen[-1]


def test_a_target_that_is_killed_costs_no_token(system: System) -> None:
    """SIGKILL for one of two targets while eight streams run. Its engine ends with it, and it comes back."""
    right = {prompt: streamed(system, prompt, 200)[0] for prompt in PROMPTS}
    before = system.ready_lines("target-0")
    victim = before[-1]["pid"]
    engines = children(victim)
    assert engines

    def kill() -> None:
        time.sleep(1.0)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: streamed(system, prompt, 200)[0], PROMPTS))
    killer.join()
    assert dict(zip(PROMPTS, texts, strict=True)) == right
    eventually(lambda: [pid for pid in engines if is_alive(pid)], lambda left: not left, "its engine ends with it")
    eventually(
        lambda: len(system.ready_lines("target-0")), lambda seen: seen == len(before) + 1, "it comes back", START_S
    )


def test_an_engine_that_is_killed_ends_its_worker_with_a_line(system: System) -> None:
    before = system.ready_lines("target-1")
    (engine,) = [pid for pid in children(before[-1]["pid"]) if "EngineCore" in command_of(pid)]
    os.kill(engine, signal.SIGKILL)
    log = system.log_dir / "target-1.log"
    eventually(log.read_text, lambda text: "vLLM's engine process has ended" in text, "the worker says why", 60.0)
    eventually(
        lambda: len(system.ready_lines("target-1")), lambda seen: seen == len(before) + 1, "it comes back", START_S
    )
    assert system.text(PROMPTS[0], max_tokens=8)


def test_a_target_that_drains_finishes_what_runs(system: System) -> None:
    """SIGTERM in the middle of streams: they go on, here or at the other target, and none loses a token."""
    right = {prompt: streamed(system, prompt, 200)[0] for prompt in PROMPTS[:4]}
    before = system.ready_lines("target-0")

    def stop() -> None:
        time.sleep(0.5)
        os.kill(before[-1]["pid"], signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda prompt: streamed(system, prompt, 200)[0], PROMPTS[:4]))
    stopper.join()
    assert dict(zip(PROMPTS[:4], texts, strict=True)) == right


def children(pid: int) -> list[int]:
    """All processes below one."""
    found, frontier = list[int](), [pid]
    while frontier:
        tasks = Path(f"/proc/{frontier.pop()}/task")
        below = [int(each) for task in tasks.glob("*/children") for each in task.read_text().split()]
        found += below
        frontier += below
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_python_without_vllm_is_named_at_once(tmp_path: Path) -> None:
    from tests.e2e.system import Command

    command = Command.start(tmp_path / "c", "serve", "--engine", "vllm", "--hosting", "plain")
    assert command.process.wait(60.0) == 1
    assert "--engine-python" in command.stderr
