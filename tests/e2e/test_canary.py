"""A canary in a running system: two replicas of the coordinator, the demo pair, and `outrider canary`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from command_line.checkout import DEMO_DRAFT
from demo.corpus import held_out_prompts
from outrider.canary.plan import ArmName, CanaryPlan
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.coordinator.canaries import key_in
from tests.e2e.replicas import wait_until_ready
from tests.e2e.system import ROOT, Command, System, environment, eventually, needs_the_pair, running_system

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    needs_the_pair,
]

NUM_TOKENS = 30
PAYS_S = 90.0  # on a busy machine the workers rightly do without hints for a while
PROMPTS = held_out_prompts(8)
CONTROL, CANARY = ArmName.CONTROL, ArmName.CANARY


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[System]:
    flags = ("--redis-url", redis_url, "--num-replicas", 2)
    with running_system(tmp_path_factory.mktemp("canary") / "cache", *flags) as running:
        eventually(lambda: counts_by_replica(running), lambda seen: len(seen) == 2, "both replicas answer")
        yield running


@pytest.fixture(scope="module")
def texts(system: System) -> list[str]:
    """The output of plain decoding for each prompt."""
    return [system.text(each, max_tokens=NUM_TOKENS, speculation={"enabled": False}) for each in PROMPTS]


@pytest.fixture
def begin(system: System, redis_url: str) -> Iterator[Callable[..., CanaryPlan]]:
    """Starts a canary on half of the keys; it is aborted and forgotten on the way out."""

    def started(*words: object) -> CanaryPlan:
        shown = canary(redis_url, "start", "--share", 0.5, "--duration", "10m", *words)
        assert "50.0% of the keys" in shown
        found = status(redis_url)["canary"]
        return CanaryPlan(canary_id=found["canary_id"], change=found["change"], share=found["share"])

    seen_by_all(system, "somebody", None)
    yield started
    canary(redis_url, "abort", exits=(0, 1))  # 1: the test has done so
    canary(redis_url, "clear")
    seen_by_all(system, "somebody", None)


def ask(system: System, prompt: str, key: str) -> dict[str, Any]:
    """The greedy answer to a request with this canary key."""
    return system.complete(prompt, max_tokens=NUM_TOKENS, prompt_cache_key=key)


def arm_of(system: System, key: str) -> str | None:
    """The arm that requests with this key belong to; None if there is no canary."""
    arm: str | None = ask(system, "x", key)["metrics"].get("canary_arm")
    return arm


def text_over_grpc(system: System, prompt: str, key: str) -> str:
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=NUM_TOKENS)
    request = generation_pb2.GenerationRequest(prompt=prompt, sampling=sampling)
    with grpc.insecure_channel(system.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        chunks = stub.Generate(request, timeout=60, metadata=[("x-canary-key", key)])
        return "".join(chunk.text for chunk in chunks)


def counts_by_replica(system: System) -> dict[str, dict[str, float]]:
    """The number of requests of each arm in each replica's own metrics, by something that tells replicas apart."""
    found: dict[str, dict[str, float]] = {}
    for _ in range(20):  # whichever answers
        text = system.client.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        born = next(str(each.value) for each in samples if each.name == "outrider_target_replays_created")
        found[born] = {
            each.labels["arm"]: each.value for each in samples if each.name == "outrider_canary_requests_total"
        }
    return found


def canary(redis_url: str, *words: object, exits: tuple[int, ...] = (0,)) -> str:
    """Runs `outrider canary` and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "command_line", "canary", *map(str, words)],
        cwd=ROOT,
        env=environment() | {"OUTRIDER_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in exits, done.stdout + done.stderr
    return done.stdout


def status(redis_url: str) -> dict[str, Any]:
    """The status of the canary, whatever is recommended or decided."""
    done = canary(redis_url, "status", "--json", exits=(0, 3, 4))
    found: dict[str, Any] = json.loads(done)
    return found


def keys_of(plan: CanaryPlan) -> list[tuple[str, ArmName]]:
    """One canary key for each prompt, of either arm in turn."""
    return [(key_in(plan, arm, number), arm) for number in range(len(PROMPTS) // 2) for arm in (CONTROL, CANARY)]


def num_hints(system: System, key: str) -> int:
    """Verified, over all prompts."""
    answers = [ask(system, prompt, key) for prompt in PROMPTS]
    return sum(answer["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in answers)


def seen_by_all(system: System, key: str, wanted: str | None) -> None:
    """Returns once eight answers in a row have this arm."""
    eventually(
        lambda: {arm_of(system, key) for _ in range(8)},
        lambda seen: seen == {wanted},
        f"all answer as {wanted}",
    )


def test_replicas_agree_texts_are_the_same_and_every_request_is_counted_once(
    system: System, redis_url: str, texts: list[str], begin: Callable[..., CanaryPlan]
) -> None:
    plan = begin("--num-speculative-tokens", 2, "--audit-share", 1)
    sent = Counter[str]()

    def has_begun_everywhere() -> bool:
        arms = [arm_of(system, "first") for _ in range(8)]
        sent.update(arm for arm in arms if arm is not None)
        return None not in arms

    eventually(has_begun_everywhere, bool, "the canary has begun")
    for (key, arm), prompt, text in zip(keys_of(plan), PROMPTS, texts, strict=True):
        for _ in range(5):  # at whichever replica
            answer = ask(system, prompt, key)
            assert answer["metrics"]["canary_arm"] == arm
            assert answer["choices"][0]["text"] == text
            lengths = answer["metrics"]["speculative_decoding"]["acceptance_histogram_by_draft_length"]
            assert arm is CONTROL or max(map(int, lengths), default=0) <= 2
            sent[arm] += 1
        assert text_over_grpc(system, prompt, key) == text
        sent[arm] += 1
    by_replica = counts_by_replica(system)
    assert len(by_replica) == 2
    assert all(sum(each.values()) > 0 for each in by_replica.values()), by_replica
    assert {arm: sum(each.get(arm, 0) for each in by_replica.values()) for arm in sent} == sent

    def requests(arm: ArmName) -> dict[str, int]:
        found: dict[str, int] = status(redis_url)["arms"][arm]["requests"]
        return found

    eventually(
        lambda: {arm: requests(arm)["finished"] for arm in ArmName},
        lambda seen: seen == sent,
        f"counted: {sent}",
    )
    audited = eventually(
        lambda: requests(CANARY),
        lambda seen: seen["audited"] + seen["unaudited"] == sent[CANARY],
        "all of the canary's requests are audited, or found no room",
    )
    assert audited["audited"] >= 5
    assert audited["diverged"] == audited["unstable"] == 0


def test_promotion_and_abortion_reach_requests_while_the_system_runs(
    system: System, redis_url: str, texts: list[str], begin: Callable[..., CanaryPlan]
) -> None:
    plan = begin("--off")
    (key, _), *_ = keys_of(plan)
    seen_by_all(system, key, "control")
    hints = Counter[str]()
    for (each, arm), prompt, text in zip(keys_of(plan), PROMPTS, texts, strict=True):
        answer = ask(system, prompt, each)
        assert answer["choices"][0]["text"] == text
        hints[arm] += answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    assert hints[CANARY] == 0
    eventually(lambda: num_hints(system, key), bool, "control speculates, whenever that pays", PAYS_S)
    canary(redis_url, "promote")
    seen_by_all(system, key, "canary")
    assert num_hints(system, key) == 0
    assert ask(system, PROMPTS[0], key)["choices"][0]["text"] == texts[0]
    canary(redis_url, "abort")
    seen_by_all(system, key, None)


def test_a_new_draft_model_is_its_arms_alone_from_its_first_worker_on(
    system: System, redis_url: str, texts: list[str], begin: Callable[..., CanaryPlan], tmp_path: Path
) -> None:
    plan = begin("--draft-model", "draft-v2")
    shutil.copytree(DEMO_DRAFT, tmp_path / "draft-v2")
    worker = Command.start(
        tmp_path / "worker", "draft-worker", "--model", tmp_path / "draft-v2", "--redis-url", redis_url
    )
    try:
        wait_until_ready(worker)
        (key, _), (canary_key, _), *_ = keys_of(plan)
        seen_by_all(system, key, "control")

        def num_steps() -> float:
            """The number of steps of the new worker since it started."""
            ready = next(json.loads(line) for line in worker.stdout.splitlines() if '"ready"' in line)
            text = system.client.get(f"http://127.0.0.1:{ready['metrics_port']}/metrics").text
            samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
            return next(each.value for each in samples if each.name == "outrider_draft_step_milliseconds_count")

        before = num_steps()
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert ask(system, prompt, key)["choices"][0]["text"] == text
        assert num_steps() == before
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert ask(system, prompt, canary_key)["choices"][0]["text"] == text
        eventually(
            lambda: (num_hints(system, canary_key), num_steps()),
            lambda seen: seen[1] > before,
            "the new worker works for the canary's arm",
            PAYS_S,
        )
        canary(redis_url, "abort")
        seen_by_all(system, canary_key, None)
        before = num_steps()
        for prompt in PROMPTS:
            ask(system, prompt, canary_key)
        assert num_steps() == before
    finally:
        worker.stop()


def test_what_a_replica_had_told_before_it_was_killed_is_kept(
    system: System, redis_url: str, begin: Callable[..., CanaryPlan]
) -> None:
    plan = begin("--off")
    (key, _), *_ = keys_of(plan)
    seen_by_all(system, key, "control")
    before = eventually(
        lambda: status(redis_url)["arms"][CONTROL]["requests"]["finished"],
        lambda seen: seen >= 8,
        "they are counted",
    )
    replica = next(pid for pid, words in system.command.processes().items() if words.startswith("ray::ServeReplica"))
    os.kill(replica, signal.SIGKILL)
    assert status(redis_url)["arms"][CONTROL]["requests"]["finished"] >= before
    seen_by_all(system, key, "control")
