"""Grows a small Llama checkpoint into a large one with the same outputs.

    python -m demo.grow --model demo/target --out DIR

The large model costs as much as a real model of its size and generates the same tokens as the small one, so a
benchmark has realistic step times, acceptance and output without a download.

The hidden state is padded with zeros and stays zero there: the embedding has zero columns, `o_proj` and `down_proj`
have zero rows. Weights that multiply those zeros are random, and so are those inside an added head, neuron or layer
up to its output projection, which is zero. RMSNorm takes the mean over more numbers, so its weight shrinks by
sqrt(old / new) and its epsilon by old / new.

That factor determines the default width. Rounded to bfloat16, a weight times sqrt(384 / 1024) changes the function;
times sqrt(384 / 1536) = 1/2 it is exact, in the file and in every bfloat16 product after it. So the default is 1536
wide with fewer layers. Where a chosen width gives no power of two the norm weights are stored in float32: a model
loaded in float32 is then still exact, one loaded in bfloat16 rounds them. README.md has the measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RECORD_NAME = "grown.json"
WEIGHTS_NAME = "model.safetensors"
# Raise it when the layout of the output changes, so that older outputs are rebuilt.
FORMAT = 1
RANDOM_STD = 0.02


class GrowthError(ValueError):
    """The checkpoint cannot be grown, or not into this shape."""


@dataclass(frozen=True)
class Shape:
    """A Llama's shape; the head dimension never changes."""

    hidden_size: int = 1536
    num_layers: int = 11
    num_heads: int = 24
    num_kv_heads: int = 4
    intermediate_size: int = 4096


@dataclass(frozen=True)
class Plan:
    """Old and new shape, with a random generator."""

    old: Shape
    new: Shape
    head_dim: int
    generator: torch.Generator

    def noise(self, *size: int) -> torch.Tensor:
        """Random weights, float32 [*size]."""
        return torch.randn(*size, generator=self.generator) * RANDOM_STD

    def norm_scale(self) -> float:
        """Factor for RMSNorm weights."""
        return math.sqrt(self.old.hidden_size / self.new.hidden_size)

    def head_rows(self) -> torch.Tensor:
        """Target rows of the old query heads: int64 [old heads * head_dim].

        Query head h reads KV head h // (heads / kv_heads). Old KV heads keep their numbers, so the old heads of KV
        head j become the first ones of its new, possibly larger group.
        """
        old_group = self.old.num_heads // self.old.num_kv_heads
        new_group = self.new.num_heads // self.new.num_kv_heads
        heads = torch.arange(self.old.num_heads)
        moved = heads // old_group * new_group + heads % old_group
        return (moved[:, None] * self.head_dim + torch.arange(self.head_dim)).flatten()


def read_shape(config: dict[str, Any]) -> Shape:
    """The shape in a transformers Llama config."""
    return Shape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
    )


def check(config: dict[str, Any], new: Shape) -> None:
    """Raise GrowthError unless the model can be grown into the shape."""
    if config.get("model_type") != "llama":
        raise GrowthError(f"only Llama checkpoints can be grown, this one is {config.get('model_type')!r}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise GrowthError("models with biases cannot be grown")
    old = read_shape(config)
    for name, size in asdict(old).items():
        if getattr(new, name) < size:
            raise GrowthError(f"{name} must be at least {size}, not {getattr(new, name)}")
    if new.num_heads % new.num_kv_heads:
        raise GrowthError(f"{new.num_heads} heads cannot share {new.num_kv_heads} KV heads evenly")
    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    if new_group < old_group:
        raise GrowthError(f"{old_group} heads share a KV head, so {new_group} per KV head are too few")


def grow_input(weight: torch.Tensor, num_rows: int, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A projection out of k joined hidden states: [old out, k * old hidden] -> [num_rows, k * new hidden]."""
    parts = []
    for part in weight.split(plan.old.hidden_size, dim=1):
        grown = plan.noise(num_rows, plan.new.hidden_size)
        grown[rows, : plan.old.hidden_size] = part
        parts.append(grown)
    return torch.cat(parts, dim=1)


def _grow_output(weight: torch.Tensor, num_columns: int, columns: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A projection into the hidden state: [old hidden, old in] -> [new hidden, num_columns], else zero."""
    grown = torch.zeros(plan.new.hidden_size, num_columns)
    grown[: plan.old.hidden_size, columns] = weight
    return grown


def grow_norm(weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """An RMSNorm weight: [old hidden] -> [new hidden]."""
    grown = 1 + plan.noise(plan.new.hidden_size)
    grown[: plan.old.hidden_size] = weight * plan.norm_scale()
    return grown


def _old_layer(weights: dict[str, torch.Tensor], index: int, plan: Plan) -> dict[str, torch.Tensor]:
    """The weights of one old layer; of an added layer, empty matrices."""
    prefix = f"model.layers.{index}."
    if index < plan.old.num_layers:
        return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    hidden = plan.old.hidden_size
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    rows_in = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return (
        {name: torch.ones(hidden) for name in norms}
        | {f"{name}.weight": torch.empty(0, hidden) for name in rows_in}
        | {f"{name}.weight": torch.empty(hidden, 0) for name in ("self_attn.o_proj", "mlp.down_proj")}
    )


def grow_layer(layer: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """One decoder layer in the new shape."""
    new, dim = plan.new, plan.head_dim
    # An added layer has none of the old heads and neurons.
    has_old = len(layer["mlp.up_proj.weight"]) > 0
    none = torch.arange(0)
    q_rows = plan.head_rows() if has_old else none
    kv_rows = torch.arange(plan.old.num_kv_heads * dim) if has_old else none
    mlp_rows = torch.arange(plan.old.intermediate_size) if has_old else none
    num_rows = {
        "self_attn.q_proj": (new.num_heads * dim, q_rows),
        "self_attn.k_proj": (new.num_kv_heads * dim, kv_rows),
        "self_attn.v_proj": (new.num_kv_heads * dim, kv_rows),
        "mlp.gate_proj": (new.intermediate_size, mlp_rows),
        "mlp.up_proj": (new.intermediate_size, mlp_rows),
    }
    num_columns = {
        "self_attn.o_proj": (new.num_heads * dim, q_rows),
        "mlp.down_proj": (new.intermediate_size, mlp_rows),
    }
    grown: dict[str, torch.Tensor] = {}
    for name, weight in layer.items():
        module = name.removesuffix(".weight")
        if module in num_rows:
            grown[name] = grow_input(weight, *num_rows[module], plan)
        elif module in num_columns:
            grown[name] = _grow_output(weight, *num_columns[module], plan)
        elif module.endswith("norm"):
            grown[name] = grow_norm(weight, plan)
        else:
            raise GrowthError(f"unknown weight {name}")
    return grown


def _grow_weights(weights: dict[str, torch.Tensor], plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the grown model in float32, one layer at a time."""
    width = plan.old.hidden_size
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            padding = torch.zeros(len(weights[name]), plan.new.hidden_size - width)
            yield name, torch.cat([weights[name], padding], dim=1)
    yield "model.norm.weight", grow_norm(weights["model.norm.weight"], plan)
    for index in range(plan.new.num_layers):
        for name, weight in grow_layer(_old_layer(weights, index, plan), plan).items():
            yield f"model.layers.{index}.{name}", weight


def stored(name: str, weight: torch.Tensor, plan: Plan, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the type it is stored in."""
    is_exact = math.log2(plan.norm_scale()).is_integer()
    if name.endswith("norm.weight") and not is_exact:
        return weight.contiguous()
    return weight.to(dtype).contiguous()


def record_of(model_dir: Path, new: Shape, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Inputs of an output; an equal record means an equal output."""
    digest = hashlib.sha256()
    # The configuration and the tokenizer files are copied, so changes to them count too.
    for path in sorted(path for path in model_dir.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")):
        digest.update(path.name.encode() + path.read_bytes())
    return {"format": FORMAT, "source": digest.hexdigest(), "dtype": str(dtype), "seed": seed} | asdict(new)


def _is_complete(out_dir: Path, record: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((out_dir / RECORD_NAME).read_text()) == record)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _replace_folder(staging: Path, out_dir: Path) -> None:
    """Rename the finished folder into place; an older one is moved away first."""
    if out_dir.exists():
        if not (out_dir / RECORD_NAME).exists() and any(out_dir.iterdir()):
            raise GrowthError(f"{out_dir} exists and was not written by this program")
        old = staging.with_name(staging.name + ".old")
        os.replace(out_dir, old)
        os.replace(staging, out_dir)
        shutil.rmtree(old)
    else:
        os.replace(staging, out_dir)


def write_folder(out_dir: Path, record: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a folder that then becomes `out_dir`, unless that has an equal record; return `out_dir`."""
    if _is_complete(out_dir, record):
        return out_dir
    staging = out_dir.with_name(f".{out_dir.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        fill(staging)
        (staging / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
        _replace_folder(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def grown_config(config: dict[str, Any], plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration of the grown model, but for its number of layers."""
    new = plan.new
    return config | {
        "hidden_size": new.hidden_size,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "intermediate_size": new.intermediate_size,
        "head_dim": plan.head_dim,
        "rms_norm_eps": config["rms_norm_eps"] * plan.old.hidden_size / new.hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
    }


def plan_growth(config: dict[str, Any], shape: Shape, seed: int) -> Plan:
    """The growth of a model with this configuration. Raises GrowthError when the shapes do not go together."""
    check(config, shape)
    old = read_shape(config)
    head_dim = config.get("head_dim") or old.hidden_size // old.num_heads
    return Plan(old, shape, head_dim, torch.Generator().manual_seed(seed))


def grow(
    model_dir: Path,
    out_dir: Path,
    shape: Shape | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Path:
    """Write the model grown to the shape into `out_dir`, unless it is there already; return `out_dir`.

    Source: a transformers Llama folder with one `model.safetensors`. Raises GrowthError when the shapes do
    not go together. The tokenizer and the generation settings are copied.
    """
    shape = shape or Shape()
    config = json.loads((model_dir / "config.json").read_text())
    plan = plan_growth(config, shape, seed)

    def fill(folder: Path) -> None:
        for path in model_dir.iterdir():
            if path.suffix in (".json", ".jinja") and path.name != "config.json":
                shutil.copyfile(path, folder / path.name)
        weights = {name: w.float() for name, w in load_file(model_dir / WEIGHTS_NAME).items()}
        grown = {name: stored(name, weight, plan, dtype) for name, weight in _grow_weights(weights, plan)}
        save_file(grown, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        new_config = grown_config(config, plan, dtype) | {"num_hidden_layers": shape.num_layers}
        (folder / "config.json").write_text(json.dumps(new_config, indent=2) + "\n")

    return write_folder(out_dir, record_of(model_dir, shape, dtype, seed), fill)


def main() -> None:
    """Grows one model and prints its new size."""
    default = Shape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=default.hidden_size)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--heads", type=int, default=default.num_heads)
    parser.add_argument("--kv-heads", type=int, default=default.num_kv_heads)
    parser.add_argument("--intermediate-size", type=int, default=default.intermediate_size)
    options = parser.parse_args()
    shape = Shape(options.hidden_size, options.layers, options.heads, options.kv_heads, options.intermediate_size)
    try:
        grow(options.model, options.out, shape)
    except GrowthError as error:
        parser.error(str(error))
    size = (options.out / WEIGHTS_NAME).stat().st_size
    print(f"{options.out}: {size / 2e6:.0f} M parameters, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
