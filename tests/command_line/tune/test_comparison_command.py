"""`outrider tune` with several sources, from flags to advice, on tiny models and heads."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from command_line import app
from draft_worker.__main__ import parse_arguments as parse_draft_arguments
from outrider.errors import ConfigurationError, OutriderError
from target_worker.__main__ import parse_arguments as parse_target_arguments
from tests.command_line.tune.small_target import eagle3_dir, medusa_dir, target_dir
from tests.models import model_dir

QUICK = (
    *("--dtype", "float32", "--budget-s", 0.5, "--max-tokens", 24, "--batch-sizes", "1,4", "--context-len", 32),
    *("--max-speculative-tokens", 3),
)


def run(*arguments: object) -> Result:
    environment = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner(env=environment).invoke(app, ["tune", *map(str, arguments)])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("def f(x):", "import os", "return x")))
    return path


def parse(line: str) -> None:
    name, command, *arguments = shlex.split(line)
    assert name == "outrider"
    if command != "serve":
        {"target-worker": parse_target_arguments, "draft-worker": parse_draft_arguments}[command](arguments)


def test_every_source_is_measured_and_the_twin_is_always_right(prompts: Path) -> None:
    sources = (target_dir(), target_dir(1), target_dir(1, 9), eagle3_dir(), medusa_dir())
    flags = [word for folder in sources for word in ("--draft", folder)]
    result = run("--target", target_dir(), *flags, "--all-sources", *QUICK, "--prompts", prompts, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    read: dict[str, Any] = json.loads(result.stdout)
    found = {(each["kind"], each["place"], each["num_masks"], Path(each["folder"]).name) for each in read["sources"]}
    masked = [("draft model with mask tokens", "draft worker", count, target_dir(1, 9).name) for count in range(4)]
    assert found == {
        ("draft model", "draft worker", None, target_dir().name),
        ("draft model", "draft worker", None, target_dir(1).name),
        *masked,
        ("EAGLE-3 head", "draft worker", None, eagle3_dir().name),
        ("EAGLE-3 head", "beside the target", None, eagle3_dir().name),
        ("Medusa heads", "beside the target", None, medusa_dir().name),
        ("first layers of the target", "draft worker", None, target_dir().name),
        ("lookup", "target alone", None, target_dir().name),
    }
    by_name = {(each["name"], each["place"]): each for each in read["sources"]}
    twin = by_name[target_dir().name, "draft worker"]
    assert [each["mean_length"] for each in twin["acceptance"]] == [2.0, 3.0, 4.0]
    assert by_name["1 layer of the target", "draft worker"]["num_layers"] == 1
    assert by_name["lookup", "target alone"]["draft"] is None
    assert read["texts"]["num_prompts"] == 3
    assert 24 < read["texts"]["num_tokens"] <= 3 * 24  # a text may end before
    assert all([forecast["batch"] for forecast in each["forecasts"]] == [1, 4] for each in read["sources"])
    speedups = [each["forecasts"][0]["speedup"] for each in read["sources"]]
    assert speedups == sorted(speedups, reverse=True)
    for line in read["flags"]:
        parse(line)


@pytest.mark.thorough
def test_what_is_said_to_a_person(prompts: Path) -> None:
    result = run("--target", target_dir(), "--draft", eagle3_dir(), *QUICK, "--prompts", prompts)
    assert result.exit_code == 0, result.stderr
    for words in ("Tokens a step", "Predicted over plain decoding", "beside the target", "draft worker", "lookup"):
        assert words in result.stdout
    assert "tokens were compared" in result.stdout
    assert "outrider target-worker" in result.stdout


@pytest.mark.thorough
def test_layers_alone_need_no_draft(prompts: Path) -> None:
    result = run("--target", target_dir(), "--early-exit-layer", 1, *QUICK, "--prompts", prompts, "--flags")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "LOAD REPORT" not in result.output
    for line in result.stdout.splitlines():
        parse(line)


class TestBadInput:
    def test_a_head_of_another_target_is_named_with_it(self) -> None:
        result = run("--target", model_dir("llama"), "--draft", eagle3_dir())
        assert isinstance(result.exception, OutriderError)
        assert str(eagle3_dir()) in result.exception.message
        assert str(model_dir("llama")) in result.exception.message

    def test_a_head_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({"fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
        result = run("--target", target_dir(), "--draft", tmp_path)
        assert isinstance(result.exception, OutriderError)
        assert "EAGLE 1 or 2" in result.exception.message

    @pytest.mark.parametrize(("count", "words"), [(0, "at least one layer"), (3, "leaves nothing out")])
    def test_layers_that_the_target_has_not(self, count: int, words: str) -> None:
        result = run("--target", target_dir(), "--early-exit-layer", count)
        assert isinstance(result.exception, OutriderError)
        assert f"--early-exit-layer {count}" in result.exception.message
        assert words in result.exception.message

    def test_a_mask_token_that_is_none(self) -> None:
        result = run("--target", target_dir(), "--draft", target_dir(1, 10**6))
        assert isinstance(result.exception, OutriderError)
        assert "pard_token" in result.exception.message

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        result = run("--target", target_dir(), "--draft", target_dir(1), "--draft", tmp_path / "nothing")
        assert isinstance(result.exception, ConfigurationError)
        assert "no such folder" in result.exception.message
