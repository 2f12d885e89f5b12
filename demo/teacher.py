"""Text that the target writes, with what it thought at every position: the draft's lessons.

A draft is asked only at prefixes that the target wrote. So the lessons are continuations of training text
by the target, mostly greedy, and at each position the target's most probable tokens are kept. Keeping them
costs nothing while generating and saves a forward pass of the target at every visit later.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

NUM_KEPT = 32
ANSWER_LEN = 192
PROMPT_LEN_MIN, PROMPT_LEN_MAX = 16, 224
# Of eight batches: greedy acceptance is what most requests see, the others keep sampling aligned.
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Lessons:
    """Rows of one length. Position i holds what follows token_ids[:, :i + 1].

    token_ids: int16 [rows, length + 1], prompt and answer
    kept_ids: int16 [rows, length, NUM_KEPT], the target's most probable next tokens, best first
    kept_logprobs: float16 [rows, length, NUM_KEPT], in nats
    prompt_len: the answer is token_ids[:, prompt_len:]
    """

    token_ids: torch.Tensor
    kept_ids: torch.Tensor
    kept_logprobs: torch.Tensor
    prompt_len: int
    temperature: float


def _kept(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The NUM_KEPT best of logits [..., vocab]: ids and log probabilities, best first."""
    best, ids = logits.float().topk(NUM_KEPT, dim=-1)
    logprobs = best - logits.float().logsumexp(-1, keepdim=True)
    return ids.short().cpu(), logprobs.half().cpu()


def _next_tokens(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """The next token of each row of logits [rows, vocab]: [rows, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)


class Decoder:
    """One token per row and step over a cache of fixed size, all rows at the same position.

    The query heads of one KV head are handed to attention as query rows of that head, so no key is copied;
    transformers' own static cache repeats all of them at each step, which takes most of the time on a CPU.

    keys, values: per layer [rows, kv heads, capacity, head_dim], filled up to `length`
    """

    def __init__(self, model: LlamaForCausalLM, cache: DynamicCache, capacity: int) -> None:
        self.model = model
        self.length = cache.get_seq_length()
        self.keys = [self._roomy(layer.keys, capacity) for layer in cache.layers]
        self.values = [self._roomy(layer.values, capacity) for layer in cache.layers]

    @staticmethod
    def _roomy(filled: torch.Tensor, capacity: int) -> torch.Tensor:
        rows, heads, length, dim = filled.shape
        roomy = filled.new_zeros(rows, heads, capacity, dim)
        roomy[:, :, :length] = filled
        return roomy

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Read one token per row, [rows, 1]; return the last hidden states, [rows, 1, hidden]."""
        decoder = self.model.model
        position, self.length = self.length, self.length + 1
        hidden = decoder.embed_tokens(token_ids[:, 0])
        where = torch.tensor([[position]], device=token_ids.device)
        cos, sin = (part[:, None] for part in decoder.rotary_emb(hidden, where))
        for layer, keys, values in zip(decoder.layers, self.keys, self.values, strict=True):
            rows, kv_heads, _, dim = keys.shape
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = attention.q_proj(normed).view(rows, kv_heads, -1, dim)
            key = attention.k_proj(normed).view(rows, kv_heads, 1, dim)
            keys[:, :, position : position + 1] = key * cos + rotate_half(key) * sin
            values[:, :, position] = attention.v_proj(normed).view(rows, kv_heads, dim)
            mixed = functional.scaled_dot_product_attention(
                query * cos + rotate_half(query) * sin, keys[:, :, : self.length], values[:, :, : self.length]
            )
            hidden = hidden + attention.o_proj(mixed.reshape(rows, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return decoder.norm(hidden)[:, None]


@torch.inference_mode()
def write_lessons(
    model: LlamaForCausalLM, prompts: torch.Tensor, *, temperature: float, seed: int
) -> Lessons:
    """Continue prompts [rows, prompt_len] by ANSWER_LEN tokens each, keeping the distributions."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    token_ids = prompts.to(device)
    prompt_len = token_ids.shape[1]
    cache = DynamicCache(config=model.config)
    hidden = model.model(input_ids=token_ids, past_key_values=cache, use_cache=True).last_hidden_state
    decoder = Decoder(model, cache, prompt_len + ANSWER_LEN)
    # Logits of a whole batch of prompts would take a gigabyte; positions go through in slices.
    kept = [_kept(model.lm_head(part)) for part in hidden[:, :-1].split(32, dim=1)]
    hidden = hidden[:, -1:]
    for index in range(ANSWER_LEN):
        logits = model.lm_head(hidden)
        kept.append(_kept(logits))
        chosen = _next_tokens(logits[:, 0], temperature, generator)
        token_ids = torch.cat([token_ids, chosen], dim=1)
        if index < ANSWER_LEN - 1:
            hidden = decoder.step(chosen)
    return Lessons(
        token_ids=token_ids.short().cpu(),
        kept_ids=torch.cat([ids for ids, _ in kept], 1),
        kept_logprobs=torch.cat([logprobs for _, logprobs in kept], 1),
        prompt_len=prompt_len,
        temperature=temperature,
    )


def draw_prompts(tokens: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """Windows of the training stream, all of one random length: int64 [rows, prompt_len]."""
    generator = torch.Generator().manual_seed(seed)
    prompt_len = int(torch.randint(PROMPT_LEN_MIN, PROMPT_LEN_MAX + 1, (), generator=generator))
    starts = torch.randint(len(tokens) - prompt_len, (rows,), generator=generator)
    return tokens[starts[:, None] + torch.arange(prompt_len)]


def generate_lessons(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    folder: Path,
    *,
    num_batches: int,
    limit_s: float,
    rows: int,
) -> list[Path]:
    """Fill the folder up to `num_batches` files of lessons or until the time is up; list all there are."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for index in range(num_batches):
        path = folder / f"{index:04d}.pt"
        if path.exists():
            continue
        spent = time.monotonic() - started
        if spent > limit_s:
            break
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        prompts = draw_prompts(tokens, rows, seed=1_000_000 + index)
        lessons = write_lessons(model, prompts, temperature=temperature, seed=index)
        staging = path.with_suffix(".new")
        torch.save(vars(lessons), staging)
        os.replace(staging, path)
        speed = rows * ANSWER_LEN / (time.monotonic() - started - spent)
        print(f"lessons: {index + 1}/{num_batches} {speed:.0f} tokens/s", flush=True)
    return sorted(folder.glob("*.pt"))


def load_lessons(path: Path) -> Lessons:
    """One file of lessons."""
    return Lessons(**torch.load(path))
