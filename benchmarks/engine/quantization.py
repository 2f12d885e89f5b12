"""Measures gain and cost of quantized weights.

The original model generates some sequences greedily. Its quantized copies read them. The result shows how far their
logits are away, and for how many tokens they would have generated the same, which is the acceptance rate of a model
that drafts for itself with quantized weights. `--draft DIR` is compared in the same way. Times are medians on one
core, with alternating steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.step_cost import measure
from benchmarks.shared.machine import machine
from benchmarks.shared.options import load, parser_of, report, target_model
from demo.corpus import held_out_prompts
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.options import Quantization
from outrider.text.tokenizer import Tokenizer
from outrider.worker.worker_process import pin_to_cores

NUM_TOKENS = 60  # generated per sequence
MIB = 1 << 20


def say(engine: Engine, prompt: Sequence[int]) -> list[int]:
    """Prompt and greedy output."""
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
    """Logits of all output positions.  # [NUM_TOKENS, vocab_size]"""
    kv = engine.new_sequence()
    kv.extend(len(token_ids) - 1)
    logits = engine.forward([SequenceChunk(kv, token_ids[:-1], NUM_TOKENS)])
    kv.free()
    return logits


def compared(engine: Engine, texts: Sequence[list[int]], references: Sequence[torch.Tensor]) -> dict[str, float]:
    """Distance of a copy's logits from the original's, and the share of equal tokens."""
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
    """Memory of all weights, including embedding and output layer, which are never quantized."""
    engine = load(model_dir, quantization=quantization, max_num_seqs=2, enforce_eager=True)
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
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        engines = {str(name): load(model_dir, quantization=name, max_num_seqs=2) for name in Quantization}
        draft = load(arguments.draft, max_num_seqs=2)
        tokenizer = Tokenizer(model_dir)
        texts = [say(engines["none"], tokenizer.encode(prompt)) for prompt in held_out_prompts(arguments.prompts)]
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
    report(arguments, {"machine": machine(), "found": found})
