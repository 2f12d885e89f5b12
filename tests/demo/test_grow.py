"""Growth keeps the function, is complete, and is not repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo import grow as growth
from demo.grow import GrowthError, Shape, grow

DEMO = Path(growth.__file__).parent
TINY = Shape(hidden_size=96, num_layers=2, num_heads=6, num_kv_heads=2, intermediate_size=80)


def save_tiny(folder: Path, dtype: torch.dtype = torch.float32, *, is_tied: bool = True) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=TINY.hidden_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=64,
        intermediate_size=TINY.intermediate_size,
        initializer_range=0.1,
        rms_norm_eps=1e-2,
        tie_word_embeddings=is_tied,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder)


@torch.inference_mode()
def logits_of(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(token_ids).logits


SHAPES = [
    pytest.param(Shape(384, 5, 12, 4, 160), id="wider by a power of four, same groups"),
    pytest.param(Shape(384, 3, 16, 2, 96), id="larger groups"),
    pytest.param(Shape(256, 4, 16, 4, 128), id="width factor is no power of two"),
    pytest.param(TINY, id="same shape"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_growth_preserves_logits_in_float32(tmp_path: Path, shape: Shape, is_tied: bool) -> None:
    save_tiny(tmp_path / "small", is_tied=is_tied)
    grow(tmp_path / "small", tmp_path / "large", shape, dtype=torch.float32)
    token_ids = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = logits_of(tmp_path / "small", token_ids)
    assert expected.std() > 0.3, "a flat model would agree with anything"
    torch.testing.assert_close(logits_of(tmp_path / "large", token_ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_growth_of_a_bfloat16_checkpoint_loses_nothing(tmp_path: Path, shape: Shape) -> None:
    save_tiny(tmp_path / "small", torch.bfloat16)
    grow(tmp_path / "small", tmp_path / "large", shape)
    token_ids = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(1))
    expected = logits_of(tmp_path / "small", token_ids)
    torch.testing.assert_close(logits_of(tmp_path / "large", token_ids), expected, atol=1e-5, rtol=1e-5)


def test_added_weights_are_not_all_zero(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small")
    grow(tmp_path / "small", tmp_path / "large", Shape(384, 3, 12, 2, 160), dtype=torch.float32)
    weights = load_file(tmp_path / "large" / "model.safetensors")
    for layer in range(3):
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            assert (weight != 0).float().mean() > 0.99, name
            assert weight.abs().max() < 5, name


def test_finished_growth_is_reused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small")
    shape = Shape(384, 3, 12, 2, 160)
    weights = grow(tmp_path / "small", tmp_path / "large", shape) / "model.safetensors"
    before = weights.stat().st_ino
    grow(tmp_path / "small", tmp_path / "large", shape)
    assert weights.stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


def test_growth_is_repeated_when_source_or_shape_changed(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small")
    out = grow(tmp_path / "small", tmp_path / "large", Shape(384, 3, 12, 2, 160))
    grow(tmp_path / "small", out, Shape(384, 4, 12, 2, 160))
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 4
    before = (out / "model.safetensors").stat().st_ino
    save_tiny(tmp_path / "small", torch.bfloat16)
    grow(tmp_path / "small", out, Shape(384, 4, 12, 2, 160))
    assert (out / "model.safetensors").stat().st_ino != before


def test_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    with pytest.raises(GrowthError, match="not written by this program"):
        grow(tmp_path / "small", tmp_path / "mine", Shape(384, 3, 12, 2, 160))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(64, 3, 12, 2, 160), "hidden_size must be at least 96"),
        (Shape(384, 3, 12, 5, 160), "evenly"),
        (Shape(384, 3, 12, 6, 160), "per KV head are too few"),
    ],
)
def test_impossible_shape_is_refused_by_name(tmp_path: Path, shape: Shape, message: str) -> None:
    save_tiny(tmp_path / "small")
    with pytest.raises(GrowthError, match=message):
        grow(tmp_path / "small", tmp_path / "large", shape)
    assert not (tmp_path / "large").exists()


@pytest.mark.skipif(not (DEMO / "target" / "model.safetensors").exists(), reason="no trained pair here")
def test_grown_demo_target_has_the_same_logits(tmp_path: Path) -> None:
    # One added layer and the default width exercise every path at a fraction of the default's size.
    grow(DEMO / "target", tmp_path / "large", Shape(1536, 9, 24, 4, 1280))
    token_ids = torch.randint(3, 4096, (1, 48), generator=torch.Generator().manual_seed(1))
    expected = logits_of(DEMO / "target", token_ids)
    torch.testing.assert_close(logits_of(tmp_path / "large", token_ids), expected, atol=1e-5, rtol=1e-5)
