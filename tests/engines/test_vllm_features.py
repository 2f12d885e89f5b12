"""vLLM on a machine that is too small, with all that it does beside decoding: texts are those of vLLM without hints.

Both servers have room for the KV of few requests, and prefill in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.local.free_ports import free_ports
from tests.engines.small_adapter import write_small_adapter
from tests.engines.vllm_server import (
    ROOT,
    VllmServer,
    hint_flags,
    needs_vllm,
    running,
    start_draft_worker,
    wait_ready,
    wait_until,
)

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(1800)]

NUM_TOKENS = 100
MAX_LEN = 400
HELD_OUT = 5 * (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[start : start + 300] for start in range(0, 12 * 45, 45)]
FLAGS = (
    *("--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", str(MAX_LEN)),
    *("--enable-chunked-prefill", "--max-num-batched-tokens", "64", "--enable-prefix-caching"),
    *("--max-num-seqs", "8"),  # with LoRA vLLM wants room for all their hints in a step of 64 tokens
)
Pair = tuple[VllmServer, VllmServer]


@contextmanager
def servers(folder: Path, *flags: str) -> Iterator[Pair]:
    """vLLM without hints, and with, once its first hints were accepted."""
    draft_port, hints_port = free_ports(2)
    hints = hint_flags([draft_port], hints_port, may_pause=False)
    with (
        running(folder, "plain", *FLAGS, *flags, cores="0") as plain,
        running(folder, "hinted", *hints, *FLAGS, *flags, cores="1", hints_port=hints_port) as hinted,
    ):
        draft = start_draft_worker(draft_port, folder)
        try:
            wait_ready(plain)
            wait_ready(hinted)
            wait_until(lambda: bool(hinted.tokens("x", max_tokens=50)) and hinted.num_accepted > 0, "hints come")
            yield plain, hinted
        finally:
            draft.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with servers(tmp_path_factory.mktemp("vllm")) as started:
        yield started


def choices(server: VllmServer, prompts: list[Any], num_threads: int = 12, **parameters: Any) -> list[list[Any]]:
    """The choices for each prompt, so many requests at once."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda prompt: server.completion(prompt, **parameters)["choices"], prompts))


def both(pair: Pair, prompts: list[Any], **parameters: Any) -> tuple[list[list[Any]], list[list[Any]]]:
    plain, hinted = (choices(server, prompts, **parameters) for server in pair)
    for ours, theirs in zip(hinted, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for key in ("token_ids", "text", "finish_reason", "stop_reason", "index"):
                assert one[key] == other[key], key
    return plain, hinted


def test_preempted_requests_and_cached_prefixes(pair: Pair) -> None:
    """The requests of a step want more room than there is; the prompts are cached afterwards."""
    hinted = pair[1]
    accepted = hinted.num_accepted
    for _ in range(2):
        both(pair, PROMPTS, max_tokens=NUM_TOKENS, ignore_eos=True)
    both(pair, 2 * PROMPTS[:1], max_tokens=NUM_TOKENS, ignore_eos=True)
    assert hinted.metric("vllm:num_preemptions_total") > 0
    assert hinted.metric("vllm:prefix_cache_hits_total") > 0
    assert hinted.num_accepted > accepted


@pytest.mark.parametrize(
    "parameters",
    [
        {"echo": True, "logprobs": 1},
        {"frequency_penalty": 0.7, "presence_penalty": -0.5},
        {"bad_words": ["the", "return"]},
        {"allowed_token_ids": list(range(100, 1400))},
        {"stop_token_ids": list(range(200, 260))},
        {"stop": ["\n"], "include_stop_str_in_output": True},
        {"structured_outputs": {"choice": ["one of these", "or the other one"]}},
        {"structured_outputs": {"regex": "[a-z]{3,30}\\."}},
        {"min_tokens": 30, "stop": ["e"]},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_parameters_have_the_same_effect(pair: Pair, parameters: dict[str, Any]) -> None:
    plain, hinted = both(pair, PROMPTS[:4], max_tokens=60, **parameters)
    if "logprobs" in parameters:
        for ours, theirs in zip(hinted, plain, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                pairs = zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
                assert all(a == b if b is None else a == pytest.approx(b, abs=1e-3) for a, b in pairs)


def test_log_probabilities_of_the_prompt(pair: Pair) -> None:
    plain, hinted = both(pair, PROMPTS[:4], max_tokens=20, prompt_logprobs=1)
    for ours, theirs in zip(hinted, plain, strict=True):
        own, other = ours[0]["prompt_logprobs"], theirs[0]["prompt_logprobs"]
        assert len(own) == len(other) > 20
        for one, two in zip(own[1:], other[1:], strict=True):
            assert {key: each["logprob"] for key, each in one.items()} == pytest.approx(
                {key: each["logprob"] for key, each in two.items()}, abs=1e-3
            )


@pytest.mark.parametrize("parameters", [{}, {"logprobs": 2}], ids=["", "logprobs"])
def test_several_choices_are_sampled_apart(pair: Pair, parameters: dict[str, Any]) -> None:
    """vLLM refuses several greedy ones."""
    for server in pair:
        found = choices(server, PROMPTS[:4], n=3, temperature=1.0, max_tokens=60, ignore_eos=True, **parameters)
        for each in found:
            assert [one["index"] for one in each] == [0, 1, 2]
            assert all(len(one["token_ids"]) == 60 for one in each)
            assert len({tuple(one["token_ids"]) for one in each}) > 1
            assert all(len(one["logprobs"]["token_logprobs"]) == 60 for one in each if parameters)


def test_the_longest_text_ends_where_it_ends_without_hints(pair: Pair) -> None:
    plain, _ = both(pair, [PROMPTS[0], HELD_OUT[:900]], max_tokens=MAX_LEN, truncate_prompt_tokens=250, ignore_eos=True)
    assert all(len(each[0]["token_ids"]) == MAX_LEN - 250 or each[0]["finish_reason"] == "length" for each in plain)


def test_what_vllm_refuses_with_speculation_is_refused_and_harms_nobody(pair: Pair) -> None:
    hinted = pair[1]
    for extra in ({"logit_bias": {"5": 10.0}}, {"min_p": 0.1, "temperature": 1.0}):
        body = {"model": "m", "prompt": "x", "max_tokens": 5, **extra}
        assert hinted.client.post("/v1/completions", json=body).status_code == 400
    both(pair, PROMPTS[:1], max_tokens=20)


def test_sampled_requests_have_hints(pair: Pair) -> None:
    """Their distribution is that of `test_vllm_distribution`; greedy ones beside them say what they say alone."""
    plain, hinted = pair
    before = hinted.num_accepted
    ways: list[dict[str, float]] = [{}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3}]
    with ThreadPoolExecutor(12) as pool:
        sampled = [
            pool.submit(hinted.tokens, prompt, max_tokens=60, ignore_eos=True, **{"temperature": 1.0, **way})
            for way in ways
            for prompt in PROMPTS[:2]
        ]
        assert all(len(each.result()) == 60 for each in sampled)
    assert hinted.num_accepted > before
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(hinted.tokens, PROMPTS[4], max_tokens=60, temperature=1.0, top_k=5) for _ in range(4)]
        greedy = [pool.submit(hinted.tokens, prompt, max_tokens=60) for prompt in PROMPTS[:3]]
        assert [each.result() for each in greedy] == [plain.tokens(each, max_tokens=60) for each in PROMPTS[:3]]
        assert all(each.result() for each in beside)
    wait_until(lambda: hinted.metric("vllm:num_requests_running") == 0, "all have ended")


def test_top_k_alone_in_a_step_without_hints(pair: Pair) -> None:
    """vLLM's own fault would end the engine here."""
    hinted = pair[1]
    assert hinted.tokens(PROMPTS[0], max_tokens=8, temperature=1.0, top_k=5, vllm_xargs={"outrider_hints": 0})


def test_an_adapter_has_its_own_texts_and_hints(tmp_path: Path) -> None:
    """One after the other, and in steps with requests of the model itself."""
    write_small_adapter(tmp_path / "adapter")
    modules = ("--lora-modules", f"adapter={tmp_path / 'adapter'}")
    with servers(tmp_path, "--enable-lora", "--max-lora-rank", "8", *modules) as (plain, hinted):
        before = hinted.num_accepted

        def mixed(server: VllmServer, num_threads: int) -> list[list[int]]:
            def tokens(index: int) -> list[int]:
                model = "adapter" if index % 2 else "m"
                return server.tokens(PROMPTS[index // 2], model=model, max_tokens=NUM_TOKENS, ignore_eos=True)

            with ThreadPoolExecutor(num_threads) as pool:
                return list(pool.map(tokens, range(12)))

        expected = mixed(plain, 1)
        assert mixed(hinted, 1) == expected
        assert any(expected[index] != expected[index + 1] for index in range(0, 12, 2)), "the adapter changes texts"
        # Texts of the model itself, in steps with the adapter's, differ in vLLM without hints, too.
        assert mixed(plain, 8)[1::2] == mixed(hinted, 8)[1::2] == expected[1::2]
        assert hinted.num_accepted > before
