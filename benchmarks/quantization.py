"""What rounding the weights saves and costs: `python -m benchmarks.quantization --help`.

The model as it is says some texts, greedily. Its copies read them: how far their logits are away, and for how many of
the tokens said they would have said the same, which is the share of hints that hold where a model drafts for itself in
low resolution. `--draft DIR` is compared likewise. Times are of one core and of steps in turns; medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.step_cost import measure
from benchmarks.target_model import DEMO, add_target_arguments, target_model
from demo.corpus import held_out_prompts
from outrider.engine.loading import load_model
from outrider.engine.model import QUANTIZATIONS, Engine, EngineConfig, SequenceChunk
from outrider.tokenizer import Tokenizer
from outrider.worker_process import pin_to_cores

NUM_TOKENS = 60  # said of each text
MIB = 1 << 20


def say(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """Prompt and greedy text."""
    token_ids = list(prompt)
    kv = engine.new_sequence()
    fed = 0
    for _ in range(NUM_TOKENS):
        kv.extend(len(token_ids) - fed)
        logits = engine.forward([SequenceChunk(kv, token_ids[fed:], 1)])
        fed = len(token_ids)
        token_ids.append(int(logits[-1].argmax()))
    kv.free()
    return token_ids


def read(engine: Engine, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of all positions whose token was said.  # [NUM_TOKENS, vocab_size]"""
    kv = engine.new_sequence()
    kv.extend(len(token_ids) - 1)
    logits = engine.forward([SequenceChunk(kv, token_ids[:-1], NUM_TOKENS)])
    kv.free()
    return logits


def compared(
    engine: Engine, texts: Sequence[list[int]], references: Sequence[torch.Tensor]
) -> dict[str, float]:
    """How far a copy is away from the model that said the texts, and how often it would have said the same."""
    differences, agreements = [], []
    for token_ids, reference in zip(texts, references, strict=True):
        logits = read(engine, token_ids)
        differences.append((logits - reference).abs().flatten())
        agreements += (logits.argmax(dim=1) == torch.tensor(token_ids[-NUM_TOKENS:])).tolist()
    difference = torch.cat(differences)
    return {
        "logits_differ_by_mean": round(float(difference.mean()), 4),
        "logits_differ_by_most": round(float(difference.max()), 3),
        "accepted_share": round(float(np.mean(agreements)), 3),
    }


def weights_mib(model_dir: Path, quantization: str) -> float:
    """Memory of all weights, embedding and output layer included, which are never quantized."""
    engine = load_model(EngineConfig(model_dir, quantization=quantization, max_num_seqs=2, use_kernels=False))
    held: dict[int, torch.Tensor] = {}
    for module in engine.model.modules():
        for value in (
            *vars(module).values(),
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
        ):
            each = value if isinstance(value, list) else [value]
            held |= {id(tensor): tensor for tensor in each if isinstance(tensor, torch.Tensor)}
    return round(sum(tensor.numel() * tensor.element_size() for tensor in held.values()) / MIB, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        engines = {
            name: load_model(EngineConfig(model_dir, quantization=name, max_num_seqs=2))
            for name in QUANTIZATIONS
        }
        draft = load_model(EngineConfig(arguments.draft, max_num_seqs=2))
        tokenizer = Tokenizer(model_dir)
        texts = [
            say(engines["none"], tokenizer.encode(prompt)) for prompt in held_out_prompts(arguments.prompts)
        ]
        references = [read(engines["none"], token_ids) for token_ids in texts]
        step_ms = measure(engines, arguments.rounds, (1, 8, 32))
        found: dict[str, dict[str, object]] = {
            name: {
                "weights_mib": weights_mib(model_dir, name),
                **compared(engine, texts, references),
                "step_ms_by_num_tokens": step_ms[name],
            }
            for name, engine in engines.items()
        }
        found["draft"] = {**compared(draft, texts, references)}
    print(json.dumps({"machine": machine(), "found": found}, indent=1))


if __name__ == "__main__":
    main()
