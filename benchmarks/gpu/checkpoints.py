"""Checkpoints of a target and a draft of a chosen shape, written on the spot, whose acceptance rate is chosen, too.

All weights are random, in Llama's layout. Row j of the output layer is a random vector u[j] of the model's own hidden
size, so the two models need nothing in common but the language (`language`). The embedding of token i is the sum of
the vectors of its candidates, each with the weight that gives it its probability, and of noise up to the length that
RMSNorm keeps. So an untouched embedding has the logit `ln(p · V / (1 − Σp))` for a candidate of probability p, and
about 0 for the V others: they share what the candidates leave. Two random vectors of length 1 in d dimensions have a
product of about d^-0.5, which moves a logit by `logit_span / d^0.5`: some of the choices between two close candidates
are the other way round than in the language, which `chosen_tokens` counts.

The layers are as large as the shape says and read the whole context, but move the hidden state by only
`CONTEXT_SHARE` of its length. So a step costs what it costs in a trained model of the shape; its logits depend on the
context in every bit; and its most likely token hardly ever does. Equal greedy outputs therefore say that tokens were
committed in order, and little about attention: that is what the comparison of logits is for.

Output layers are the models' own, although Llama 3.2 1B shares its with the embedding: a step reads as much, and
the file is larger.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file

from benchmarks.gpu.language import END_TOKEN_ID, NONE, VOCAB_SIZES, Language

CONTEXT_SHARE: Final = 0.25
INPUT_STD: Final = 1.28  # of what queries, keys, values and neurons are, for a hidden state of RMS 1
GATED_STD: Final = 0.7  # of silu(gate) * up then, roughly
RIGHT_PROBABILITY: Final = 0.85  # of a candidate that the model is sure of
UNSURE_PROBABILITIES: Final = (0.55, 0.15)  # of the draft's two candidates where the first is wrong
LENGTH_MAX: Final = 0.95  # of the candidates' part of an embedding; the rest is noise
NUM_WRITERS: Final = 4
RECORD: Final = "made.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """All weights, with an output layer of its own."""
        return 2 * self.vocab_size * self.hidden_size + self.hidden_size + self.num_layers * self.layer_size

    @property
    def layer_size(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size


LLAMA_8B: Final = Shape(4096, 32, 32, 8, 128, 14336, VOCAB_SIZES[False])
LLAMA_1B: Final = Shape(2048, 16, 32, 8, 64, 8192, VOCAB_SIZES[False])
TINY_TARGET: Final = Shape(384, 4, 6, 2, 64, 768, VOCAB_SIZES[True])
TINY_DRAFT: Final = Shape(256, 2, 4, 2, 64, 512, VOCAB_SIZES[True])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The two likeliest tokens after each token, and their logits.  # [vocab_size] each"""

    first: torch.Tensor  # int64
    second: torch.Tensor  # int64; `NONE`: none
    first_logit: torch.Tensor  # float32
    second_logit: torch.Tensor

    @property
    def length(self) -> float:
        """Length of the longest sum of candidates' vectors, in logits."""
        return float((self.first_logit**2 + self.second_logit**2).max().sqrt())


def candidates(language: Language, *, is_target: bool) -> Candidates:
    """Candidates of one of the two models."""
    vocab_size = len(language.successors)
    first = torch.from_numpy(language.successors if is_target else language.guesses)
    second = torch.from_numpy(np.full_like(language.seconds, NONE) if is_target else language.seconds)
    is_wrong = first != torch.from_numpy(language.successors)
    sure = _logit(RIGHT_PROBABILITY, 1.0 - RIGHT_PROBABILITY, vocab_size)
    rest = 1.0 - sum(UNSURE_PROBABILITIES)
    unsure, other = (_logit(each, rest, vocab_size) for each in UNSURE_PROBABILITIES)
    return Candidates(
        first,
        second,
        torch.where(is_wrong, unsure, sure),
        torch.where(second != NONE, other, 0.0),
    )


def _logit(probability: float, rest: float, vocab_size: int) -> float:
    """Logit of a token of this probability, where `rest` is what all other tokens have, with logits of 0."""
    return math.log(probability * vocab_size / rest)


def logit_span(told: Candidates) -> float:
    """Logit of a token whose vector is the whole embedding."""
    return told.length / LENGTH_MAX


def tensors(shape: Shape, told: Candidates, seed: int, device: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The weights, bfloat16 on the CPU, as (file name, tensors by name): a file for each layer, made on `device`."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*size: int, std: float) -> torch.Tensor:
        made = torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)
        return made.mul_(std)

    width, vocab_size = shape.hidden_size, shape.vocab_size
    rows = noise(vocab_size, width, std=1.0)
    yield "embedding", {"model.embed_tokens.weight": _embedding(rows, told, noise(vocab_size, width, std=1.0)).cpu()}
    scale = torch.full((width,), logit_span(told) / math.sqrt(width), dtype=torch.bfloat16)
    yield "output", {"lm_head.weight": rows.mul_(width**-0.5).cpu(), "model.norm.weight": scale}
    del rows
    into, num_branches = INPUT_STD / math.sqrt(width), 2 * shape.num_layers
    branch = CONTEXT_SHARE / math.sqrt(num_branches)
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for index in range(shape.num_layers):
        sizes = {
            "self_attn.q_proj": (heads, width, into),
            "self_attn.k_proj": (kv_heads, width, into),
            "self_attn.v_proj": (kv_heads, width, into),
            "self_attn.o_proj": (width, heads, branch / (INPUT_STD * math.sqrt(heads))),
            "mlp.gate_proj": (shape.intermediate_size, width, into),
            "mlp.up_proj": (shape.intermediate_size, width, into),
            "mlp.down_proj": (
                width,
                shape.intermediate_size,
                branch / (GATED_STD * math.sqrt(shape.intermediate_size)),
            ),
        }
        ones = torch.ones(width, dtype=torch.bfloat16)
        layer = {name: noise(rows, columns, std=std).cpu() for name, (rows, columns, std) in sizes.items()}
        layer |= {"input_layernorm": ones, "post_attention_layernorm": ones.clone()}
        yield f"layer-{index:02}", {f"model.layers.{index}.{name}.weight": each for name, each in layer.items()}


def _embedding(rows: torch.Tensor, told: Candidates, noise: torch.Tensor) -> torch.Tensor:
    """Sums of the candidates' vectors, filled up with `noise`.  # bfloat16 [vocab_size, hidden_size]"""
    device, span = rows.device, logit_span(told)
    first, second = told.first.to(device), told.second.clamp(min=0).to(device)
    first_share, second_share = (each.to(device) / span for each in (told.first_logit, told.second_logit))
    rest = (1.0 - first_share**2 - second_share**2).clamp(min=0.0).sqrt()
    for start in range(0, len(rows), 8192):  # float32 sums, a part at a time
        part = slice(start, start + 8192)
        summed = rows[first[part]].float() * first_share[part, None]
        summed += rows[second[part]].float() * second_share[part, None]
        noise[part] = (summed + noise[part].float() * rest[part, None]).bfloat16()
    return noise


def write(folder: Path, shape: Shape, language: Language, *, is_target: bool, seed: int, device: str) -> float:
    """Writes a model folder with its tokenizer, unless an equal one is there. Returns the seconds that it took.

    device: where the numbers are drawn. Another folder there is replaced. Raises OSError where the disk is full.
    """
    began = time.perf_counter()
    record = {
        "shape": asdict(shape),
        "seed": seed,
        "device": device,
        "is_target": is_target,
        "acceptance": language.acceptance,
    }
    if (folder / RECORD).is_file() and json.loads((folder / RECORD).read_text()) == record:
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_tokenizer(folder, shape.vocab_size)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    told = candidates(language, is_target=is_target)
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        for name, own in tensors(shape, told, seed, device):
            if len(pending) >= NUM_WRITERS:  # bounds what is in memory
                pending.pop(0).result()
            file = f"{name}.safetensors"
            weight_map |= dict.fromkeys(own, file)
            num_bytes += sum(each.numel() * each.element_size() for each in own.values())
            pending.append(writers.submit(save_file, own, folder / file, {"format": "pt"}))
        for each in pending:
            each.result()
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / RECORD).write_text(json.dumps(record))
    return time.perf_counter() - began


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
    }


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for every id, so that both models tokenize identically."""
    words = {"<end>": END_TOKEN_ID} | {f"w{index}": index for index in range(1, vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


@torch.inference_mode()
def chosen_tokens(folder: Path, token_ids: list[int], device: str) -> list[int]:
    """The likeliest token after each of these, where the layers do nothing: what the weights make of the language."""
    from safetensors import safe_open

    def read(file: str, name: str) -> torch.Tensor:
        with safe_open(folder / f"{file}.safetensors", framework="pt", device=device) as opened:
            return opened.get_tensor(name)

    hidden = read("embedding", "model.embed_tokens.weight")[token_ids]
    output = read("output", "lm_head.weight")
    return [
        token_id
        for part in hidden.split(512)  # [512, vocab_size] logits at a time
        for token_id in (part @ output.T).argmax(dim=-1).tolist()
    ]


def num_bytes_on_disk(*shapes: Shape) -> int:
    """Size of these models' folders, with 5 % for headers and tokenizers."""
    return int(1.05 * sum(2 * shape.num_parameters for shape in shapes))
