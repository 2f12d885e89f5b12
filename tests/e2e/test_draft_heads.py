"""A random EAGLE-3 head in real processes: it gets features, changes no output, and is paired with nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from benchmarks.shared.worker_pair import WorkerPair, worker_pair
from command_line.checkout import DEMO_TARGET
from command_line.start.demo_prompts import DEMO_PROMPTS
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.local.redis_server import EmbeddedRedis
from outrider.model_files import read_json
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import draft_pb2
from tests.e2e.system import Command, System, eventually, needs_the_pair, running_system
from tests.exactness.heads import write_head

pytestmark = [pytest.mark.timeout(300), needs_the_pair]

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def random_head(folder: Path, seed: int = 9) -> Path:
    config = read_json(DEMO_TARGET / "config.json")
    return write_head(
        folder, config["vocab_size"], config["max_position_embeddings"], target_width=config["hidden_size"], seed=seed
    )


def metric(pair: WorkerPair, name: str) -> float:
    return sum(sample.value for sample in pair.target.metrics() if sample.name == name)


async def test_its_hints_are_verified_and_change_nothing(tmp_path: Path) -> None:
    head = random_head(tmp_path / "head")
    prompt = Tokenizer(DEMO_TARGET).encode(DEMO_PROMPTS[0])
    async with worker_pair(
        DEMO_TARGET,
        head,
        target_arguments=("--draft-head", str(head), "--always-listen"),
        draft_arguments=("--target-tokenizer", str(DEMO_TARGET)),
    ) as pair:
        assert pair.head_fingerprint == checkpoint_fingerprint(head)
        plain = await pair.generate(prompt, GREEDY, use_draft=False)
        hinted = await pair.generate(prompt, GREEDY)
        assert hinted.token_ids == plain.token_ids
        for _ in range(50):  # a random head is always wrong, and on a busy machine all of its hints may come late
            if hinted.finished.stats.num_draft_tokens:
                break
            hinted = await pair.generate(prompt, GREEDY)
            assert hinted.token_ids == plain.token_ids
        assert hinted.finished.stats.num_draft_tokens > 0
        assert metric(pair, "outrider_commit_bytes_total") > 2 * 32 * len(prompt), "features of 32 numbers a position"
        # As at a target of another engine, or one that was started without the head.
        assert pair.draft_stub is not None
        request = draft_pb2.AttachRequest(
            session_id="blind",
            attachment=1,
            target_address=pair.target.address,
            token_ids=prompt,
            sampling=GREEDY.to_proto(),
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in pair.draft_stub.Attach(request, timeout=30):
                pass
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"runs the draft head {pair.head_fingerprint[:16]}" in (refusal.value.details() or "")


@contextmanager
def worker(folder: Path, *words: object) -> Iterator[Command]:
    command = Command.start(folder, *words)
    try:
        yield command
    finally:
        command.stop()


@pytest.mark.slow
def test_serve_starts_it_on_a_draft_worker_and_tells_the_target(tmp_path: Path) -> None:
    head = random_head(tmp_path / "head")
    with running_system(tmp_path / "system", "--draft", head, "--no-lookup", "--hosting", "plain") as system:
        eventually(lambda: speculated(system), bool, "hints of the head are verified", 120)
        of_target, of_draft = (system.ready_lines(name)[-1] for name in ("target-0", "draft-0"))
        assert of_target["head_fingerprint"] == of_draft["head_fingerprint"] == checkpoint_fingerprint(head)


@pytest.mark.slow
def test_serve_runs_it_beside_the_target_without_draft_workers(tmp_path: Path) -> None:
    head = random_head(tmp_path / "head")
    with running_system(tmp_path / "system", "--draft-head", head, "--no-lookup", "--hosting", "plain") as system:

        def num_turns() -> float:
            """Turns of the head. A random one gains nothing, so that it is soon left out."""
            speculated(system)
            return system.metric("target-0", "outrider_head_milliseconds_count")

        eventually(num_turns, bool, "the head drafts", 120)
        assert not (system.log_dir / "draft-0.log").exists()


@pytest.mark.slow
def test_a_coordinator_pairs_it_with_targets_that_keep_its_features_alone(tmp_path: Path) -> None:
    head, other = random_head(tmp_path / "head"), random_head(tmp_path / "other", seed=10)
    redis = EmbeddedRedis(tmp_path / "redis")
    (tmp_path / "redis").mkdir()
    try:
        common = ("--redis-url", redis.start())
        named = ("--served-model-name", DEMO_TARGET.name)
        with running_system(tmp_path / "system", "--no-draft", "--no-lookup", "--hosting", "plain", *common) as system:

            def health() -> dict[str, Any]:
                answer: dict[str, Any] = system.client.get("/health").json()
                return answer

            draft = ("draft-worker", "--model", head, "--target-tokenizer", DEMO_TARGET, "--worker-id", "head-0")
            with worker(tmp_path / "draft", *draft, *common):
                seen = eventually(health, lambda seen: seen["excluded_workers"], "the head is not used", 120)
                (excluded,) = seen["excluded_workers"]
                assert (excluded["worker_id"], excluded["pool"]) == ("head-0", "draft")
                assert "for which no target keeps features" in excluded["reason"]
                assert speculated(system) == 0
                log = eventually(
                    lambda: (system.log_dir / "coordinator.log").read_text(),
                    lambda seen: "head-0" in seen,
                    "a log line",
                )
                assert "draft worker head-0 is not used: runs the draft head" in log
                target = ("target-worker", "--model", DEMO_TARGET, *named, "--no-lookup", *common)
                with worker(tmp_path / "other-target", *target, "--draft-head", other):
                    eventually(health, lambda seen: seen["num_target_workers"] == 2, "a second target", 120)
                    assert health()["excluded_workers"], "it keeps features for another head"
                    with worker(tmp_path / "target", *target, "--draft-head", head, "--always-listen"):
                        seen = eventually(health, lambda seen: seen["num_target_workers"] == 3, "a third target", 120)
                        seen = eventually(health, lambda seen: not seen["excluded_workers"], "the head is used")
                        assert seen["num_draft_workers"] == 1
                        assert sorted(each["target_head"] for each in seen["unpaired_workers"]) == [
                            "",
                            checkpoint_fingerprint(other),
                        ]
                        eventually(lambda: speculated(system), bool, "hints of the head are verified", 120)
    finally:
        redis.stop()


def speculated(system: System) -> int:
    """Hints that were verified for a request; its output is the plain one."""
    plain = system.text(DEMO_PROMPTS[0], max_tokens=30, speculation={"enabled": False})
    answer = system.complete(DEMO_PROMPTS[0], max_tokens=30, speculation={"always": True})
    assert answer["choices"][0]["text"] == plain
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])
