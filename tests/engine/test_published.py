"""Checkpoints published with quantized weights: read as their makers read them, or refused by name.

`published_weights.safetensors` holds one layer in each format and what it stands for. compressed-tensors 0.20 and
torchao 0.18 wrote theirs and read them back; AWQ's was read by GPT-QModel 7.7. GPTQ's and the blocks of fp8 were
written after their descriptions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.quantized_linear import Fp8Linear, Int8Linear
from outrider.engine.loading.checkpoint_formats import checkpoint_format, unpack
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.quantized_loading import read_as_plain
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import Engine, ModelLoadError, SequenceChunk
from tests import models
from tests.engine.quantized_checkpoints import ENCODERS, describe, write_pair
from tests.engine.sequences import text

GOLDEN = Path(__file__).parent / "published_weights.safetensors"


def golden_names() -> list[str]:
    with safe_open(GOLDEN, "pt") as file:
        return sorted(file.metadata())


def golden(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The description, the tensors of the layer and its weight."""
    with safe_open(GOLDEN, "pt") as file:
        described = json.loads(file.metadata()[name])
    prefix = f"{name}/"
    tensors = {key.removeprefix(prefix): each for key, each in load_file(GOLDEN).items() if key.startswith(prefix)}
    return described, tensors, tensors.pop("expected")


def logits(engine: Engine) -> torch.Tensor:
    kv: KVSequence = engine.new_sequence()
    kv.extend(20)
    found = engine.forward([SequenceChunk(kv, text(20, 5, engine.vocab_size), 20)])
    kv.free()
    return found


class TestOneWeight:
    @pytest.mark.parametrize("name", golden_names())
    def test_is_read_as_its_maker_reads_it(self, name: str) -> None:
        described, tensors, expected = golden(name)
        read = checkpoint_format(described).read(tensors)
        assert torch.equal(read.to(torch.bfloat16), expected)

    @pytest.mark.parametrize("name", golden_names())
    def test_all_its_tensors_are_asked_for(self, name: str) -> None:
        described, tensors, _ = golden(name)
        assert tensors.keys() <= set(checkpoint_format(described).tensor_names)

    def test_values_come_out_of_words_with_the_lowest_bits_first(self) -> None:
        assert unpack(torch.tensor([[0x76543210, -1]], dtype=torch.int32), 4).tolist() == [[*range(8), *[15] * 8]]
        assert unpack(torch.tensor([[-2]], dtype=torch.int32), 8).tolist() == [[254, 255, 255, 255]]

    def test_what_was_not_quantized_stays_as_it_is(self) -> None:
        weight = torch.randn(4, 64).to(torch.bfloat16)
        for name in golden_names():
            assert checkpoint_format(golden(name)[0]).read({"weight": weight}) is weight

    def test_scales_that_do_not_divide_the_weights_are_refused(self) -> None:
        described, tensors, _ = golden("ct-w8a8")
        with pytest.raises(ValueError, match="do not divide"):
            checkpoint_format(described).read({**tensors, "weight_scale": torch.ones(7, 1)})

    def test_values_without_a_scale_are_refused(self) -> None:
        described, tensors, _ = golden("fp8-block")
        del tensors["weight_scale_inv"]
        with pytest.raises(ValueError, match=r"scales .* missing"):
            checkpoint_format(described).read(tensors)

    @pytest.mark.parametrize(
        "tensors",
        [
            {"_weight_qdata": torch.zeros(8, 32, dtype=torch.int32), "_weight_scale": torch.ones(2, 8)},
            {"_weight_qdata": torch.zeros(8, 32, dtype=torch.int8), "_weight_scale": torch.ones(2, 8)},
        ],
        ids=["words of a kernel", "scales across"],
    )
    def test_layouts_of_torchaos_kernels_are_refused(self, tensors: dict[str, torch.Tensor]) -> None:
        with pytest.raises(ValueError, match="torchao's kernels"):
            checkpoint_format({"quant_method": "torchao"}).read(tensors)


class TestWholeModels:
    @pytest.mark.parametrize("method", ENCODERS)
    def test_a_quantized_checkpoint_says_what_its_weights_written_out_say(self, method: str, tmp_path: Path) -> None:
        quantized, plain = write_pair(method, tmp_path)
        engine = load_model(models.engine_config(quantized, "bfloat16"))
        assert torch.equal(logits(engine), logits(load_model(models.engine_config(plain, "bfloat16"))))
        assert batch_invariance_failures(engine) == []

    @pytest.mark.parametrize(
        ("described", "named"),
        [
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
            ({"quant_method": "hqq"}, "hqq"),
            ({"bits": 4}, "an unnamed method"),
            ({"quant_method": "gptq", "bits": 3}, "3 bits"),
            ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
            ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"format": "nvfp4-pack-quantized"}},
                },
                "nvfp4-pack-quantized",
            ),
            (
                {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
                "sparse",
            ),
            (
                {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
                "rotated",
            ),
        ],
    )
    def test_what_cannot_be_read_is_refused_by_name_with_the_way_out(
        self, described: dict[str, Any], named: str, tmp_path: Path
    ) -> None:
        directory = models.copy_of("llama", tmp_path / "model")
        describe(directory, described)
        with pytest.raises(ModelLoadError, match=rf"{named}.*--quantization int8 or fp8"):
            load_model(models.engine_config(directory))

    def test_a_missing_tensor_is_named_with_its_layer(self, tmp_path: Path) -> None:
        directory, _ = write_pair("gptq", tmp_path)
        tensors = load_file(directory / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.scales"]
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight \('scales' is missing\)"):
            load_model(models.engine_config(directory))

    @pytest.mark.parametrize("method", ENCODERS)
    def test_experts_are_read_one_by_one(self, method: str, tmp_path: Path) -> None:
        """Each has tensors of its own in the file; the model has them in one."""
        config = transformers.Qwen3MoeConfig(
            **models.COMMON, num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=96,
            num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        original = tmp_path / "original"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(original)
        quantized, plain = write_pair(method, tmp_path, original)
        described = transformers.AutoConfig.from_pretrained(quantized)
        read_as_plain(described)
        load = transformers.AutoModelForCausalLM.from_pretrained
        found = load(quantized, config=described, dtype=torch.bfloat16).state_dict()
        expected = load(plain, dtype=torch.bfloat16).state_dict()
        assert any("experts" in name for name in found)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


class TestKeepingTheGrid:
    """A weight that was published in 8 bits is rounded to 8 bits again: it must come out as it went in."""

    @pytest.mark.parametrize("name", ["ct-w8a8", "ct-w8a16"])
    def test_int8_keeps_every_value_and_every_scale(self, name: str) -> None:
        described, tensors, expected = golden(name)
        built = Int8Linear(layer(expected))
        assert torch.equal(built.scales, tensors["weight_scale"].flatten())
        written = built.weight[:, : expected.shape[1]].float() * built.scales.float().unsqueeze(1)
        assert torch.equal(written, checkpoint_format(described).read(tensors))

    def test_fp8_keeps_every_value_and_every_scale(self) -> None:
        _, tensors, expected = golden("ct-fp8-dynamic")
        built = Fp8Linear(layer(expected))
        assert torch.equal(built.scales, tensors["weight_scale"].flatten())
        assert torch.equal(built.weight.float(), tensors["weight"].float())


def layer(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    return linear
