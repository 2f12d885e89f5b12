"""A real SGLang server with hints generates what it generates without, and takes hints of a real draft worker.

On this machine's CPUs: SGLang's scheduler, n-gram worker, memory pools and model code as published. `sglang_kernels`
stands in for its compiled kernels for speculation, and for the attention that verifies drafts. No GPU has run it.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.local.free_ports import free_ports
from tests.engines.sglang_server import WIDTH, SglangServer, needs_sglang
from tests.engines.vllm_server import Process, start_draft_worker, wait_until

pytestmark = [needs_sglang, pytest.mark.long, pytest.mark.timeout(1500)]

NUM_TOKENS = 60
PROMPTS = [
    "def quicksort(items):\n",
    "The history of the village begins",
    "import os\nimport sys\n\n",
    "Once upon a time",
    "class Node:\n    def __init__(self",
    "She looked out of the window and",
]


class Pair:
    """SGLang as it is, the same with hints, and the draft worker of the latter."""

    def __init__(self, folder: Path) -> None:
        port, hinted_port, self.draft_port = free_ports(3)
        self._folder = folder
        settings = json.dumps({"draft_workers": [f"127.0.0.1:{self.draft_port}"], "may_pause": False})
        flags = ["--speculative-algorithm", "OUTRIDER", "--speculative-num-draft-tokens", str(WIDTH)]
        self.plain = SglangServer(port, folder, "plain")
        self.hinted = SglangServer(hinted_port, folder, "hinted", *flags, OUTRIDER_HINTS=settings)
        self.draft: Process = start_draft_worker(self.draft_port, folder)

    def restart_draft(self) -> None:
        self.draft.stop()
        self.draft = start_draft_worker(self.draft_port, self._folder)

    def close(self) -> None:
        self.plain.close()
        self.hinted.close()
        self.draft.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("sglang"))
    try:
        made.plain.wait_ready()
        made.hinted.wait_ready()
        yield made
    finally:
        made.close()


def all_of(server: SglangServer, num_threads: int, **sampling: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, **sampling), PROMPTS))


def num_accepted(answer: dict[str, Any]) -> int:
    found: int = answer["meta_info"].get("spec_num_correct_drafts", 0)
    return found


@pytest.mark.parametrize("num_threads", [1, 6])
def test_texts_are_those_of_sglang_without_hints_and_hints_are_accepted(pair: Pair, num_threads: int) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    plain, hinted = all_of(pair.plain, num_threads, **sampling), all_of(pair.hinted, num_threads, **sampling)
    for own, other in zip(hinted, plain, strict=True):
        assert own["output_ids"] == other["output_ids"]
    assert sum(map(num_accepted, hinted)) > 0.2 * NUM_TOKENS * len(PROMPTS)


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": [" the"]},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"min_new_tokens": 50, "max_new_tokens": 60},
        {"custom_params": {"outrider_hints": 2}},
        {"json_schema": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_parameters_have_the_same_effect(pair: Pair, sampling: dict[str, Any]) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, **sampling}
    for own, other in zip(all_of(pair.hinted, 3, **sampling), all_of(pair.plain, 3, **sampling), strict=True):
        assert own["output_ids"] == other["output_ids"]
        assert own["meta_info"]["finish_reason"]["type"] == other["meta_info"]["finish_reason"]["type"]


def test_one_that_wants_no_hints_gets_none(pair: Pair) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    switched_off = pair.hinted.generate(PROMPTS[0], custom_params={"outrider_hints": 0}, **sampling)
    assert num_accepted(switched_off) <= 2, "padding is right by chance alone"
    assert switched_off["output_ids"] == pair.plain.generate(PROMPTS[0], **sampling)["output_ids"]


def test_streams_that_end_in_the_middle_leave_the_others_as_they_are(pair: Pair) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    expected = [each["output_ids"] for each in all_of(pair.plain, 1, **sampling)]

    def stream(index: int) -> list[int]:
        body = {"text": PROMPTS[index], "sampling_params": sampling, "stream": True}
        found: list[int] = []
        with pair.hinted.client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line[6:])["output_ids"]
                if index % 2 and len(found) > 10:
                    break
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(stream, range(len(PROMPTS))))
    for index, own in enumerate(found):
        assert own == expected[index][: len(own) if index % 2 else None]


def test_a_draft_worker_that_is_frozen_and_restarted_costs_nothing_but_speed(pair: Pair) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = [each["output_ids"] for each in all_of(pair.plain, 1, **sampling)]
    answers: list[tuple[int, dict[str, Any]]] = []
    is_over = threading.Event()

    def ask(index: int) -> None:
        while not is_over.is_set():
            answers.append((index, pair.hinted.generate(PROMPTS[index], **sampling)))

    def are_accepted() -> bool:
        return any(num_accepted(each) > 0.1 * NUM_TOKENS for _, each in answers[seen:])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        seen = 0
        wait_until(are_accepted, "hints are accepted", 300.0)
        pair.draft.process.send_signal(signal.SIGSTOP)
        until = len(answers) + 6
        wait_until(lambda: len(answers) >= until, "requests end without it", 300.0)
        pair.restart_draft()
        seen = len(answers)
        wait_until(are_accepted, "hints are back without a restart of the engine", 300.0)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    for index, each in answers:
        assert each["output_ids"] == expected[index]


def test_a_prompt_in_chunks_is_served(pair: Pair) -> None:
    prompt = " ".join(PROMPTS * 6)
    sampling = {"max_new_tokens": 40, "ignore_eos": True}
    expected = pair.plain.generate(prompt, **sampling)["output_ids"]
    assert pair.hinted.generate(prompt, **sampling)["output_ids"] == expected


def test_what_does_not_go_with_hints_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    flags = ["--speculative-algorithm", "OUTRIDER", "--speculative-eagle-topk", "4"]
    server = SglangServer(port, tmp_path, "refused", *flags, OUTRIDER_HINTS='{"draft_workers": ["127.0.0.1:1"]}')
    try:
        assert server.process.process.wait(300.0) != 0
        assert "--speculative-eagle-topk 4 does not go with --speculative-algorithm OUTRIDER" in server.process.tail()
    finally:
        server.close()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0)
