"""A real vLLM server with hints of a real draft worker generates what the same vLLM generates without."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.local.free_ports import free_ports
from protos.outrider.v1 import hints_pb2, hints_pb2_grpc
from tests.engines.vllm_server import (
    ROOT,
    Process,
    VllmServer,
    hint_flags,
    needs_vllm,
    running,
    start_draft_worker,
    wait_ready,
    wait_until,
)

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1500)]

NUM_TOKENS = 120
HELD_OUT = (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[start : start + 160] for start in range(0, 8 * 60, 60)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class Pair:
    """vLLM as it is, the same with hints, and the draft worker of the latter."""

    def __init__(self, plain: VllmServer, hinted: VllmServer, draft_port: int, folder: Path) -> None:
        self.plain, self.hinted, self.draft_port, self._folder = plain, hinted, draft_port, folder
        self.draft: Process = start_draft_worker(draft_port, folder)

    def restart_draft(self) -> None:
        self.draft.stop()
        self.draft = start_draft_worker(self.draft_port, self._folder)

    def both(self, prompts: list[str], num_threads: int, **parameters: Any) -> list[tuple[Any, Any]]:
        """Choices of both servers for each prompt, so many requests at once."""

        def choices(server: VllmServer) -> list[Any]:
            with ThreadPoolExecutor(num_threads) as pool:
                return list(pool.map(lambda prompt: server.completion(prompt, **parameters)["choices"][0], prompts))

        return list(zip(choices(self.plain), choices(self.hinted), strict=True))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    draft_port, hints_port = free_ports(2)
    # Paused hints would show nothing: on a busy machine they may not pay.
    flags = hint_flags([draft_port], hints_port, may_pause=False)
    with (
        running(folder, "plain", cores="0") as plain,
        running(folder, "hinted", *flags, cores="1", hints_port=hints_port) as hinted,
    ):
        made = Pair(plain, hinted, draft_port, folder)
        try:
            wait_ready(plain)
            wait_ready(hinted)
            yield made
        finally:
            made.draft.stop()


@pytest.mark.parametrize("num_threads", [1, 8])
def test_texts_are_those_of_vllm_without_hints_and_hints_are_accepted(pair: Pair, num_threads: int) -> None:
    before = pair.hinted.num_accepted
    for plain, hinted in pair.both(PROMPTS, num_threads, max_tokens=NUM_TOKENS, ignore_eos=True):
        assert hinted["token_ids"] == plain["token_ids"]
    num_accepted = pair.hinted.num_accepted - before
    assert num_accepted > 0.05 * NUM_TOKENS * len(PROMPTS)
    assert pair.plain.metric("vllm:spec_decode_num_accepted_tokens_total") == 0.0


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop": [" the"], "max_tokens": NUM_TOKENS},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": NUM_TOKENS, "logprobs": 3},
        {"max_tokens": NUM_TOKENS, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"max_tokens": 60, "min_tokens": 50},
        {"max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
        {"max_tokens": 60, "vllm_xargs": {"outrider_hints": 0}},
        {"max_tokens": 60, "vllm_xargs": {"outrider_hints": 2}},
        {"max_tokens": 1024, "truncate_prompt_tokens": 1},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_parameters_have_the_same_effect(pair: Pair, parameters: dict[str, Any]) -> None:
    prompts = PROMPTS[: 4 if parameters["max_tokens"] <= NUM_TOKENS else 1]
    for plain, hinted in pair.both(prompts, 4, **parameters):
        for key in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert hinted[key] == plain[key], key
        if "structured_outputs" in parameters and hinted["finish_reason"] == "stop":
            assert set(json.loads(hinted["text"])) == {"name", "count"}
        if "logprobs" in parameters:
            assert hinted["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-3)


def test_one_that_wants_no_hints_gets_none(pair: Pair) -> None:
    before = pair.hinted.metric("vllm:spec_decode_num_draft_tokens_total")
    pair.hinted.tokens(PROMPTS[0], max_tokens=40, vllm_xargs={"outrider_hints": 0})
    assert pair.hinted.metric("vllm:spec_decode_num_draft_tokens_total") == before


def test_streams_that_end_in_the_middle_leave_the_others_as_they_are(pair: Pair) -> None:
    expected = [pair.plain.tokens(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]

    def stream(index: int) -> list[int]:
        body = {
            "model": "m", "prompt": PROMPTS[index], "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        found: list[int] = []
        with httpx.stream("POST", f"{pair.hinted.url}/v1/completions", json=body, timeout=300.0) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if index % 2 and len(found) > 20:
                    break
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(stream, range(len(PROMPTS))))
    for index, own in enumerate(found):
        assert own == expected[index][: len(own) if index % 2 else None]
    wait_until(lambda: pair.hinted.metric("vllm:num_requests_running") == 0, "the aborted ones have ended")


def test_a_draft_worker_that_is_killed_frozen_and_restarted_costs_nothing_but_speed(pair: Pair) -> None:
    expected = [pair.plain.tokens(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    found: list[tuple[int, list[int]]] = []
    is_over = threading.Event()

    def ask(index: int) -> None:
        while not is_over.is_set():
            found.append((index, pair.hinted.tokens(PROMPTS[index], max_tokens=NUM_TOKENS, ignore_eos=True)))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    try:
        before = pair.hinted.num_accepted
        wait_until(lambda: pair.hinted.num_accepted > before, "hints are accepted")
        pair.draft.process.send_signal(signal.SIGSTOP)
        until = len(found) + 4
        wait_until(lambda: len(found) >= until, "requests end without it", 300.0)
        pair.restart_draft()
        before = pair.hinted.num_accepted
        wait_until(lambda: pair.hinted.num_accepted > before, "hints are back without a restart of the engine", 300.0)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert found
    for index, own in found:
        assert own == expected[index]


def test_sampled_requests_are_served(pair: Pair) -> None:
    """Greedy ones in the same steps say what they say alone."""
    ways = [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9}]
    with ThreadPoolExecutor(6) as pool:
        sampled = [pool.submit(pair.hinted.tokens, PROMPTS[0], max_tokens=60, **way) for way in ways]
        greedy = [pool.submit(pair.hinted.tokens, prompt, max_tokens=60) for prompt in PROMPTS[:3]]
        assert all(each.result() for each in sampled)
        assert [each.result() for each in greedy] == [pair.plain.tokens(each, max_tokens=60) for each in PROMPTS[:3]]


def test_a_flood_loses_its_stream_and_nothing_else(pair: Pair) -> None:
    """A stranger that sends rubbish, and frames that are too large."""
    expected = pair.plain.tokens(PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True)
    codes = []

    def flood() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{pair.hinted.hints_port}") as channel:
            frame = hints_pb2.HintFrame(ping=1)
            frame.subscribe.add(session_id="nobody", channel=1, attachment=1)
            for _ in range(40000):
                frame.nodes.add(channel=1, base_len=5, parent_ids=[0], token_ids=[1])
            try:
                for _ in hints_pb2_grpc.HintsStub(channel).Exchange(iter([frame] * 10), timeout=60.0):
                    pass
            except grpc.RpcError as error:
                codes.append(error.code())

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert pair.hinted.tokens(PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True) == expected
    for thread in threads:
        thread.join()
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 3
