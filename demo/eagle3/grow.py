"""Grows an EAGLE-3 head as `demo.grow` grows its target: the same guesses at the cost of a large model's head.

    python -m demo.eagle3.grow --head demo/eagle3_head --out DIR

The grown target's hidden states are the small one's, padded with zeros, and its added layers are the last ones. So the
head reads the same layers, whose ids are written into its configuration, and its `fc` gets columns for the padding.
Everything else grows as in the target; embedding and output layer are the grown target's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from demo.grow import (
    WEIGHTS_NAME,
    GrowthError,
    Plan,
    Shape,
    grow_layer,
    grow_norm,
    grown_config,
    plan_growth,
    record_of,
    stored,
    write_folder,
)

LAYER = "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"


def grow_head(
    head_dir: Path,
    out_dir: Path,
    shape: Shape | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
) -> Path:
    """Write the head for a target grown to the shape into `out_dir`, unless it is there already; return `out_dir`.

    Source: a head in the original layout of EAGLE-3 with one layer and without tensors of its target. The number of
    layers in `shape` is the target's. Raises GrowthError for another head, or when the shapes do not go together.
    """
    shape = shape or Shape()
    config = json.loads((head_dir / "config.json").read_text())
    weights = {name: each.float() for name, each in load_file(head_dir / WEIGHTS_NAME).items()}
    _check_head(config, weights, head_dir)
    plan = plan_growth(config, shape, seed)

    def fill(folder: Path) -> None:
        grown = {name: stored(name, each, plan, dtype) for name, each in _grow_weights(weights, plan)}
        save_file(grown, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        new_config = grown_config(config, plan, dtype) | {"target_hidden_size": shape.hidden_size}
        (folder / "config.json").write_text(json.dumps(new_config, indent=2) + "\n")

    return write_folder(out_dir, record_of(head_dir, shape, dtype, seed), fill)


def _check_head(config: dict[str, Any], weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise GrowthError for what would change with its target's size, or is not known here."""
    if not config.get(IDS):
        raise GrowthError(f"{folder} names no {IDS}, and those left out depend on the target's number of layers")
    known = ("fc.weight", "norm.weight")
    if unknown := [name for name in weights if name not in known and not name.startswith(LAYER)]:
        raise GrowthError(f"{folder} has {unknown[0]}, which cannot be grown: only heads with one layer can be")


def _grow_weights(weights: dict[str, torch.Tensor], plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the grown head in float32."""
    yield "fc.weight", _grow_fc(weights["fc.weight"], plan)
    yield "norm.weight", grow_norm(weights["norm.weight"], plan)
    layer = {name.removeprefix(LAYER): each for name, each in weights.items() if name.startswith(LAYER)}
    for name, each in grow_layer(layer, plan).items():
        yield LAYER + name, each


def _grow_fc(weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """From k joined states to one: [old hidden, k * old hidden] -> [new hidden, k * new hidden], zero rows below."""
    width = plan.old.hidden_size
    grown = torch.zeros(plan.new.hidden_size, weight.shape[1] // width * plan.new.hidden_size)
    for index, part in enumerate(weight.split(width, dim=1)):
        first = index * plan.new.hidden_size
        grown[:width, first : first + plan.new.hidden_size] = plan.noise(width, plan.new.hidden_size)
        grown[:width, first : first + width] = part
    return grown


def main() -> None:
    """Grows one head and prints its new size."""
    default = Shape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=Path(__file__).parents[1] / "eagle3_head")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden-size", type=int, default=default.hidden_size, help="the grown target's")
    parser.add_argument("--heads", type=int, default=default.num_heads)
    parser.add_argument("--kv-heads", type=int, default=default.num_kv_heads)
    parser.add_argument("--intermediate-size", type=int, default=default.intermediate_size)
    options = parser.parse_args()
    shape = Shape(options.hidden_size, default.num_layers, options.heads, options.kv_heads, options.intermediate_size)
    try:
        grow_head(options.head, options.out, shape)
    except GrowthError as error:
        parser.error(str(error))
    size = (options.out / WEIGHTS_NAME).stat().st_size
    print(f"{options.out}: {size / 2e6:.0f} M parameters, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
