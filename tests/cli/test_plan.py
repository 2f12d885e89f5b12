"""`outrider plan` says what fits, and where nothing does what to change."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.cli import app
from outrider.cli.plan import parse_size
from tests import models

RUNNER = CliRunner()


def planned(*words: object) -> dict[str, Any]:
    result = RUNNER.invoke(app, ["plan", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_is_left_holds_both_models_kv() -> None:
    target = models.model_dir("llama")
    alone = planned(target, "--memory", "1GiB")
    both = planned(target, "--draft", models.model_dir("qwen3"), "--memory", "1GiB")
    assert both["num_tokens"] < alone["num_tokens"]
    fixed = sum(alone[name] for name in ("weights", "step", "process"))
    assert alone["num_tokens"] == (int(0.9 * 2**30) - fixed) // alone["kv_per_token"]
    assert both["draft"]
    assert alone["sessions_by_length"] == {
        str(models.MAX_MODEL_LEN): alone["num_tokens"] // models.MAX_MODEL_LEN
    }


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
    ("text", "size"), [("80GiB", 80 << 30), ("1.5k", 1536), ("64 MB", 64 << 20), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "1PiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    result = RUNNER.invoke(app, ["plan", str(models.model_dir("llama")), "--memory", text])
    assert result.exit_code == 2
