"""Tests of memory plans: the planned memory of a model is what the loaded engine takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.kv.kv_plan import GIB, MIB, Budget, DeviceMemory, in_words, plan_kv
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from outrider.errors import ConfigurationError
from tests import models

BF16 = ServingShape(torch.bfloat16)


def copy_of_config(family: str, directory: Path) -> Path:
    """A model folder without weights."""
    directory.mkdir()
    (directory / "config.json").write_bytes((models.model_dir(family) / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt"])
def test_weights_and_kv_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    engine = models.engine(family)
    needs = plan_memory(copy_of_config(family, tmp_path / "model"), ServingShape(torch.float32))
    assert needs.weights == 4 * engine.num_parameters
    assert needs.kv_per_token == engine.kv_bytes_per_token
    assert needs.longest == engine.max_model_len


def test_a_tied_output_layer_is_packed_once_more_where_it_is() -> None:
    tied = models.model_dir("qwen3")
    packed = plan_memory(tied, BF16).weights
    shared = plan_memory(tied, ServingShape(torch.bfloat16, device_type="cuda")).weights
    assert packed - shared == 2 * models.VOCAB_SIZE * 64


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_eight_bits_are_half_but_for_embeddings_and_the_output_layer(quantization: str) -> None:
    plain = plan_memory(models.model_dir("llama"), BF16).weights
    rounded = plan_memory(models.model_dir("llama"), ServingShape(torch.bfloat16, quantization)).weights
    embeddings = 2 * 2 * models.VOCAB_SIZE * 64
    assert (plain - embeddings) / 2 < rounded - embeddings < 0.6 * (plain - embeddings)


def test_ranks_share_weights_and_heads() -> None:
    """Norms are everybody's; of two KV heads four ranks have one each."""
    alone, two, four = (
        plan_memory(models.model_dir("llama"), ServingShape(torch.float32, num_ranks=n)) for n in (1, 2, 4)
    )
    assert alone.weights / 2 < two.weights < 0.51 * alone.weights
    assert alone.weights / 4 < four.weights < 0.30 * alone.weights
    assert (two.kv_per_token, four.kv_per_token) == (alone.kv_per_token // 2,) * 2


def test_tokens_that_fit_are_what_is_left() -> None:
    needs = plan_memory(models.model_dir("llama"), BF16)
    options = models.engine_config(models.model_dir("llama"), "bfloat16", block_size=1, max_model_len=5)
    longest = needs.kv_per_token * (5 + 256)

    def planned(memory: int) -> int:
        return plan_kv(needs, Budget(memory, memory, ""), options, "cpu").num_tokens

    with pytest.raises(ConfigurationError, match="does not fit"):
        planned(needs.fixed - 1)
    assert planned(needs.fixed + needs.kv_per_token + longest) == 261
    assert planned(needs.fixed + needs.kv_per_token + longest + 10 * needs.kv_per_token) == 271


@pytest.mark.parametrize("num_ranks_here", [1, 2])
def test_what_cannot_fit_is_refused_with_the_numbers(num_ranks_here: int) -> None:
    folder = models.model_dir("llama")
    needs = plan_memory(folder, BF16)
    options = models.engine_config(folder, "bfloat16", max_num_seqs=1)
    kv = needs.kv_per_token * (needs.longest + 256)
    there = num_ranks_here * (needs.fixed + kv + 8 * needs.kv_per_token)  # and the block that no sequence owns

    def check(memory: int, kv_cache_bytes: int | None = None) -> None:
        gib = None if kv_cache_bytes is None else kv_cache_bytes / GIB
        budget = DeviceMemory(memory, memory, is_own=True).budget(1.0, num_ranks_here)
        plan_kv(needs, budget, replace(options, kv_cache_gib=gib), "cpu")

    check(there)
    check(there, kv_cache_bytes=10 * kv)
    match = r"does not fit: .* are free, and .* missing for the weights"
    for kv_cache_bytes in (None, 10 * kv):
        with pytest.raises(ConfigurationError, match=match) as refused:
            check(there - num_ranks_here, kv_cache_bytes)
        assert (f"of each of {num_ranks_here} ranks" in refused.value.message) == (num_ranks_here > 1)


def test_a_worker_looks_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(100 * MIB, 100 * MIB, is_own=False)
    monkeypatch.setattr("outrider.engine.loading.loading.machine_memory", lambda: memory)
    with pytest.raises(ConfigurationError, match="does not fit: 100 MiB are free"):
        load_model(models.engine_config(models.model_dir("llama")))


def test_a_model_without_a_plan_is_not_cut() -> None:
    with pytest.raises(ConfigurationError, match="no plan to shard OPTForCausalLM"):
        plan_memory(models.model_dir("opt"), ServingShape(num_ranks=2))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json: name a folder"):
            plan_memory(folder, BF16)
    transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="the engine cannot run"):
        plan_memory(tmp_path, BF16)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (130 * MIB, "130 MiB"), (15 * GIB, "15.0 GiB")],
)
def test_sizes_are_read_easily(num_bytes: int, words: str) -> None:
    assert in_words(num_bytes) == words
