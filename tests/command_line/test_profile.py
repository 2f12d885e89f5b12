"""`outrider profile`: where a step's time goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from command_line import app
from outrider.engine import profiling
from outrider.engine.profiling import DeviceSpeed, measure_device, profile_steps
from tests import models


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(profiling, "PRODUCT_WIDTH", {"cpu": 64})


@pytest.mark.parametrize(("family", "use_kernels"), [("llama", True), ("opt", False)])
def test_the_parts_of_a_step_are_its_whole(family: str, use_kernels: bool) -> None:
    engine = models.engine(family, "bfloat16")
    speed = DeviceSpeed(bytes_per_s=1e9, flops_per_s=1e9)
    found = list(profile_steps(engine, speed, 10**6, [(3, 2), (1, 1)], context_len=20, num_steps=4))
    assert [(each.num_sequences, each.num_rows) for each in found] == [(1, 1), (3, 2)]
    for each in found:
        assert each.plan_ms > 0.0
        assert each.choice_ms > 0.0
        assert each.ranks_ms == 0.0
        total = each.plan_ms + each.model_ms + each.ranks_ms + each.choice_ms
        assert total == pytest.approx(each.whole_ms)
    one, six = found
    assert one.read_ms == pytest.approx(1.0 + 20 * engine.kv_bytes_per_token / 1e6)
    assert one.compute_ms == pytest.approx(2 * 500_000 / 1e6)
    assert six.compute_ms == pytest.approx(6 * one.compute_ms)
    assert (one.is_bound_by_reading, six.is_bound_by_reading) == (True, False)
    engine.allocator.check_integrity([])


def test_what_is_timed_is_as_it_was_afterwards() -> None:
    from outrider.engine import model
    from outrider.engine.layers import decoder
    from outrider.engine.ranks.rank_group import RankGroup

    seen = [(decoder, "RaggedStep"), (model, "plan_step"), (RankGroup, "sum")]
    before = [getattr(*each) for each in seen]
    list(profile_steps(models.engine(), DeviceSpeed(1e9, 1e9), 1, [(1, 1)], context_len=3, num_steps=2))
    assert [getattr(*each) for each in seen] == before


def test_the_devices_speeds_are_measured() -> None:
    speed = measure_device("cpu", torch.float32)
    assert speed.bytes_per_s > 1e6
    assert speed.flops_per_s > 1e6


@pytest.mark.thorough
def test_the_command_says_what_binds() -> None:
    words = [
        "profile",
        str(models.model_dir("llama")),
        "--batch-sizes",
        "1,2",
        "--rows",
        "1,4",
        "--context",
        "16",
    ]
    told = CliRunner().invoke(app, [*words, "--steps", "2", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert [(each["num_sequences"], each["num_rows"]) for each in found["steps"]] == [
        (1, 1),
        (1, 4),
        (2, 1),
        (2, 4),
    ]
    assert {each["bound_by"] for each in found["steps"]} <= {"reading", "arithmetic"}
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, "--steps", "2"])
    assert "sequences × rows" in shown.output
    assert "2 × 4" in shown.output


@pytest.mark.parametrize("words", [["--batch-sizes", "0"], ["--rows", "many"]])
def test_what_is_no_list_of_numbers_is_refused(words: list[str]) -> None:
    told = CliRunner().invoke(app, ["profile", str(models.model_dir("llama")), *words])
    assert told.exit_code == 2
    assert "is no list of numbers" in told.output


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    from outrider.errors import ConfigurationError

    told = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert isinstance(told.exception, ConfigurationError)
