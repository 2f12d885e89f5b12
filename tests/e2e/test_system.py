"""Everything at once: `outrider serve`, real Ray, Redis and workers, the demo pair, through the public API.

The tests of one running system come first and leave it idle; the last of them stops it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from command_line.checkout import DEMO_TARGET
from demo.corpus import held_out_prompts
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.system import FREE_PORTS, Command, System, eventually, needs_the_pair, running_system, text_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs_the_pair,
]

PROMPT = "def read_file(path):\n"
LONG: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 900,
    "ignore_eos": True,
}  # seconds of work for the target
# Of prompts: on a busy machine much of a short text is over before the first hint, and another round shows more.
ROUNDS_MAX = 4
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PEERS_STATISTICS = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram",
    "acceptance_histogram_by_draft_length", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens",
    "num_spec_tokens",
}  # fmt: skip
PEERS_TIMES = {
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="one process"),
        pytest.param(("--tensor-parallel-size", 2), id="two ranks", marks=pytest.mark.long),
        pytest.param(("--hosting", "plain"), id="no Ray", marks=pytest.mark.long),
    ],
)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("system") / "cache", *request.param) as running:
        # It asks for some texts itself, which are counted like any.
        eventually(lambda: running.command.stderr, lambda said: "in a short probe" in said, "the probe", 60)
        yield running


@pytest.fixture(scope="module")
def stub(system: System) -> Iterator[generation_pb2_grpc.GenerationStub]:
    with grpc.insecure_channel(system.grpc) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def grpc_request(**fields: Any) -> generation_pb2.GenerationRequest:
    """A greedy request for 40 tokens; `fields` of the sampling parameters go where they belong."""
    known = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    sampling: dict[str, Any] = {"temperature": 0, "top_p": 1, "max_tokens": 40}
    sampling |= {name: fields.pop(name) for name in known & fields.keys()}
    return generation_pb2.GenerationRequest(sampling=common_pb2.SamplingParams(**sampling), **fields)


def num_accepted(answer: dict[str, Any]) -> int:
    statistics = answer["metrics"]["speculative_decoding"]
    # A prompt that was asked before is answered by lookup more than by the draft worker.
    return int(statistics["num_accepted_draft_tokens"]) + int(statistics["num_lookup_tokens"] or 0)


def counts_of(usage: dict[str, Any]) -> dict[str, int]:
    """The numbers of tokens of a request, without how many of its prompt's tokens were cached."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


COUNTERS = {  # what a request is told of itself, and the counters that it is counted in at the target
    "num_spec_steps": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "num_stale_hints": "stale_hints",
    "num_late_hints": "late_hints",
    "num_forced_tokens": "grammar_forced_tokens",
    "num_lookup_tokens": "lookup_accepted_tokens",
}
OF_COORDINATOR = (
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
)  # which it counts as well


# What it says.


def test_statistics_of_requests_sum_to_the_counters(system: System) -> None:
    """The requests are greedy, seeded, sampled and structured, with and without speculation; some of them end by a
    stop."""
    system.expect_idle()

    def look() -> dict[str, float]:
        seen = {f"target {name}": system.metric("target-0", f"outrider_{name}_total") for name in COUNTERS.values()}
        for name in ("prompt_tokens", "generation_tokens"):
            seen[f"target {name}"] = system.metric("target-0", f"outrider_{name}_total")
            seen[f"coordinator {name}"] = system.own_metric(f"outrider_{name}_total")
        for name in OF_COORDINATOR:
            seen[f"coordinator {COUNTERS[name]}"] = system.own_metric(f"outrider_{COUNTERS[name]}_total")
        return seen

    before = look()
    told: Counter[str] = Counter()
    kinds: list[dict[str, Any]] = [
        {"speculation": {"always": True}},
        {"speculation": {"enabled": False}},
        {"temperature": 1, "seed": 7},
        {"temperature": 1},
        {"logit_bias": {"50": 100}, "stop_token_ids": [50]},  # generated, counted, and not part of the output
        {"structured_outputs": {"regex": "(alpha|beta|gamma){3,9} and nothing else"}, "max_tokens": 60},
        {"prompt": "one two three four five six seven eight " * 4, "speculation": {"always": True}},
    ]
    num_drafted = "target spec_decode_num_draft_tokens"
    for number, prompt in enumerate(held_out_prompts(12 * ROUNDS_MAX)):
        if number >= 12 and told[num_drafted] > 50:
            break
        parameters = kinds[number % len(kinds)]
        answer = system.complete(**{"prompt": prompt, "max_tokens": 50, **parameters})
        statistics = answer["metrics"]["speculative_decoding"]
        for name, counter in COUNTERS.items():
            told[f"target {counter}"] += statistics[name]
        for name in OF_COORDINATOR:
            told[f"coordinator {COUNTERS[name]}"] += statistics[name]
        for who in ("target", "coordinator"):
            told[f"{who} prompt_tokens"] += answer["usage"]["prompt_tokens"]
            told[f"{who} generation_tokens"] += answer["usage"]["completion_tokens"]
    assert told[num_drafted] > 50
    assert told["target grammar_forced_tokens"] > 0
    eventually(
        lambda: {name: value - before[name] for name, value in look().items()},
        lambda seen: seen == told,
        f"the counters to have risen by {dict(told)}",
        timeout_s=5,
    )


def test_greedy_text_is_the_same_with_speculation_streamed_and_over_grpc(
    system: System, stub: generation_pb2_grpc.GenerationStub
) -> None:
    accepted = 0
    for number, prompt in enumerate(held_out_prompts(10 * ROUNDS_MAX)):
        if number >= 10 and accepted > 60:
            break
        plain = system.complete(prompt, max_tokens=60, speculation={"enabled": False})
        assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        text = plain["choices"][0]["text"]
        # Always: the worker may find at any time that it does not pay on a busy machine.
        hinted = system.complete(prompt, max_tokens=60, speculation={"always": True})
        assert hinted["choices"][0]["text"] == text
        with system.stream(COMPLETIONS, {"prompt": prompt, "max_tokens": 60}) as events:
            assert text_of(list(events)) == text
        chunks = list(stub.Generate(grpc_request(prompt=prompt, max_tokens=60), timeout=60))
        assert "".join(chunk.text for chunk in chunks) == text
        assert counts_of(hinted["usage"]) == counts_of(plain["usage"])
        assert hinted["usage"]["completion_tokens"] == chunks[-1].finished.num_output_tokens
        accepted += num_accepted(hinted) + chunks[-1].finished.stats.num_accepted_draft_tokens
    assert accepted > 60, "hints were hardly used, so this shows nothing"


def test_an_audit_of_recorded_requests_finds_no_divergence(system: System) -> None:
    """Every kind of parameter at once: penalties, biases, stop strings, grammars, tools; greedy and seeded."""
    recorded = Path(__file__).parent / "recorded.jsonl"
    report = system.audit("--requests", recorded, "--repeat", 2, "--concurrency", 4, "--require-speculation")
    assert {audit["verdict"] for audit in report["requests"]} == {"identical"}
    assert len(report["requests"]) == len(recorded.read_text().splitlines())


def test_several_texts_are_those_of_their_seeds_and_leave_their_prompt_behind(system: System) -> None:
    prompt = held_out_prompts(11)[-1]
    sampling = {"temperature": 0.9, "max_tokens": 20}
    answer = system.complete(prompt, **sampling, n=3, seed=100)
    apart = [system.text(prompt, **sampling, seed=100 + index) for index in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == apart
    again = system.complete(prompt, **sampling, seed=100)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_a_prompt_that_is_asked_again_gets_the_same_text_and_hints_that_are_worth_as_much(
    system: System,
) -> None:
    """Both workers find it in their prefix cache; hints go on as if neither had."""
    prompts = held_out_prompts(6 * ROUNDS_MAX, seed=23, chars_min=1500, chars_max=1500)
    asked = {"max_tokens": 80, "ignore_eos": True, "speculation": {"always": True, "detail": True}}
    hits = system.metric("draft-0", "outrider_draft_prefix_cache_hits_total")
    accepted, verified = [0, 0], [0, 0]
    num_cached = 0
    for number, prompt in enumerate(prompts):
        if number >= 6 and min(verified) > 100:
            break
        texts, num_hints = [], []
        for turn in range(2):
            answer = system.complete(prompt, **asked)
            texts.append(answer["choices"][0]["text"])
            statistics = answer["metrics"]["speculative_decoding"]
            accepted[turn] += statistics["num_accepted_draft_tokens"]
            verified[turn] += statistics["num_draft_tokens"]
            num_hints.append(statistics["num_draft_tokens"])
        assert texts[0] == texts[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        if all(num_hints):  # otherwise the draft may not have read it before the text was over
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert system.metric("draft-0", "outrider_draft_prefix_cache_hits_total") - hits >= num_cached
    assert min(verified) > 100, "hints were hardly used, so this shows nothing"
    first, again = (held / tried for held, tried in zip(accepted, verified, strict=True))
    # Which hints are there in time differs from run to run; what a draft that lacks its prompt says hardly ever holds.
    assert again > 0.6 * first
    system.expect_idle()
    for worker in ("target-0", "draft-0"):
        assert system.metric(worker, "outrider_kv_cache_integrity_failures_total") == 0


def test_arguments_of_a_tool_are_valid_and_come_faster_where_they_are_forced(system: System) -> None:
    schema = {
        "type": "object",
        "properties": {"a_rather_long_name_of_a_property": {"type": "boolean"}},
        "required": ["a_rather_long_name_of_a_property"],
        "additionalProperties": False,
    }
    answer = system.chat(
        [{"role": "user", "content": "Is it so?"}],
        tools=[{"type": "function", "function": {"name": "decide", "parameters": schema}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert isinstance(arguments["a_rather_long_name_of_a_property"], bool)
    statistics = answer["metrics"]["speculative_decoding"]
    assert statistics["num_forced_tokens"] > 5
    assert statistics["num_steps"] < answer["usage"]["completion_tokens"] - 5


def test_a_seed_repeats_its_text_whatever_speculation_does(
    system: System, stub: generation_pb2_grpc.GenerationStub
) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 40}
    text = system.text(PROMPT, **sampling)
    assert system.text(PROMPT, **sampling) == text
    assert system.text(PROMPT, **sampling, speculation={"enabled": False}) == text
    assert system.text(PROMPT, **sampling, speculation={"num_speculative_tokens": 2}) == text
    chunks = stub.Generate(grpc_request(prompt=PROMPT, **sampling), timeout=60)
    assert "".join(chunk.text for chunk in chunks) == text
    others = {system.text(PROMPT, **(sampling | {"seed": seed})) for seed in (8, 9, 10)}
    assert others != {text}, "the seed has no influence"


def test_a_conversation_is_answered_streamed_or_not(system: System) -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Functions that read files."},
            {"role": "user", "content": "Return the lines of a file."},
        ],
        "max_tokens": 40,
        "temperature": 0,
    }
    answer = system.post(CHAT, body).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("length", "stop")
    with system.stream(CHAT, body) as stream:
        events = list(stream)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(events) == choice["message"]["content"] != ""
    assert counts_of(events[-1]["usage"]) == counts_of(answer["usage"])


def with_hints(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """An answer in which hints held: on a busy machine the workers rightly do without them for a while."""

    def num_accepted(answer: dict[str, Any]) -> int:
        return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])

    return eventually(ask, lambda answer: num_accepted(answer) > 0, "an answer with accepted hints", timeout_s=90)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_usage_and_statistics_have_the_names_that_load_tools_read(system: System, is_streamed: bool) -> None:
    asked = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "speculation": {"detail": True}}
    body: dict[str, Any] = {"prompt": held_out_prompts(13)[-1 - is_streamed], **asked}

    def last_event() -> dict[str, Any]:
        with system.stream(COMPLETIONS, body) as stream:
            events = list(stream)
        assert not any(event["usage"] for event in events[:-1])
        return events[-1]

    answer = with_hints(last_event if is_streamed else lambda: system.complete(**body))
    usage, metrics = answer["usage"], answer["metrics"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 300
    assert metrics.keys() >= PEERS_TIMES
    statistics = metrics["speculative_decoding"]
    assert statistics.keys() >= PEERS_STATISTICS | {"per_step_accepted", "per_step_drafted"}
    assert sum(statistics["per_step_accepted"]) == statistics["num_accepted_draft_tokens"] > 0
    assert statistics["mean_acceptance_length"] == pytest.approx(
        1 + statistics["num_accepted_draft_tokens"] / statistics["num_spec_steps"]
    )


def test_the_request_id_comes_back(system: System) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    for headers in ({"X-Request-Id": f"test-{uuid.uuid4().hex}"}, {}):
        response = system.post(COMPLETIONS, body, **headers)
        echoed = response.headers["X-Request-Id"]
        assert echoed == headers.get("X-Request-Id", echoed) != ""
        assert echoed in response.json()["id"]
    named = system.client.post(COMPLETIONS, json={"prompt": "x", "temperature": 9}, headers={"X-Request-Id": "bad-1"})
    assert named.headers["X-Request-Id"] == "bad-1", "a refusal can be traced too"


def test_the_first_chunk_arrives_while_the_target_still_works(
    system: System, stub: generation_pb2_grpc.GenerationStub
) -> None:
    before = system.num_generated()
    with system.stream(COMPLETIONS, LONG) as events:
        assert next(events)["choices"][0]["text"]
        assert system.num_generated() - before < LONG["max_tokens"], "chunks were collected on the way"
        assert sum(1 for _ in events) > 20
    before = system.num_generated()
    call = stub.Generate(grpc_request(**LONG), timeout=60)
    assert next(call).token_ids
    assert system.num_generated() - before < LONG["max_tokens"], "chunks were collected on the way"
    assert sum(1 for _ in call) > 20


# What it refuses.

TOO_LONG = [5] * 2000  # token ids
REFUSALS: dict[str, tuple[dict[str, Any] | bytes, int, str | None, list[str]]] = {
    # name: body, status, `param`, what the message must contain
    "prompt too long": ({"prompt": TOO_LONG}, 400, "prompt", ["2000", "1024"]),
    "text too long": ({"prompt": "x = 1\n" * 1000}, 400, "prompt", ["1024"]),
    "unknown model": ({"prompt": "x", "model": "gpt-0"}, 404, "model", ["gpt-0", "target"]),
    "unknown parameter": ({"prompt": "x", "temperture": 0}, 400, "temperture", ["temperture"]),
    "unknown nested": ({"prompt": "x", "speculation": {"on": 1}}, 400, "speculation.on", ["speculation.on"]),
    "temperature": ({"prompt": "x", "temperature": 2.5}, 400, "temperature", ["permitted: 0 to 2", "2.5"]),
    "top_p": ({"prompt": "x", "top_p": 1.5}, 400, "top_p", ["0 to 1"]),
    "max_tokens": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", ["max_tokens is 0", "echo"]),
    "num_speculative_tokens": (
        {"prompt": "x", "speculation": {"num_speculative_tokens": 99}},
        400, "speculation.num_speculative_tokens", ["permitted: 0 to 32", "99"],
    ),
    "wrong type": ({"prompt": "x", "temperature": "0"}, 400, "temperature", ["temperature", "number"]),
    "unsupported": ({"prompt": "x", "suffix": "y"}, 400, "suffix", ["suffix is not supported"]),
    "too many texts": ({"prompt": "x", "n": 129}, 400, "n", ["1", "128", "129"]),
    "too many logprobs": ({"prompt": "x", "logprobs": 21}, 400, "logprobs", ["0 to 20", "21"]),
    "no such token": ({"prompt": "x", "logit_bias": {"4096": 1}}, 400, "logit_bias", ["0", "4095"]),
    "no grammar": (
        {"prompt": "x", "structured_outputs": {"json": {"type": 7}}},
        400, "structured_outputs", ["type"],
    ),
    "no prompt": ({}, 400, "prompt", ["required"]),
    "empty prompt": ({"prompt": ""}, 400, "prompt", ["at least one"]),
    "foreign token id": ({"prompt": [4096]}, 400, "prompt", ["between 0 and 4095"]),
    "malformed JSON": (b'{"prompt": "x",', 400, None, ["not valid JSON"]),
    "no object": (b"[1]", 400, None, ["JSON object"]),
}  # fmt: skip


def test_bad_input_is_refused_by_name_and_nothing_is_lost(
    system: System, stub: generation_pb2_grpc.GenerationStub
) -> None:
    text = system.text(PROMPT, max_tokens=20)
    before = system.num_generated()
    for name, (body, status, parameter, words) in REFUSALS.items():
        bodies = [body] if isinstance(body, bytes) else [body, body | {"stream": True}]
        for each in bodies:
            sent: dict[str, Any] = {"content": each} if isinstance(each, bytes) else {"json": each}
            response = system.client.post(COMPLETIONS, **sent)
            assert response.status_code == status, (name, response.text)
            error = response.json()["error"]
            assert error.keys() >= {"message", "type", "param", "code"}, name
            assert error["param"] == parameter, name
            assert not [word for word in words if word not in error["message"]], (name, error)
    chat = system.post(CHAT, {"messages": [{"role": "robot", "content": "x"}]})
    assert chat.status_code == 400
    assert chat.json()["error"]["param"] == "messages[0].role"
    for request, code, words in GRPC_REFUSALS:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=30))
        assert caught.value.code() is code, caught.value
        details = str(caught.value.details())
        assert not [word for word in words if word not in details], details
    assert system.num_generated() == before, "a refusal comes before any work"
    assert system.text(PROMPT, max_tokens=20) == text
    system.expect_idle()


GRPC_REFUSALS = [
    (
        grpc_request(prompt_token_ids=generation_pb2.TokenPrompt(token_ids=TOO_LONG)),
        grpc.StatusCode.INVALID_ARGUMENT,
        ["2000", "1024"],
    ),
    (grpc_request(prompt="x", model="gpt-0"), grpc.StatusCode.NOT_FOUND, ["gpt-0", "target"]),
    (grpc_request(prompt="x", temperature=2.5), grpc.StatusCode.INVALID_ARGUMENT, ["temperature", "0 to 2"]),
    (grpc_request(prompt="x", max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens", "echo"]),
    (grpc_request(), grpc.StatusCode.INVALID_ARGUMENT, ["prompt_token_ids"]),
]


# Who goes away.


def leave_http_stream(system: System, stub: generation_pb2_grpc.GenerationStub) -> None:
    with system.stream(COMPLETIONS, LONG) as events:
        for _ in range(3):
            next(events)


def leave_http_answer(system: System, stub: generation_pb2_grpc.GenerationStub) -> None:
    """Impatient for an answer in one piece, on a connection that has had one."""
    system.client.get("/v1/models")
    with pytest.raises(httpx.ReadTimeout):
        system.client.post(COMPLETIONS, json=LONG, timeout=0.15)


def leave_chat(system: System, stub: generation_pb2_grpc.GenerationStub) -> None:
    message = {"role": "user", "content": "Read a file."}
    with system.stream(CHAT, {"messages": [message], "max_tokens": 900, "ignore_eos": True}) as events:
        for _ in range(3):
            next(events)


def leave_grpc_stream(system: System, stub: generation_pb2_grpc.GenerationStub) -> None:
    call = stub.Generate(grpc_request(**LONG), timeout=60)
    for _ in range(3):
        next(call)
    call.cancel()


@pytest.mark.parametrize("leave", [leave_http_stream, leave_http_answer, leave_chat, leave_grpc_stream])
def test_a_client_that_leaves_frees_both_workers(
    system: System,
    stub: generation_pb2_grpc.GenerationStub,
    leave: Callable[[System, generation_pb2_grpc.GenerationStub], None],
) -> None:
    system.expect_idle()
    before = system.num_generated()
    leave(system, stub)
    system.expect_idle()
    assert system.num_generated() - before < LONG["max_tokens"], "the target went on for nobody"


async def test_a_storm_of_aborts_frees_everything_long_before_it_would_end(system: System) -> None:
    """More requests than there are places, some in prefill, some generating, some waiting, all given up at once.

    The target then generates a tenth of their tokens at most: a second's, however busy the machine is.
    """
    lengths = [1 + 97 * number % 700 for number in range(60)]

    async def storm(pause_s: float) -> float:
        """Tokens that are generated from the last of them being given up until all is free."""
        system.expect_idle()
        async with httpx.AsyncClient(base_url=system.url, timeout=60, trust_env=False) as client:
            bodies = [LONG | {"prompt": f"{number}" + " x" * length, "max_tokens": 300, "stream": number % 2 == 0}
                      for number, length in enumerate(lengths)]  # fmt: skip
            asked = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
            await asyncio.sleep(pause_s)
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            before = await asyncio.to_thread(system.num_generated)
        await asyncio.to_thread(system.expect_idle)
        return system.num_generated() - before

    for pause_s in (0.05, 0.3, 0.8):
        assert await storm(pause_s) < len(lengths) * 300 / 10

    def counted() -> list[str]:
        lines = system.client.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("outrider_num_requests") and not line.endswith(" 0.0")]

    await asyncio.to_thread(eventually, counted, lambda seen: not seen, "the coordinator has no request")


# What dies.


def origins_of(events: list[dict[str, Any]]) -> list[str]:
    return [origin for event in events for origin in event.get("outrider", {}).get("origins", [])]


@contextmanager
def stream_with_hints(
    system: System, body: dict[str, Any]
) -> Iterator[tuple[list[dict[str, Any]], Iterator[dict[str, Any]]]]:
    """A stream one of whose first tokens was the draft worker's: events so far, and those to come.

    On a busy machine the workers rightly do without hints for a while; such a stream is left, and another begun.
    """
    for _ in range(30):
        with system.stream(COMPLETIONS, body) as events:
            seen: list[dict[str, Any]] = []
            for event in events:
                seen.append(event)
                if "accepted" in origins_of(seen):
                    yield seen, events
                    return
                if len(origins_of(seen)) > body["max_tokens"] // 3:
                    break
    raise AssertionError("no stream had hints early")


def test_a_killed_draft_worker_changes_nothing_but_speed(system: System) -> None:
    body = LONG | {"speculation": {"detail": True}}
    expected = system.text(**LONG, speculation={"enabled": False})
    lives = system.ready_lines("draft-0")
    pid = int(lives[-1]["pid"])
    assert pid in system.command.processes()
    with stream_with_hints(system, body) as (seen, events):
        os.kill(pid, signal.SIGKILL)
        num_before = len(origins_of(seen))
        # While no draft worker lives, new requests are served too.
        meanwhile = system.complete(PROMPT, max_tokens=30, speculation={"detail": True})
        assert system.ready_lines("draft-0") == lives, "it came back too soon for this test to mean anything"
        assert meanwhile["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert expected.startswith(meanwhile["choices"][0]["text"])
        seen += events
    assert text_of(seen) == expected
    # Lookup helps out, but not everywhere.
    assert origins_of(seen)[num_before:].count("plain") > 10, "the stream never had to do without hints"

    (life,) = eventually(
        lambda: system.ready_lines("draft-0")[len(lives) :], bool, "another draft worker", timeout_s=90
    )
    assert life["pid"] != pid
    again = eventually(lambda: system.complete(PROMPT, max_tokens=40), num_accepted, "hints are accepted again")
    assert expected.startswith(again["choices"][0]["text"])
    system.expect_idle()


# How it starts and stops.


def test_a_second_system_on_the_same_ports_is_refused(system: System, tmp_path: Path) -> None:
    port, grpc_port = system.url.rpartition(":")[2], system.grpc.rpartition(":")[2]
    for flags, flag in ((("--port", port), "--port"), (("--grpc-port", grpc_port), "--grpc-port")):
        refused = Command.start(tmp_path / flag, "serve", *FREE_PORTS, *flags)
        assert refused.process.wait(60) == 1, refused.stderr
        assert f"{flag} {flags[1]}: cannot listen on" in refused.stderr
        assert not refused.processes()
    assert system.text(PROMPT, max_tokens=4)


def test_sigterm_ends_every_process(system: System) -> None:
    """The last of the running system's tests."""
    running = system.command.processes()
    for part in ("target_worker", "draft_worker", "coordinator", "redis", "raylet", "gcs_server", "haproxy"):
        assert any(part in words for words in running.values()), (part, running)
    scratch = Path("/tmp").glob(f"outrider-{system.command.process.pid}-*")
    assert (kept := list(scratch))
    assert system.command.stop() == 0, system.command.stderr
    assert not system.command.processes()
    assert not any(folder.exists() for folder in kept)
    assert "killed, it did not end" not in system.command.stderr


@pytest.mark.long  # another start; the shorter tests see plain service while the draft worker is dead
def test_without_a_draft_it_serves_plainly(tmp_path: Path) -> None:
    with running_system(tmp_path / "cache", "--no-draft", "--no-lookup") as system:
        assert not any("draft_worker" in words for words in system.command.processes().values())
        answer = system.complete(PROMPT, max_tokens=30, speculation={"detail": True})
        assert set(answer["outrider"]["origins"]) == {"plain"}
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert system.client.get("/health").json()["num_draft_workers"] == 0
        assert system.command.stop() == 0
        assert not system.command.processes()


def damaged(folder: Path) -> Path:
    """The demo's target after a download that broke off."""
    shutil.copytree(DEMO_TARGET, folder)
    os.truncate(folder / "model.safetensors", 1_000_000)
    return folder


def test_broken_weights_are_one_clear_message_and_leave_nothing(tmp_path: Path) -> None:
    """The worker finds out, while Ray is half-way through its start."""
    folder = damaged(tmp_path / "broken")
    refused = Command.start(tmp_path / "cache", "serve", *FREE_PORTS, "--target", folder, "--no-draft")
    try:
        assert refused.process.wait(90) == 1
    except subprocess.TimeoutExpired:
        refused.stop()
        raise
    assert str(folder) in refused.stderr.partition("Its last lines")[2]
    assert "Traceback" not in refused.stderr
    assert "site-packages" not in refused.stderr
    assert not refused.processes()
