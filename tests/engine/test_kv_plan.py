"""KV is sized by what a device has left, and a model that does not fit is refused before its weights are opened.

The models are the shapes of published ones (`tests/model_shapes`): a config.json without weights.
"""

from __future__ import annotations

import functools
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv.kv_plan import (
    GIB,
    LOOKAHEAD_ENTRIES,
    MIB,
    Budget,
    DeviceMemory,
    KvPlan,
    Load,
    ModelLoadError,
    ModelMemory,
    divide,
    plan_kv,
)
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from outrider.engine.options import AUTO, EngineOptions
from outrider.errors import ConfigurationError
from tests import models

SHAPES = Path(__file__).parents[1] / "model_shapes"
LARGE, SMALL, HUGE = "llama-3.3-70b", "llama-3.2-1b", "llama-3.1-405b"
LONGEST = 131_072


@functools.cache
def needs(name: str, num_ranks: int = 1, device_type: str = "cuda") -> ModelMemory:
    return plan_memory(SHAPES / name, ServingShape(torch.bfloat16, "none", num_ranks, device_type))


def options(name: str = LARGE, **given: Any) -> EngineOptions:
    return EngineOptions(model=SHAPES / name, **given)


def on_gpu(name: str, num_ranks: int, gib: float, **given: Any) -> KvPlan:
    """The plan of a rank on a GPU of its own."""
    memory = DeviceMemory(int(gib * GIB), int(gib * GIB), is_own=True)
    wanted = options(name, **given)
    return plan_kv(needs(name, num_ranks), memory.budget(wanted.memory_utilization), wanted, "cuda")


class TestPublishedModels:
    def test_70b_on_four_gpus_of_80_gib_has_its_whole_context(self) -> None:
        of_a_rank = needs(LARGE, 4)
        assert of_a_rank.kv_per_token == 80 * 1024
        assert round(of_a_rank.weights / GIB, 1) == 32.9
        found = on_gpu(LARGE, 4, 80)
        assert found.max_model_len == LONGEST
        assert (LONGEST + LOOKAHEAD_ENTRIES) * of_a_rank.kv_per_token / GIB == pytest.approx(10.02, abs=0.005)
        assert found.num_longest == 3
        assert found.num_bytes / GIB == pytest.approx(0.9 * 80 - of_a_rank.fixed / GIB, abs=0.05)

    def test_a_1b_draft_on_a_card_of_24_gib_has_its_whole_context(self) -> None:
        found = on_gpu(SMALL, 1, 24, has_trees=True)
        assert found.max_model_len == LONGEST
        assert found.num_longest == 4
        copies = found.num_scratch_blocks * found.block_size * needs(SMALL).kv_per_token
        assert copies == 256 * MIB
        assert needs(SMALL).fixed + found.num_bytes + copies <= 0.9 * 24 * GIB

    def test_405b_on_sixteen_gpus_of_80_gib_has_its_whole_context(self) -> None:
        assert needs(HUGE, 16).kv_per_token == 126 * 2 * 128 * 2, "two ranks share a KV head"
        found = on_gpu(HUGE, 16, 80)
        assert found.max_model_len == LONGEST
        assert found.num_longest == 2

    @pytest.mark.parametrize(("name", "num_ranks", "gib"), [(LARGE, 4, 80), (SMALL, 1, 24), (HUGE, 16, 80)])
    def test_none_has_it_in_the_2_gib_that_were_the_default(self, name: str, num_ranks: int, gib: float) -> None:
        with pytest.raises(ModelLoadError, match=r"2\.00 GiB of KV cache hold no sequence of 131072 tokens"):
            on_gpu(name, num_ranks, gib, kv_cache_gib=2.0)

    @pytest.mark.parametrize(("name", "num_ranks", "gib"), [(LARGE, 4, 40), (SMALL, 1, 6), (HUGE, 16, 56)])
    def test_on_a_smaller_device_the_length_that_fits_is_named_and_auto_takes_it(
        self, name: str, num_ranks: int, gib: float
    ) -> None:
        with pytest.raises(ModelLoadError) as refused:
            on_gpu(name, num_ranks, gib)
        (length,) = map(int, re.findall(r"Set --max-model-len (\d+) or auto", refused.value.message))
        assert on_gpu(name, num_ranks, gib, max_model_len=length).max_model_len == length
        assert on_gpu(name, num_ranks, gib, max_model_len=AUTO).max_model_len == length
        with pytest.raises(ModelLoadError):
            on_gpu(name, num_ranks, gib, max_model_len=length + 1)

    def test_where_no_length_fits_none_is_named(self) -> None:
        for max_model_len in (None, AUTO):
            with pytest.raises(ModelLoadError, match=r"does not fit.*--quantization.*more ranks") as refused:
                on_gpu(LARGE, 4, 36, max_model_len=max_model_len)
            assert "--max-model-len" not in refused.value.message


class TestBeforeLoading:
    """Weights that no reader could read lie in the folder: whoever opens them complains of them, not of memory."""

    @pytest.fixture
    def folder(self, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
        shutil.copytree(SHAPES / request.param, tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
        return tmp_path / "model"

    @pytest.mark.parametrize(
        ("folder", "num_ranks", "gib"), [(LARGE, 4, 40), (SMALL, 1, 6), (HUGE, 16, 48)], indirect=["folder"]
    )
    def test_a_model_that_does_not_fit_is_refused_with_its_weights_unopened(
        self, folder: Path, num_ranks: int, gib: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_gpu(monkeypatch, gib)
        group: Any = SimpleNamespace(rank=0, size=num_ranks, least=lambda *numbers: numbers)
        with pytest.raises(ConfigurationError, match=f"does not fit: {gib}.0 GiB are free"):
            load_model(EngineOptions(model=folder), None if num_ranks == 1 else group)

    @pytest.mark.parametrize("folder", [SMALL], indirect=True)
    def test_what_fits_goes_on_to_its_weights(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        has_gpu(monkeypatch, 24)
        with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
            load_model(EngineOptions(model=folder))

    def test_ranks_decide_by_the_least_memory_of_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        has_gpu(monkeypatch, 80)
        group: Any = SimpleNamespace(rank=0, size=4, least=lambda *numbers: tuple(each // 2 for each in numbers))
        with pytest.raises(ConfigurationError, match=r"Set --max-model-len 21760 or auto"):
            load_model(EngineOptions(model=with_empty_weights(LARGE)), group)


def has_gpu(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    """As far as a worker looks before it loads."""
    monkeypatch.setattr("outrider.engine.loading.loading.check_device", lambda _: None)
    monkeypatch.setattr("outrider.engine.loading.loading.device_for", lambda _: "cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(gib * GIB), int(gib * GIB)))


def with_empty_weights(name: str) -> Path:
    folder = models.root_dir() / f"empty-{name}"
    if not folder.exists():
        shutil.copytree(SHAPES / name, folder)
        (folder / "model.safetensors").write_bytes(b"")
    return folder


class TestTheLoadedEngine:
    def load(self, monkeypatch: pytest.MonkeyPatch, num_tokens: int, **given: Any) -> Any:
        """An engine on a machine that has left the KV of so many tokens, and the block that no sequence owns."""
        config = models.engine_config(models.model_dir("llama"), "bfloat16", memory_utilization=1.0, **given)
        of_it = plan_memory(config.model, ServingShape.of(config, 1, "cpu"))
        free = of_it.fixed + (num_tokens + 8) * of_it.kv_per_token
        memory = DeviceMemory(free, free, is_own=False)
        monkeypatch.setattr("outrider.engine.loading.loading.machine_memory", lambda: memory)
        return models.load(config)

    def test_auto_is_what_fits(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        engine = self.load(monkeypatch, LOOKAHEAD_ENTRIES + 104, max_model_len=AUTO)
        assert engine.max_model_len == engine.config.max_model_len == 104
        assert engine.allocator.num_blocks - 1 == (LOOKAHEAD_ENTRIES + 104) // 8
        assert f"auto: 104 tokens, what fits; the model's is {models.MAX_MODEL_LEN}" in caplog.text

    def test_auto_is_the_models_own_where_that_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.load(monkeypatch, 4 * models.MAX_MODEL_LEN, max_model_len=AUTO)
        assert engine.max_model_len == models.MAX_MODEL_LEN

    def test_the_cache_has_the_planned_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = self.load(monkeypatch, 1600)
        assert engine.allocator.num_blocks == 201
        assert all(keys.shape[0] == values.shape[0] == 1608 for keys, values in engine.caches)

    def test_kv_is_not_committed_before_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = resident()
        engine = self.load(monkeypatch, 2_000_000, max_num_seqs=2000)
        reserved = engine.allocator.num_blocks * engine.block_size * engine.kv_bytes_per_token
        assert reserved > 500 * MIB
        assert resident() - before < reserved / 4


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class TestShares:
    def test_a_share_is_of_the_whole_device_as_long_as_so_much_is_free(self) -> None:
        """A target with 0.6 and a draft with 0.3 get the same, whichever starts first or starts again."""
        for free in (100 * GIB, 70 * GIB, 61 * GIB):
            assert DeviceMemory(100 * GIB, free, is_own=True).usable(0.6) == 60 * GIB
        assert DeviceMemory(100 * GIB, 50 * GIB, is_own=True).usable(0.6) == 30 * GIB

    def test_two_workers_on_one_machine_leave_a_fifth(self) -> None:
        machine = DeviceMemory(24 * GIB, 24 * GIB, is_own=False)
        assert machine.budget(None).usable == int(0.4 * 24 * GIB)
        assert DeviceMemory(24 * GIB, 24 * GIB, is_own=True).budget(None).usable == int(0.9 * 24 * GIB)
        assert machine.budget(0.7).usable == int(0.7 * 24 * GIB)

    def test_ranks_on_one_machine_share_it(self) -> None:
        assert DeviceMemory(80 * GIB, 80 * GIB, is_own=False).budget(0.5, num_ranks=4).usable == 10 * GIB

    def test_on_a_cpu_there_is_no_more_kv_than_sequences_can_fill(self) -> None:
        found = plan_kv(needs(SMALL, 1, "cpu"), Budget(200 * GIB, 200 * GIB, ""), options(SMALL, max_num_seqs=3), "cpu")
        assert found.num_tokens == 3 * (LONGEST + LOOKAHEAD_ENTRIES)
        assert found.num_longest == 3

    def test_workers_that_share_a_device_keep_kv_of_equally_many_tokens_and_fit_together(self) -> None:
        memory = DeviceMemory(80 * GIB, 80 * GIB, is_own=True)
        loads = [Load(needs(LARGE, 4), options()), Load(needs(SMALL), options(SMALL, has_trees=True), num_ranks=2)]
        budgets = divide(loads, memory, 0.9, "cuda")
        assert budgets[0].usable + 2 * budgets[1].usable <= 72 * GIB
        assert budgets[0].usable + 2 * budgets[1].usable > 71.9 * GIB
        target, draft = (
            plan_kv(each.needs, budget, each.options, "cuda") for each, budget in zip(loads, budgets, strict=True)
        )
        assert target.num_tokens == draft.num_tokens > LONGEST

    def test_workers_whose_models_alone_do_not_fit_together_are_refused(self) -> None:
        memory = DeviceMemory(40 * GIB, 40 * GIB, is_own=True)
        loads = [Load(needs(LARGE, 4), options()), Load(needs(SMALL), options(SMALL))]
        told = r"that 2 processes may use together .* are missing .*1 × 34\.\d GiB and 1 × 3\.7"
        with pytest.raises(ModelLoadError, match=told):
            divide(loads, memory, 0.9, "cuda")

    def test_kv_that_is_asked_for_may_use_all_that_is_free_and_no_more(self) -> None:
        assert on_gpu(SMALL, 1, 24, kv_cache_gib=19.5).num_bytes == pytest.approx(19.5 * GIB, rel=1e-3)
        with pytest.raises(ModelLoadError, match=r"does not fit: 24\.0 GiB are free.*Lower --kv-cache-gib"):
            on_gpu(SMALL, 1, 24, kv_cache_gib=20.5)


sizes = st.integers(0, 200_000)


@given(
    model=st.builds(
        ModelMemory,
        weights=sizes,
        weights_read=sizes,
        kv_per_token=st.integers(1, 40),
        step=sizes,
        process=sizes,
        longest=st.integers(2, 3000),
    ),
    usable=st.integers(0, 800_000),
    wanted=st.one_of(st.none(), st.just(AUTO), st.integers(2, 3000)),
    block_size=st.sampled_from([1, 16, 256]),
    max_num_seqs=st.integers(1, 9),
    device_type=st.sampled_from(["cpu", "cuda"]),
    has_trees=st.booleans(),
)
@settings(max_examples=300)
def test_a_plan_fits_and_a_refusal_is_right(
    model: ModelMemory,
    usable: int,
    wanted: int | str | None,
    block_size: int,
    max_num_seqs: int,
    device_type: str,
    has_trees: bool,
) -> None:
    chosen = EngineOptions(
        model=Path("m"),
        max_model_len=min(wanted, model.longest) if isinstance(wanted, int) else wanted,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        has_trees=has_trees,
    )
    budget = Budget(usable, usable, "")
    block_bytes = block_size * model.kv_per_token
    beside = 1 + (32 if has_trees and device_type == "cuda" else 0)
    room = (usable - model.fixed) // block_bytes - beside  # blocks
    length = chosen.max_model_len if isinstance(chosen.max_model_len, int) else model.longest
    try:
        found = plan_kv(model, budget, chosen, device_type)
    except ModelLoadError:
        least = 2 if wanted == AUTO else length
        assert room * block_size < least + LOOKAHEAD_ENTRIES
        return
    assert found.num_blocks - 1 <= room
    assert found.num_tokens >= found.max_model_len + LOOKAHEAD_ENTRIES
    assert found.max_model_len == length or wanted == AUTO
    if wanted == AUTO and found.max_model_len < length:
        assert (
            (room + 1) * block_size - LOOKAHEAD_ENTRIES > found.max_model_len >= room * block_size - LOOKAHEAD_ENTRIES
        )
        with pytest.raises(ModelLoadError):
            plan_kv(model, budget, replace(chosen, max_model_len=found.max_model_len + 1), device_type)
    if device_type == "cuda":
        assert found.num_blocks - 1 == room
    else:
        assert found.num_longest <= max_num_seqs or found.num_blocks - 1 == room
