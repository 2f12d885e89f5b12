"""`outrider plan` says what fits, and where nothing does what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from command_line import app
from command_line.plan.gpus import parse_size
from outrider.engine.heads.loading import load_head
from outrider.engine.kv.kv_plan import GIB
from tests import models
from tests.engine.heads.checkpoints import MEDUSA_CASES, write_target
from tests.engine.test_kv_plan import HUGE, LARGE, LONGEST, SHAPES, SMALL
from tests.exactness.heads import write_head

RUNNER = CliRunner()


def planned(*words: object) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["plan", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_is_left_holds_both_models_kv() -> None:
    target = models.model_dir("llama")
    alone = planned(target, "--memory", "2GiB")
    both = planned(target, "--draft", models.model_dir("qwen3"), "--memory", "2GiB")
    assert both["num_tokens"] < alone["num_tokens"]
    fixed = sum(alone[name] for name in ("weights", "step", "process"))
    assert alone["num_tokens"] == (int(0.9 * 2**31) - fixed) // alone["kv_per_token"]
    assert both["draft"]
    assert alone["sessions_by_length"] == {str(models.MAX_MODEL_LEN): alone["num_tokens"] // models.MAX_MODEL_LEN}


def test_a_draft_head_is_planned_for_where_it_runs(tmp_path: Path) -> None:
    target = models.model_dir("llama")
    width, vocab_size = models.COMMON["hidden_size"], models.VOCAB_SIZE
    head = write_head(tmp_path / "head", vocab_size, models.MAX_MODEL_LEN, width)
    engine = load_head(models.engine_config(head), target)
    plain = planned(target, "--memory", "2GiB", "--dtype", "float32")
    remote = planned(target, "--draft", head, "--no-local-head", "--memory", "2GiB", "--dtype", "float32")
    assert remote["draft"]["kv_per_token"] == engine.kv_bytes_per_token
    assert remote["draft"]["weights"] == 4 * engine.num_parameters
    features = 4 * engine.feature_size
    assert remote["kv_per_token"] == plain["kv_per_token"] + features
    assert remote["weights"] == plain["weights"] + 2 * width * features, "the projection"
    both = planned(target, "--draft", head, "--memory", "2GiB", "--dtype", "float32")
    assert both["draft"] == remote["draft"]
    beside = planned(target, "--draft-head", head, "--memory", "2GiB", "--dtype", "float32")
    assert beside["draft"] is None
    assert beside["weights"] == plain["weights"] + 4 * engine.num_parameters + 2 * width * features
    assert both["weights"] == beside["weights"]
    medusa = MEDUSA_CASES[0].write(tmp_path / "medusa")
    words = ("--draft", medusa, "--memory", "2GiB")
    shape = planned(write_target(tmp_path / "target"), *words)
    assert shape["draft"] is None


@pytest.mark.parametrize("flags", [("--draft", "--values"), ("--draft-head", "--draft")])
def test_a_draft_head_is_refused_where_it_is_not_planned_for(tmp_path: Path, flags: tuple[str, str]) -> None:
    head = write_head(tmp_path / "head", models.VOCAB_SIZE, models.MAX_MODEL_LEN)
    second = [str(head)] if flags[1] == "--draft" else []
    words = ["plan", str(models.model_dir("llama")), flags[0], str(head), flags[1], *second, "--memory", "h100"]
    result = RUNNER.invoke(app, words)
    assert result.exit_code == 2
    assert "draft heads" in result.output or "exclude each other" in result.output


def test_a_person_sees_a_table_and_the_way_out() -> None:
    result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--memory", "1GiB"])
    assert result.exit_code == 0
    assert "KV of a token" in result.output
    assert "Sessions at once" in result.output
    result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--memory", "64MiB"])
    assert result.exit_code == 1
    assert "It does not fit" in result.output
    assert "--quantization" in result.output


def test_a_gpu_that_is_elsewhere_is_planned_for_by_its_size() -> None:
    folder = models.model_dir("llama")
    here, there = (planned(folder, "--memory", "8GiB", "--device", kind) for kind in ("cpu", "cuda"))
    assert there["process"] > here["process"]
    result = RUNNER.invoke(app, ["plan", str(folder), "--device", "cuda"])
    assert result.exit_code == 0 if torch.cuda.is_available() else "--memory" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("24Gi", 24 << 30), ("24g", 24 * 10**9), ("1.5k", 1500),
        ("64 MiB", 64 << 20), ("1tib", 1 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_a_unit_with_an_i_is_a_power_of_1024_and_one_without_of_1000(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_is_held_back_is_said() -> None:
    words = ["plan", str(models.model_dir("llama")), "--memory", "2GiB"]
    assert "1.8 GiB of each rank's device may be used. That is 90% of 2.0 GiB (--memory)" in (
        RUNNER.invoke(app, words).output
    )
    whole = RUNNER.invoke(app, [*words, "--memory-utilization", "1"]).output
    assert "100% of 2.0 GiB" in whole
    assert "held back" not in whole


@pytest.mark.parametrize("text", ["", "much", "0", "0GiB", "-1GiB", "1PiB", "8", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size with its unit"):
        parse_size(text)
    result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--memory", text])
    assert result.exit_code == 2


def test_a_number_without_a_unit_is_refused_with_both_that_it_may_mean() -> None:
    result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--memory", "8"])
    assert "8GiB or 8GB" in " ".join(result.output.replace("│", "").split())


GPU = ("--device", "cuda", "--memory")


def refused(*words: object) -> str:
    """The refusal of a plan, which the exit status tells too."""
    result = RUNNER.invoke(app, ["plan", *map(str, words), "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["starts"]
    assert found["workers"] == {}
    refusal: str = found["refusal"]
    return refusal


@pytest.mark.parametrize(
    ("name", "num_ranks", "memory"), [(LARGE, 4, "80GiB"), (SMALL, 1, "24GiB"), (HUGE, 16, "80GiB")]
)
def test_a_published_model_starts_with_its_whole_context(name: str, num_ranks: int, memory: str) -> None:
    found = planned(SHAPES / name, *GPU, memory, "--tensor-parallel-size", num_ranks)
    assert found["starts"]
    assert found["refusal"] is None
    worker = found["workers"]["target"]
    assert worker["max_model_len"] == LONGEST
    used = sum(found[part] for part in ("weights", "step", "process")) + worker["num_bytes"]
    assert 0.995 * found["usable"] < used <= found["usable"] == int(0.9 * int(memory[:2]) * GIB)


def test_what_would_not_start_is_said_with_the_length_that_would() -> None:
    words = (SHAPES / SMALL, *GPU, "6GiB")
    assert "Set --max-model-len 54784 or auto" in refused(*words)
    assert planned(*words, "--max-model-len", 54784)["workers"]["target"]["max_model_len"] == 54784
    for auto in ("auto", "-1"):
        assert planned(*words, "--max-model-len", auto)["workers"]["target"]["max_model_len"] == 54784
    assert "Set --max-model-len" in refused(*words, "--max-model-len", 54785)
    shown = RUNNER.invoke(app, ["plan", *map(str, words)])
    assert shown.exit_code == 1
    assert "A worker would refuse to start" in shown.output


def test_a_length_that_the_model_does_not_have_is_refused_and_what_is_none_is_a_usage_error() -> None:
    assert "permitted for this model: 2 to 512, or auto" in refused(models.model_dir("llama"), "--max-model-len", 513)
    for text in ("much", "1.5"):
        result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--max-model-len", text])
        assert result.exit_code == 2
        assert "is not a whole number or auto" in " ".join(result.output.replace("│", "").split())


def test_a_cpu_keeps_kv_for_as_many_sequences_as_may_run() -> None:
    words = (models.model_dir("llama"), "--device", "cpu", "--memory", "8GiB")
    few, many = (planned(*words, "--max-num-seqs", number)["workers"]["target"] for number in (2, 8))
    assert many["num_tokens"] == 4 * few["num_tokens"] == 8 * (models.MAX_MODEL_LEN + 256)


def test_workers_that_share_a_device_divide_it() -> None:
    words = (SHAPES / SMALL, "--draft", SHAPES / SMALL, *GPU)
    found = planned(*words, "32GiB", "--num-draft-workers", 2)["workers"]
    assert found["target"]["num_tokens"] == found["draft"]["num_tokens"] > LONGEST
    assert "3 processes may use together" in refused(*words, "12GiB", "--num-draft-workers", 2)
