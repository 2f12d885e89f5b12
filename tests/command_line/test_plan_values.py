"""`outrider plan` and the Helm chart: every preset fits, and values that it writes bring up workers that start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import app
from k8s.helm.chart import PRESETS, preset, render
from tests.command_line.test_plan import RUNNER, planned
from tests.engine.test_kv_plan import HUGE, LARGE, SHAPES, SMALL
from tests.k8s.test_manifests import container_of

ROOT = Path(__file__).parents[2]


class TestHelmValues:
    def written(self, *words: object) -> tuple[str, dict[str, Any]]:
        result = RUNNER.invoke(app, ["plan", *map(str, words), "--values"])
        assert result.exit_code == 0, result.output
        values: dict[str, Any] = yaml.safe_load(result.stdout)
        return result.stdout, values

    def test_the_chart_takes_them_and_its_workers_start(self) -> None:
        text, values = self.written(
            SHAPES / LARGE, "--draft", SHAPES / SMALL, "--memory", "h100", "--draft-memory", "l4"
        )
        assert values["target"]["gpu"] == {"count": 4}
        assert "1 GPU: 103 GiB are missing" in text
        objects = render(values)
        for role, folder, memory in (("target", LARGE, "h100"), ("draft", SMALL, "l4")):
            assert planned(SHAPES / folder, *plan_flags(objects, role), "--memory", memory)["starts"]
        assert f"servedModelName: {LARGE}" in text

    def test_a_model_that_no_node_holds_gets_several(self) -> None:
        _, values = self.written(SHAPES / HUGE, "--memory", "h100")
        assert (values["target"]["nodes"], values["target"]["gpu"]["count"]) == (2, 8)
        assert "draft" not in values["pairs"][0]
        assert group_size(render(values)) == 2
        _, of_small_nodes = self.written(SHAPES / SMALL, "--memory", "6GiB", "--gpus-per-node", 1)
        assert of_small_nodes["target"]["nodes"] == 2

    def test_what_the_user_decides_is_kept(self) -> None:
        _, values = self.written(
            *(SHAPES / LARGE, "--memory", "80GiB", "--tensor-parallel-size", 8, "--quantization", "int8"),
            *("--max-model-len", 8192, "--max-num-seqs", 64, "--memory-utilization", 0.8),
        )
        target = values["target"]
        assert target["gpu"]["count"] == 8
        assert target["args"] == ["--quantization=int8"]
        assert (target["maxModelLen"], target["maxNumSeqs"], target["memoryUtilization"]) == (8192, 64, 0.8)
        assert {"--quantization=int8", "--max-num-seqs=64"} <= set(container_of(render(values), "target")["args"])

    def test_workers_are_as_many_as_the_sessions_need(self) -> None:
        words = (SHAPES / SMALL, "--memory", "l4", "--session-tokens", 100_000)
        text, values = self.written(*words, "--sessions", 10)
        assert "5 sessions of 100,000 tokens at once" in text  # 518,656 tokens of KV
        assert values["target"]["sessionsPerReplica"] == 3
        assert values["target"]["replicas"] == {"min": 4, "max": 8}

    def test_what_is_fetched_is_as_large_as_it_is_stored(self) -> None:
        """Weights are quantized while they are loaded."""
        words = (SHAPES / SMALL, "--memory", "l4")
        sizes = [
            re.findall(r"size: (\d+)Gi", self.written(*words, *more)[0]) for more in ((), ("--quantization", "int8"))
        ]
        assert sizes == [["3"], ["3"]]

    def test_flags_of_values_have_no_effect_without(self) -> None:
        words = ["plan", str(SHAPES / SMALL), "--memory", "l4", "--sessions", "3"]
        result = RUNNER.invoke(app, words)
        assert result.exit_code == 2
        assert "--sessions has no effect without --values" in " ".join(result.output.replace("│", "").split())

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            ((SHAPES / SMALL, "--memory", "1GiB"), "does not fit: 1.0 GiB are free"),  # on 64 ranks, neither
            ((SHAPES / LARGE, "--memory", "h100", "--tensor-parallel-size", "3"), "3 ranks cannot share 64"),
            ((SHAPES / LARGE, "--memory", "h1000"), "known are t4"),
            ((SHAPES / LARGE, "--memory", "80GiB", "--device", "cpu"), "plans for GPUs"),
            ((SHAPES / SMALL, "--memory", "l4", "--json"), "--json has no effect with --values"),
            ((SHAPES / SMALL, "--memory", "l4", "--num-draft-workers", "2"), "--num-draft-workers has no effect with"),
        ],
    )
    def test_what_cannot_be_is_refused(self, words: tuple[Any, ...], reason: str) -> None:
        result = RUNNER.invoke(app, ["plan", *map(str, words), "--values"])
        assert result.exit_code != 0
        shown = " ".join(f"{result.output} {result.exception}".replace("│", "").split())
        assert reason in shown


@pytest.mark.parametrize(
    ("name", "role", "folder", "memory"),
    [
        ("llama-70b", "target", LARGE, "h100"),
        ("llama-70b", "draft", SMALL, "l4"),
        ("llama-405b", "target", HUGE, "h100"),
        ("llama-405b", "draft", SMALL, "l4"),
        ("draft-pool", "draft", SMALL, "l4"),
        ("demo", "target", "demo/target", "2Gi"),
        ("demo", "draft", "demo/draft", "2Gi"),
    ],
)
def test_every_preset_fits_what_it_names(name: str, role: str, folder: str, memory: str) -> None:
    """The flags are those of the rendered pods; a pod without a GPU has its limit of memory."""
    objects = render(preset(name))
    if name == "demo":
        assert container_of(objects, role)["resources"]["limits"]["memory"] == memory
    model = ROOT / folder if "/" in folder else SHAPES / folder
    found = planned(model, *plan_flags(objects, role), "--memory", memory)
    assert found["starts"]
    assert found["workers"]["target"]["max_model_len"] == found_length(model)


def test_every_preset_is_planned() -> None:
    assert set(PRESETS) == {"demo", "llama-70b", "llama-405b", "draft-pool"}


def plan_flags(objects: list[dict[str, Any]], role: str) -> list[str]:
    """The flags of a rendered worker that determine its memory, as `outrider plan` has them."""
    container = container_of(objects, role)
    words = [*container.get("command", ()), *container["args"]]
    num_ranks = next((int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node=")), 1)
    if role == "target":
        num_ranks *= group_size(objects)
    known = ("--device", "--max-model-len", "--max-num-seqs", "--memory-utilization", "--quantization", "--dtype")
    return [f"--tensor-parallel-size={num_ranks}", *(word for word in words if word.startswith(known))]


def group_size(objects: list[dict[str, Any]]) -> int:
    """Pods that share a target model."""
    groups = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    return int(groups[0]["spec"]["leaderWorkerTemplate"]["size"]) if groups else 1


def found_length(model: Path) -> int:
    length: int = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    return length
