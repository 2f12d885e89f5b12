"""Builds draft heads from their folders. Everything that does not fit the target is refused here, with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn

from outrider.engine.heads import eagle3, medusa, mtp
from outrider.engine.heads.checkpoint import HeadKind, TargetShape, open_head, target_shape
from outrider.engine.heads.eagle3 import Eagle3Projection
from outrider.engine.heads.fused_head import can_fuse
from outrider.engine.heads.head import DraftHead
from outrider.engine.heads.head_engine import HeadEngine, entry_bytes
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.heads.tensors import TensorFiles
from outrider.engine.kv.kv_plan import GIB, KvPlan, ModelLoadError, ModelMemory, plan_kv
from outrider.engine.layers.experts import run_in_blocks, split_experts
from outrider.engine.layers.features import FeatureSource
from outrider.engine.layers.linear import LinearForms, make_batch_invariant
from outrider.engine.loading.machine import machine_memory
from outrider.engine.model import DTYPES, device_for
from outrider.engine.options import EngineOptions
from outrider.model_files import read_json
from outrider.text.tokenizer import model_eos_token_ids, tokenizer_eos_token_ids

_EMBEDDING: Final = "embed_tokens.weight"
_OUTPUT: Final = "lm_head.weight"
_STEP_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """The part of the target's states that a head takes for every token."""

    layer_ids: tuple[int, ...]
    """States before these layers, joined; empty: the last state, after the final norm."""
    feature_size: int


def feature_shape(folder: Path, target_dir: Path) -> FeatureShape:
    """Reads which states the head in `folder` takes from its target. Raises ModelLoadError where the two do not fit."""
    head, target = open_head(folder), target_shape(target_dir)
    match head.kind:
        case HeadKind.EAGLE3:
            described = eagle3.describe(head, target)
            return FeatureShape(described.layer_ids, described.hidden_size)
        case HeadKind.MTP:
            return FeatureShape((), mtp.describe(head, target).hidden_size)
        case HeadKind.MEDUSA:
            return FeatureShape((), medusa.describe(head, target).hidden_size)


class HeadMemory(NamedTuple):
    """Bytes that a target needs for a draft head: in all, and for each KV entry."""

    fixed: int
    per_token: int


def head_memory(folder: Path, target_dir: Path, dtype: str, *, is_local: bool) -> HeadMemory:
    """Memory for the features that a target keeps for the head in `folder`, and for the head itself where it runs
    beside the target. Raises ModelLoadError."""
    head, target, item = open_head(folder), target_shape(target_dir), DTYPES[dtype].itemsize
    shape = feature_shape(folder, target_dir)
    built: nn.Module
    match head.kind:
        case HeadKind.EAGLE3:
            described = eagle3.describe(head, target)
            fixed = described.feature_inputs * described.hidden_size * item
            built = eagle3.Eagle3Head(described, head, None)
        case HeadKind.MTP:
            fixed, built = 0, mtp.MtpHead(mtp.describe(head, target), head)
        case HeadKind.MEDUSA:
            fixed, built = 0, medusa.MedusaHeads(medusa.describe(head, target), None)
    per_token = shape.feature_size * item
    if is_local:
        fixed += sum(parameter.numel() for parameter in built.parameters()) * item
        if isinstance(built, DraftHead):
            per_token += entry_bytes(built, built.layout, DTYPES[dtype])
    return HeadMemory(fixed, per_token)


def feature_source(folder: Path, target_dir: Path, dtype: str, device: str) -> FeatureSource:
    """The features that a target keeps for the head in `folder`. Raises ModelLoadError."""
    shape = feature_shape(folder, target_dir)
    if not shape.layer_ids:
        return FeatureSource((target_shape(target_dir).num_layers,), shape.feature_size)
    projection = load_projection(folder, target_dir, DTYPES[dtype], device)
    return FeatureSource(shape.layer_ids, shape.feature_size, projection.project)


def load_head(options: EngineOptions, target_dir: Path, num_entries: int | None = None) -> HeadEngine:
    """A head with attention (EAGLE-3, MTP) from the folder `options.model`. Raises ModelLoadError with the cause.

    num_entries: of its KV cache; None: as many as `options` leave memory for.

    An MTP layer is in the target's own folder. What EAGLE-3 shares with its target (embedding, output layer) is read
    from the target's folder.
    """
    head, target = open_head(options.model), target_shape(target_dir)
    dtype = DTYPES[options.dtype]
    built: DraftHead
    match head.kind:
        case HeadKind.EAGLE3:
            names = eagle3.missing_shared(head, eagle3.describe(head, target))
            built = eagle3.load(head, target, _shared(names, target), dtype)
        case HeadKind.MTP:
            names = mtp.missing_shared(mtp.describe(head, target))
            built = mtp.load(head, target, _shared(names, target), dtype)
        case HeadKind.MEDUSA:
            raise ModelLoadError(f"{options.model} has Medusa heads, which run beside the target's model alone")
    device = device_for(options.device)
    built.to(device)
    kv = _plan_kv(built, options, target, device, num_entries)
    output = built.output_layer()
    forms = LinearForms(options.quantization)
    is_fused = not options.enforce_eager and can_fuse(built, dtype, device)
    if not is_fused:
        split_experts(built, forms.build)
        run_in_blocks(built)
        make_batch_invariant(built, forms, output)
    eos_ids = model_eos_token_ids(target_dir) | tokenizer_eos_token_ids(target_dir)
    return HeadEngine(built, options, built.layout, kv, eos_ids, forms if is_fused else None)


def load_projection(folder: Path, target_dir: Path, dtype: torch.dtype, device: str = "cpu") -> Eagle3Projection:
    """The part of an EAGLE-3 head that its target runs. Raises ModelLoadError."""
    head, target = open_head(folder), target_shape(target_dir)
    if head.kind is not HeadKind.EAGLE3:
        raise ModelLoadError(f"{folder} has a head of the kind {head.kind}, which takes the target's state as it is")
    built = eagle3.load_projection(head, target, dtype).to(device)
    make_batch_invariant(built, LinearForms())
    return built


def load_medusa(folder: Path, target_dir: Path, dtype: torch.dtype, device: str = "cpu") -> MedusaHeads:
    """Medusa heads of a folder. Raises ModelLoadError."""
    head, target = open_head(folder), target_shape(target_dir)
    if head.kind is not HeadKind.MEDUSA:
        raise ModelLoadError(f"{folder} has a head of the kind {head.kind}, not medusa")
    names = [_OUTPUT] if medusa.needs_shared(medusa.describe(head, target)) else []
    built = medusa.load(head, target, _shared(names, target), dtype).to(device)
    make_batch_invariant(built, LinearForms())
    return built


def _shared(names: Sequence[str], target: TargetShape) -> dict[str, torch.Tensor]:
    """Tensors of the target by their names in a head. Raises ModelLoadError."""
    if not names:
        return {}
    files = TensorFiles.open(target.model)
    published = read_json(target.model / "config.json").get("quantization_config")
    found: dict[str, str] = {}
    for name in names:
        stored = files.ending(name)
        if stored is None and name == _OUTPUT:  # tied to the embedding
            stored = files.ending(_EMBEDDING)
        if stored is None:
            raise ModelLoadError(
                f"the head has no {name} of its own, and {target.model} has none that ends so; use a copy of the head "
                "that has it"
            )
        found[name] = stored
    return files.read(found, published)


def _plan_kv(
    head: DraftHead, options: EngineOptions, target: TargetShape, device: str, num_entries: int | None
) -> KvPlan:
    """KV and features of the head, by the memory that the options permit. Raises ModelLoadError."""
    dtype = DTYPES[options.dtype]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in head.parameters())
    read = weights - head.embed_tokens.weight.numel() * head.embed_tokens.weight.element_size()
    inner = 4 * (getattr(head.config, "intermediate_size", None) or 4 * head.hidden_size) + 8 * head.hidden_size
    needs = ModelMemory(
        weights=weights,
        weights_read=read,
        kv_per_token=entry_bytes(head, head.layout, dtype),
        step=_STEP_ROWS * (inner * dtype.itemsize + 2 * 4 * head.vocab_size),
        process=0,
        longest=target.longest,
    )
    if device == "cpu":
        memory = machine_memory()
        budget = memory.budget(options.memory_utilization)
    else:
        from outrider.engine.kv.kv_plan import DeviceMemory

        free, total = torch.cuda.mem_get_info(device)
        budget = DeviceMemory(total, free, is_own=True).budget(options.memory_utilization)
    if num_entries is not None:
        options = replace(options, kv_cache_gib=num_entries * needs.kv_per_token / GIB)
    return plan_kv(needs, budget, options, torch.device(device).type)
