"""The plan of one machine: cores, commands and flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line.start.cores import CorePlan, plan_cores
from command_line.start.deployment import (
    Affinity,
    Deployment,
    WorkerMemory,
    coordinator_spec,
    worker_specs,
)
from coordinator.formats.names import ReasoningParserName, ToolCallParserName
from coordinator.settings import Hosting, Proxy
from outrider.engine.options import Dtype, Quantization
from outrider.observability.vllm_names import MetricsNames
from outrider.settings import SettingError
from target_worker.limits import EngineName

PAIR = Deployment(Path("large"), Path("small"))
URL = "redis://127.0.0.1:6379/0"


def flags(command: tuple[str, ...]) -> dict[str, str]:
    words = command[command.index("-m") + 2 :]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("num_cores", "num_targets", "num_drafts", "targets", "drafts", "lent"),
    [
        (1, 1, 1, ((),), ((),), ((),)),  # nothing to divide
        (2, 1, 1, ((0,),), ((1,),), ((1,),)),
        (2, 1, 0, ((0, 1),), (), ((),)),
        (3, 1, 1, ((0, 1),), ((2,),), ((2,),)),
        (4, 1, 1, ((1, 2),), ((3,),), ((3,),)),
        (4, 2, 2, ((0,), (1,)), ((2,), (3,)), ((2,), (3,))),
        (8, 2, 1, ((1, 2, 3), (4, 5, 6)), ((7,),), ((7,), ())),
        (8, 1, 1, ((1, 2, 3, 4, 5, 6),), ((7,),), ((7,),)),
        (64, 1, 1, (tuple(range(1, 63)),), ((63,),), ((63,),)),
        (3, 2, 2, ((), ()), ((), ()), ((), ())),
    ],
)
def test_workers_have_cores_of_their_own_and_lend_them_only_where_that_is_asked_for(
    num_cores: int,
    num_targets: int,
    num_drafts: int,
    targets: tuple[tuple[int, ...], ...],
    drafts: tuple[tuple[int, ...], ...],
    lent: tuple[tuple[int, ...], ...],
) -> None:
    apart = CorePlan(targets, drafts, ((),) * num_targets)
    assert plan_cores(range(num_cores), num_targets, num_drafts) == apart
    assert plan_cores(range(num_cores), num_targets, num_drafts, shares_cores=True) == CorePlan(targets, drafts, lent)
    assert plan_cores(range(num_cores), num_targets, num_drafts, shares_cores=True, may_share=False) == apart


@pytest.mark.parametrize(
    ("threads", "targets", "drafts", "shared"),
    [
        ((1, None), ((1,),), ((3,),), ((),)),
        ((2, None), ((1, 2),), ((3,),), ((),)),
        ((3, None), ((1, 2),), ((3,),), ((3,),)),
        ((None, 2), ((1,),), ((2, 3),), ((),)),
        ((None, 4), ((),), ((),), ((),)),  # there is none left for the target
    ],
)
def test_numbers_of_threads_can_be_given(
    threads: tuple[int | None, int | None],
    targets: tuple[tuple[int, ...], ...],
    drafts: tuple[tuple[int, ...], ...],
    shared: tuple[tuple[int, ...], ...],
) -> None:
    assert plan_cores(range(4), 1, 1, *threads) == CorePlan(targets, drafts, shared)


@pytest.mark.parametrize("given", [{}, {"target_threads": 1, "draft_threads": 1}])
def test_by_default_cores_are_apart_as_with_a_thread_for_each_model(given: dict[str, Any]) -> None:
    target, draft = worker_specs(replace(PAIR, **given), [0, 1], "abc")
    for spec, core in ((target, "0"), (draft, "1")):
        assert flags(spec.command)["--cpu-affinity"] == core
        assert flags(spec.command)["--num-threads"] == spec.environment["OMP_NUM_THREADS"] == "1"
        assert "--num-threads-beside-draft" not in spec.command
        assert "nice" not in spec.command


def test_a_target_that_shares_cores_gets_them_as_flag_and_threads() -> None:
    target, draft = worker_specs(replace(PAIR, share_cores=True), [0, 1], "abc")
    assert flags(target.command)["--cpu-affinity"] == "0,1"
    assert flags(draft.command)["--cpu-affinity"] == "1"
    assert flags(target.command)["--num-threads"] == target.environment["OMP_NUM_THREADS"] == "2"
    assert flags(target.command)["--num-threads-beside-draft"] == "1"
    assert flags(draft.command)["--num-threads"] == draft.environment["OMP_NUM_THREADS"] == "1"
    assert draft.command[:3] == ("nice", "-n", "5"), "a step waits for the target's thread on its core"


@pytest.mark.parametrize(
    "given",
    [{"target_threads": 2}, {"tensor_parallel_size": 2}, {"engine": EngineName.VLLM}, {"affinity": Affinity.NONE}],
)
def test_cores_are_not_shared_where_threads_are_fixed(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="--share-cores is for threads that may change") as refusal:
        replace(PAIR, share_cores=True, **given)
    assert refusal.value.name == "share_cores"


@pytest.mark.parametrize("given", [{"tensor_parallel_size": 2}, {"engine": EngineName.VLLM}])
def test_ranks_and_vllm_leave_the_drafts_core_alone(given: dict[str, Any]) -> None:
    target, draft = worker_specs(replace(PAIR, **given), [0, 1], "abc")
    assert target.command[target.command.index("--cpu-affinity") + 1] == "0"
    assert "--num-threads-beside-draft" not in target.command
    assert "nice" not in draft.command


@pytest.mark.parametrize("affinity", list(Affinity))
def test_numbers_of_threads_hold_wherever_workers_run(affinity: Affinity) -> None:
    given = replace(PAIR, target_threads=3, draft_threads=2, affinity=affinity)
    target, draft = worker_specs(given, range(5), "abc")
    assert (flags(target.command)["--num-threads"], flags(draft.command)["--num-threads"]) == ("3", "2")


def test_a_target_with_two_threads_uses_both_cores_in_every_step() -> None:
    target, draft = worker_specs(replace(PAIR, target_threads=2), [0, 1], "abc")
    assert flags(target.command)["--cpu-affinity"] == "0,1"
    assert flags(target.command)["--num-threads"] == "2"
    assert "--num-threads-beside-draft" not in target.command
    assert draft.command[0] == "nice"


def test_affinity_none_pins_nobody() -> None:
    deployment = Deployment(Path("large"), Path("small"), affinity=Affinity.NONE)
    assert all("--cpu-affinity" not in spec.command for spec in worker_specs(deployment, [0, 1], "abc"))


def test_values_left_to_the_worker_are_not_passed() -> None:
    target, _ = worker_specs(PAIR, [0, 1], "abc")
    assert not {"--num-speculative-tokens", "--max-num-seqs", "--max-model-len"} & set(target.command)
    given = Deployment(Path("large"), None, num_speculative_tokens=0, max_model_len=512)
    (target,) = worker_specs(given, [0, 1], "abc")
    assert flags(target.command)["--num-speculative-tokens"] == "0"
    assert flags(target.command)["--max-model-len"] == "512"


def test_each_pool_gets_its_part_of_the_memory() -> None:
    memory = {
        "target": WorkerMemory(max_model_len=4096, kv_cache_gib=1.5),
        "draft": WorkerMemory(max_model_len=2048, memory_utilization=0.25),
    }
    given = replace(PAIR, max_model_len="auto")
    target, draft = (flags(each.command) for each in worker_specs(given, [0, 1], "abc", memory))
    assert (target["--max-model-len"], target["--kv-cache-gib"]) == ("4096", "1.5")
    assert (draft["--max-model-len"], draft["--memory-utilization"]) == ("2048", "0.25")
    assert "--memory-utilization" not in target
    assert all(flags(each.command)["--max-model-len"] == "auto" for each in worker_specs(given, [0, 1], "abc"))


def test_worker_ids_differ_between_workers_and_systems() -> None:
    deployment = Deployment(Path("large"), Path("small"), num_target_workers=2, num_draft_workers=2)
    ids = [
        flags(spec.command)["--worker-id"]
        for run_id in ("one", "two")
        for spec in worker_specs(deployment, [0], run_id)
    ]
    assert len(set(ids)) == 8


def test_workers_and_coordinator_agree_on_the_model_name() -> None:
    deployment = Deployment(Path("/models/large"), None)
    (target,) = worker_specs(deployment, [], "abc")
    coordinator = coordinator_spec(deployment, Path("/tmp/x"))
    assert flags(target.command)["--served-model-name"] == "large"
    assert flags(coordinator.command)["--served-model-name"] == "large"


def test_both_that_have_metrics_of_vllm_export_the_names_that_are_asked_for() -> None:
    deployment = Deployment(Path("large"), Path("small"), metrics_names=MetricsNames.VLLM)
    target, draft = worker_specs(deployment, [0, 1], "abc")
    coordinator = coordinator_spec(deployment, Path("/tmp/x"))
    assert flags(target.command)["--metrics-names"] == flags(coordinator.command)["--metrics-names"] == "vllm"
    assert "--metrics-names" not in draft.command


def test_what_is_asked_of_all_requests_reaches_the_processes_it_concerns() -> None:
    deployment = Deployment(
        target=Path("/m/target"),
        draft=Path("/m/draft"),
        enable_prefix_caching=False,
        enable_lookup=False,
        seed_requests=False,
    )
    target, draft = worker_specs(deployment, [0, 1], "run")
    switches = {"--no-enable-prefix-caching", "--no-lookup"}
    assert switches <= set(target.command)
    assert switches & set(draft.command) == {"--no-enable-prefix-caching"}
    assert "--no-seed-requests" in coordinator_spec(deployment, Path("/tmp/x")).command
    assert "--no-seed-requests" not in coordinator_spec(PAIR, Path("/tmp/x")).command
    on_vllm = replace(PAIR, engine=EngineName.VLLM)
    assert "--no-seed-requests" in coordinator_spec(on_vllm, Path("/tmp/x")).command, "its seeds couple nothing"
    plain = Deployment(target=Path("/m/target"), draft=None)
    assert not switches & set(worker_specs(plain, [0], "run")[0].command)


def test_the_proxy_is_the_coordinators_choice_unless_one_is_named() -> None:
    assert "--proxy" not in coordinator_spec(PAIR, Path("/tmp/x")).command
    named = replace(PAIR, proxy=Proxy.PYTHON)
    assert flags(coordinator_spec(named, Path("/tmp/x")).command)["--proxy"] == "python"


def test_a_plain_coordinator_has_no_ray_and_waits_for_no_load_balancer() -> None:
    command = coordinator_spec(replace(PAIR, hosting=Hosting.PLAIN), Path("/tmp/x")).command
    assert flags(command)["--hosting"] == "plain"
    assert flags(command)["--drain-notice-s"] == "0"
    assert "--ray-temp-dir" not in command


@pytest.mark.parametrize(
    ("name", "value"), [("num_replicas", 2), ("proxy", Proxy.PYTHON), ("tls_dir", Path("/certificates"))]
)
def test_what_a_plain_coordinator_cannot_do_is_refused_before_anything_starts(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"--{name.replace('_', '-')} needs --hosting ray-serve") as refused:
        replace(PAIR, hosting=Hosting.PLAIN, **{name: value})
    assert refused.value.name == name


def test_how_many_wait_and_for_how_long_is_passed_on_to_the_coordinator() -> None:
    wanted = replace(PAIR, max_requests=9, max_queue_wait_s=2.5, tenant_weights=("a=2", "b=0.5"))
    command = coordinator_spec(wanted, Path("/tmp/x")).command
    assert flags(command)["--max-requests"] == "9"
    assert flags(command)["--max-queue-wait"] == "2.5"
    assert [command[at + 1] for at, word in enumerate(command) if word == "--tenant-weight"] == [
        "a=2",
        "b=0.5",
    ]


def test_the_chat_template_and_the_formats_of_the_output_are_passed_on_to_the_coordinator() -> None:
    wanted = replace(PAIR, tool_call_parser=ToolCallParserName.MISTRAL, reasoning_parser=ReasoningParserName.QWEN3)
    command = flags(coordinator_spec(replace(wanted, chat_template=Path("my.jinja")), Path("/tmp/x")).command)
    assert command["--chat-template"] == "my.jinja"
    assert command["--tool-call-parser"] == "mistral"
    assert command["--reasoning-parser"] == "qwen3"
    assert not {"--tool-call-parser", "--reasoning-parser"} & set(coordinator_spec(PAIR, Path("/tmp/x")).command)
    with pytest.raises(SettingError, match="leave one of the two out"):
        replace(wanted, reasoning_parser=ReasoningParserName.OPENAI_GPTOSS)


class TestDraftHeads:
    """A head on draft workers, or beside the target."""

    def test_draft_workers_run_it_with_the_features_of_the_target(self) -> None:
        head = Path("head")
        target, draft = worker_specs(Deployment(Path("large"), head, draft_head=head), (), "x")
        assert flags(target.command)["--draft-head"] == "head"
        assert (flags(draft.command)["--model"], flags(draft.command)["--target-tokenizer"]) == ("head", "large")
        assert "--draft-head" not in draft.command

    def test_beside_the_target_it_needs_no_draft_worker(self) -> None:
        (target,) = worker_specs(Deployment(Path("large"), None, draft_head=Path("head")), (), "x")
        assert flags(target.command)["--draft-head"] == "head"

    def test_the_target_runs_it_too_unless_it_is_left_to_draft_workers(self) -> None:
        head = Path("head")
        for local_head in (True, False):
            given = Deployment(Path("large"), head, draft_head=head, local_head=local_head)
            assert ("--no-local-head" in worker_specs(given, (), "x")[0].command) is not local_head
        with pytest.raises(SettingError, match="give it as --draft"):
            Deployment(Path("large"), None, draft_head=head, local_head=False)

    def test_a_draft_worker_that_runs_it_is_one_process(self) -> None:
        with pytest.raises(SettingError, match="--draft-tensor-parallel-size 2: a draft head runs in one process"):
            Deployment(Path("large"), Path("head"), draft_head=Path("head"), draft_tensor_parallel_size=2)
        Deployment(Path("large"), Path("small"), draft_tensor_parallel_size=2)


class TestVllm:
    """Targets whose model vLLM runs."""

    def specs(self, **given: Any) -> list[tuple[str, ...]]:
        deployment = Deployment(Path("large"), given.pop("draft", Path("small")), engine=EngineName.VLLM, **given)
        return [spec.command for spec in worker_specs(deployment, [0, 1], "abc")]

    def test_its_own_flags_stand_behind_the_dashes(self) -> None:
        given = {"dtype": Dtype.FLOAT32, "max_num_seqs": 8, "max_model_len": 512, "tensor_parallel_size": 2}
        target, draft = self.specs(**given, engine_python=Path("/v/python"), vllm_args="--enforce-eager --seed '1'")
        assert target[:3] == ("/v/python", "-m", "target_worker"), "vLLM starts its ranks itself"
        where = target.index("--")
        own, theirs = target[3:where], target[where + 1 :]
        assert {"--engine", "vllm", "--model", "large", "--worker-id", "target-0-abc", "--cpu-affinity"} <= {*own}
        assert "--num-speculative-tokens" not in own
        assert theirs == (
            *("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512", "--tensor-parallel-size", "2"),
            *("--enforce-eager", "--seed", "1"),
        )
        assert draft[1:3] == ("-m", "draft_worker")

    def test_without_draft_workers_it_takes_no_hints(self) -> None:
        (target,) = self.specs(draft=None)
        assert flags(target[: target.index("--")])["--num-speculative-tokens"] == "0"

    @pytest.mark.parametrize(
        ("name", "given"),
        [
            ("quantization", {"quantization": Quantization.INT8}),
            ("draft_head", {"draft_head": Path("head")}),
            ("vllm_args", {"vllm_args": "'"}),
            ("vllm_args", {"vllm_args": "--seed 1", "engine": EngineName.OUTRIDER}),
            ("engine_python", {"engine_python": Path("python"), "engine": EngineName.OUTRIDER}),
            ("target_threads", {"target_threads": 2}),
        ],
    )
    def test_what_does_not_go_with_the_engine_is_refused(self, name: str, given: dict[str, Any]) -> None:
        with pytest.raises(SettingError) as refusal:
            Deployment(Path("large"), None, **{"engine": EngineName.VLLM, **given})
        assert refusal.value.name == name
