"""Loads a model: reads it with transformers, installs our attention and linear layers, and compares the logits.

`load_model` refuses, by name, an architecture that does not compute through them, by comparing a few tokens' logits
with those of transformers' own attention.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from outrider.engine.compiled import numerics
from outrider.engine.compiled.products import bound_products
from outrider.engine.kv.kv_plan import Budget, DeviceMemory, KvPlan, ModelMemory, in_words, plan_kv
from outrider.engine.layers.attention import ATTENTION_NAME
from outrider.engine.layers.decoder import why_not
from outrider.engine.layers.experts import has_experts, run_in_blocks, split_experts
from outrider.engine.layers.kv_layout import LayerLayout, UnsupportedModelError, find_layout, refuse_other_states
from outrider.engine.layers.linear import LinearForms, make_batch_invariant, round_weights
from outrider.engine.layers.paged_attention import missing_parameters, why_not_paged
from outrider.engine.layers.shards import (
    keep_own_heads,
    num_kv_heads_of,
    plan_overrides,
    refuse_uneven_heads,
    take_shards,
)
from outrider.engine.loading.checkpoint_files import check_checkpoint, unfinished_fetch
from outrider.engine.loading.early_exit import exit_early
from outrider.engine.loading.machine import machine_memory
from outrider.engine.loading.memory_plan import NoPlanError, ServingShape, loaded_memory, plan_memory
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import DTYPES, Engine, ModelLoadError, check_device, device_for, own_limit
from outrider.engine.options import AUTO, EngineOptions
from outrider.engine.ranks.rank_group import RankGroup
from outrider.engine.sequence_chunk import SequenceChunk
from outrider.errors import ConfigurationError
from outrider.local.freed_memory import return_freed_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The memory that is decided upon before loading."""

    budget: Budget
    needs: ModelMemory | None  # None: known once it is loaded


def load_model(config: EngineOptions, group: RankGroup | None = None) -> Engine:
    """Loads weights, makes them batch-invariant and checks the result. Raises ModelLoadError with the cause.

    With a group each rank calls it and gets its shard.
    """
    check_device(config.device)
    device = device_for(config.device)
    bound_products()
    # What is outside of our own kernels has the same number all the time: its bits may depend on it.
    torch.set_num_threads(config.num_threads_beside_draft or config.num_threads)
    model, config, decision = _read(config, device, group)
    _refuse_moving_frequencies(model, config)
    _refuse_row_scaling(model, config)
    model.eval().requires_grad_(False).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # a shard counts as the whole
    num_kv_heads = num_kv_heads_of(model.config.get_text_config())
    if group is not None and num_kv_heads < group.size:
        keep_own_heads(model, group, num_kv_heads)
    if config.quantization != "none":
        round_weights(model, config.quantization, model.get_output_embeddings())
    try:
        expected = _reference_logits(model)
        if group is not None:
            take_shards(model, group)
        layers = find_layout(model)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"the engine cannot run {type(model).__name__}: {error}") from error
    model.set_attn_implementation(ATTENTION_NAME)
    kv = _plan_kv(model, layers, config, decision, group)
    engine = Engine(model, config, layers, num_parameters, kv, group)
    forms = LinearForms(config.quantization)
    obstacle = why_not(model) if not config.enforce_eager else "disabled"
    if obstacle is None:
        engine.fuse(forms)
    else:
        logger.info("without compiled kernels: %s", obstacle)
        split_experts(model, forms.build)
        run_in_blocks(model)
        make_batch_invariant(model, forms, model.get_output_embeddings())
    logger.info("linear layers: %s", forms.report)
    if device != "cpu":
        _use_device(engine, is_plain=all(layer.is_plain for layer in layers))
    probe_logits = _check_against(engine, expected)
    engine.numerics = _describe(engine, forms, probe_logits)
    if config.num_threads_beside_draft is not None and device == "cpu":
        _share_cores(engine)
    _return_weights_memory()
    return engine


def _read(config: EngineOptions, device: str, group: RankGroup | None) -> tuple[Any, EngineOptions, _Decision]:
    """transformers' model with the checkpoint's weights, with a group this rank's shard. Raises ModelLoadError.

    The options have the longest sequence that was decided.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from outrider.engine.loading.quantized_loading import read_as_plain

    transformers_logging.disable_progress_bar()
    _refuse_missing_files(config.model)
    try:
        hf_config = AutoConfig.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)
        exit_early(hf_config, config.early_exit_layer)
        refuse_other_states(hf_config)
        published = read_as_plain(hf_config)
        if published is not None and group is not None:
            raise ValueError(
                f"its weights are quantized ({published.name}), and such a checkpoint cannot be sharded over ranks: "
                "serve it with one rank, or the model as it was before with --quantization"
            )
        distribution = None if group is None else _distribution(hf_config.get_text_config(), group)
        config, decision = _decide(config, device, group)
        _refuse_damaged_weights(config.model)  # once they fit: it opens them
        model, loading = AutoModelForCausalLM.from_pretrained(
            config.model,
            config=hf_config,
            dtype=DTYPES[config.dtype],
            attn_implementation="eager",  # the reference: sdpa, for example, ignores softcap
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            distributed_config=distribution,
        )
    except UnsupportedModelError as error:
        raise ModelLoadError(f"the engine cannot run {config.model}: {error}") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load {config.model}: {error}") from error
    if published is not None:
        logger.info("checkpoint format: %s; read as %s", published.name, config.dtype)
    if missing := sorted(loading["missing_keys"]):
        raise ModelLoadError(
            f"{config.model} lacks {len(missing)} tensors of its model, such as {missing[0]}; "
            "the weights are incomplete or of another architecture"
        )
    return model, config, decision


def _refuse_missing_files(model_dir: Path) -> None:
    if not model_dir.is_dir() and (gathered := unfinished_fetch(model_dir)):
        raise ModelLoadError(
            f"no model in {model_dir} yet: `outrider fetch` runs or was broken off ({gathered}); the same command "
            "goes on"
        )
    if not (model_dir / "config.json").is_file():
        raise ModelLoadError(f"no model in {model_dir}: config.json is missing; name a folder in Hugging Face format")
    if any(model_dir.glob("*.safetensors*")):
        return
    if any(model_dir.glob("*.bin")):
        raise ModelLoadError(
            f"{model_dir} has pickled weights (*.bin) alone, and reading these runs whatever their author wrote into "
            "them; save them as safetensors where that does no harm"
        )
    raise ModelLoadError(f"{model_dir} has a config.json but no weights (*.safetensors); was the download finished?")


def _refuse_damaged_weights(model_dir: Path) -> None:
    try:
        check_checkpoint(model_dir)
    except ConfigurationError as error:
        raise ModelLoadError(
            f"{error.message}. Fetch the model again: `outrider fetch` checks every file, and leaves no folder "
            "that is not whole"
        ) from error


def _share_cores(engine: Engine) -> None:
    """Lets steps have different numbers of threads, where these do not matter for their bits: those of our kernels do
    not depend on it, whatever runs outside of them may, and other ranks would not be told."""
    if engine.is_fused and engine.group is None:
        engine.can_share_cores = True
        engine.can_share_cores = not batch_invariance_failures(engine, num_rounds=1)
    engine.use_threads(beside_draft=not engine.can_share_cores)
    if not engine.can_share_cores:
        logger.warning(
            "steps run on %d threads always: this model's results depend on their number here",
            engine.config.num_threads_beside_draft,
        )


def _describe(engine: Engine, forms: LinearForms, probe_logits: torch.Tensor) -> str:
    layers = numerics.compiled_layers() if engine.is_fused else "modules"
    arithmetic = numerics.Arithmetic(
        engine.config.dtype,
        engine.config.quantization,
        1 if engine.group is None else engine.group.size,
        numerics.device_class(engine.device),
        f"{layers}+paged-attention" if engine.is_paged else layers,
        forms.report,
        engine.config.num_threads,
    )
    return numerics.describe(arithmetic, probe_logits, numerics.cpu_model())


def _use_device(engine: Engine, *, is_plain: bool) -> None:
    """Enables FlashAttention and CUDA graphs where the model permits them; logs where it does not."""
    obstacle = why_not_paged(engine.layers, engine.block_size, engine.longest, is_plain=is_plain)
    if obstacle is not None:
        logger.warning("attention without FlashAttention, which is slow for long sequences: %s", obstacle)
        return
    from torch.nn.attention.varlen import varlen_attn

    if missing := missing_parameters(varlen_attn):
        logger.warning(
            "attention without FlashAttention, which is slow: torch %s attends over no block table (varlen_attn lacks "
            "%s); install torch 2.13",
            torch.__version__,
            ", ".join(missing),
        )
        return
    engine.attend_paged(varlen_attn)
    if engine.config.enforce_eager or has_experts(engine.model):
        logger.info("no CUDA graphs: they are disabled, or the experts that run depend on the rows")
        return
    try:
        engine.capture_graphs()
    except RuntimeError as error:
        logger.warning("no CUDA graphs: %s", error)


def _decide(config: EngineOptions, device: str, group: RankGroup | None) -> tuple[EngineOptions, _Decision]:
    """Refuses what cannot fit, before minutes are spent on loading it or the system kills the process; decides the
    longest sequence. Raises ConfigurationError."""
    device_type = torch.device(device).type
    budget = _budget(config, device, group)
    num_ranks = 1 if group is None else group.size
    try:
        needs = plan_memory(config.model, ServingShape.of(config, num_ranks, device_type))
    except NoPlanError:
        raise
    except ConfigurationError as error:  # loading reports the fault, if there is one
        logger.info("memory use is not known in advance: %s", error)
        return config, _Decision(budget, None)
    kv = plan_kv(needs, budget, config, device_type)
    if config.max_model_len == AUTO:
        what = "the model's own" if kv.max_model_len == needs.longest else f"what fits; the model's is {needs.longest}"
        logger.info("--max-model-len auto: %d tokens, %s", kv.max_model_len, what)
    return replace(config, max_model_len=kv.max_model_len), _Decision(budget, needs)


def _budget(config: EngineOptions, device: str, group: RankGroup | None) -> Budget:
    """The part of its device that each rank may use: the least of all ranks, which must have equally many blocks."""
    if device == "cpu":
        # A machine's memory is shared by all ranks on it, which load at the same time; a GPU belongs to one.
        memory, num_ranks_here = machine_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        free, total = torch.cuda.mem_get_info(device)
        memory, num_ranks_here = DeviceMemory(total, free, is_own=True), 1
    budget = memory.budget(config.memory_utilization, num_ranks_here)
    if group is None:
        return budget
    usable, free = group.least(budget.usable, budget.free)
    return replace(budget, usable=usable, free=free)


def _plan_kv(
    model: Any, layers: Sequence[LayerLayout], config: EngineOptions, decision: _Decision, group: RankGroup | None
) -> KvPlan:
    """The KV cache that was planned, by the layout of the loaded model. Raises ModelLoadError."""
    device = device_for(config.device)
    shape = ServingShape.of(config, 1 if group is None else group.size, torch.device(device).type)
    loaded = loaded_memory(model, layers, shape)
    budget, needs = decision.budget, decision.needs
    if needs is None:
        budget, needs = _budget(config, device, group), loaded
    kv = plan_kv(replace(needs, kv_per_token=loaded.kv_per_token), budget, config, shape.device_type)
    logger.info("KV: %s for %d tokens, in blocks of %d", in_words(kv.num_bytes), kv.num_tokens, kv.block_size)
    return kv


def _return_weights_memory() -> None:
    """Returns freed memory to the system. Every weight was copied into its form, and the C library keeps what that
    freed: as much as the model's shard was seen."""
    gc.collect()
    return_freed_memory()


def _distribution(hf_config: Any, group: RankGroup) -> Any:
    """transformers' description of how the model is sharded. Raises ModelLoadError."""
    from transformers.distributed import DistributedConfig

    refuse_uneven_heads(hf_config, group.size)
    return DistributedConfig(tp_size=group.size, tp_plan=plan_overrides(hf_config, group.size) or None)


def _refuse_moving_frequencies(model: Any, config: EngineOptions) -> None:
    """Refuses rotary frequencies that depend on the longest sequence of a batch: its composition would change outputs
    (I2)."""
    hf_config = model.config.get_text_config()
    found = getattr(hf_config, "rope_parameters", None) or {}
    max_model_len = _longest(hf_config, config)
    # One description for all layers, or one for each kind of layer.
    for rope in [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]:
        rope_type = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            hf_config, "original_max_position_embeddings", None
        )
        if rope_type in ("longrope", "dynamic") and max_model_len > (original or max_model_len):
            raise ModelLoadError(
                f"the engine cannot run {type(model).__name__} at {max_model_len} tokens: its {rope_type} "
                f"frequencies change with the longest sequence beyond {original}; set --max-model-len to {original} "
                "or less"
            )


def _refuse_row_scaling(model: Any, config: EngineOptions) -> None:
    """Refuses Llama 4 at lengths where its queries are scaled by row in the batch, which is a position only for a
    single sequence."""
    hf_config = model.config.get_text_config()
    max_model_len = _longest(hf_config, config)
    limit = getattr(hf_config, "floor_scale", None)
    if getattr(hf_config, "attn_temperature_tuning", False) and limit and max_model_len >= limit:
        raise ModelLoadError(
            f"the engine cannot run {type(model).__name__} at {max_model_len} tokens: from token {limit} on "
            f"transformers scales its queries by their row in the batch; set --max-model-len to {limit - 1} or less"
        )


def _longest(text_config: Any, config: EngineOptions) -> int:
    """The longest sequence that is served; not known yet, the model's own."""
    given = config.max_model_len
    return given if isinstance(given, int) else own_limit(text_config)


PROBE_LENGTH = 24


def _probe_token_ids(vocab_size: int) -> list[int]:
    return [(7919 * i + 13) % vocab_size for i in range(PROBE_LENGTH)]


@torch.inference_mode()
def _reference_logits(model: Any) -> torch.Tensor:
    """transformers' own logits for the probe.  # [PROBE_LENGTH, vocab_size]"""
    token_ids = torch.tensor([_probe_token_ids(model.config.get_text_config().vocab_size)], device=model.device)
    return model(input_ids=token_ids, use_cache=False).logits[0].float()


def _check_against(engine: Engine, expected: torch.Tensor) -> torch.Tensor:
    """Refuses a model whose logits through the paged cache, in two chunks, differ from transformers' own.

    Returns those logits; on ranks other than 0, whose logits are incomplete, this rank's part of them.
    """
    name = type(engine.model).__name__
    token_ids = _probe_token_ids(engine.vocab_size)
    kv = engine.new_sequence()
    parts = []
    try:
        for part in (token_ids[: PROBE_LENGTH // 2], token_ids[PROBE_LENGTH // 2 :]):
            kv.extend(len(part))
            parts.append(engine.forward([SequenceChunk(kv, part, len(part))]))
    except Exception as error:  # whatever a foreign architecture raises, the operator needs its name
        raise ModelLoadError(f"the engine cannot run {name}: {error}") from error
    finally:
        kv.free()
    logits = torch.cat(parts)
    if engine.group is not None and engine.group.rank > 0:
        return logits
    differences = (logits - expected).abs().amax(dim=1)
    # In bfloat16 a row may go to another expert than in transformers, where two are about equally good.
    is_chancy = engine.config.dtype == "bfloat16" and has_experts(engine.model)
    difference = float(differences.median() if is_chancy else differences.max())
    tolerance = (1e-3 if engine.config.dtype == "float32" else 0.1) * max(1.0, float(expected.abs().max()))
    if not difference <= tolerance:
        raise ModelLoadError(
            f"the engine cannot run {name}: its logits differ from transformers' by {difference:.3g} "
            f"(permitted {tolerance:.3g}); its attention is not the one the paged cache computes"
        )
    return logits
