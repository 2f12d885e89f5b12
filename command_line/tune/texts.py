"""Generates the target's outputs and ranks them by the draft's candidates. Runs both models.

One model is in memory at a time. The target generates all sequences first. The draft then reads them in long forward
passes (teacher forcing): its candidates at every position are those that it would have sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from command_line.tune.agreement import NUM_RANKED, UNRANKED
from command_line.tune.findings import Settings
from command_line.tune.profile import num_affordable
from outrider.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from outrider.engine.heads.head_engine import HeadEngine
    from outrider.engine.model import Engine

PREFILL_TOKENS: Final = 256  # tokens per forward pass

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A prompt and the target's output."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, on_progress: OnProgress
) -> list[GeneratedText]:
    """Greedy sequences of at most `num_tokens` tokens; they end at the end token or when the budget is spent.

    Every group of prompts gets an equal share of the remaining budget. Empty sequences are left out.
    """
    deadline = time.perf_counter() + settings.budget_s
    size = num_affordable(engine, max(map(len, prompts)) + settings.num_tokens)
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    texts: list[GeneratedText] = []
    for number, group in enumerate(groups):
        now = time.perf_counter()
        if now > deadline:
            break
        share_s = (deadline - now) / (len(groups) - number)
        on_progress(f"The target's greedy texts: {number * size} of {len(prompts)} prompts.")
        texts += _generate_together(engine, group, settings.num_tokens, now + share_s)
    return [text for text in texts if text.token_ids]


def _generate_together(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, deadline: float
) -> list[GeneratedText]:
    from outrider.engine.model import SequenceChunk

    sequences = [engine.new_sequence() for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    try:
        for kv, prompt, text in zip(sequences, prompts, texts, strict=True):
            for start in range(0, len(prompt), PREFILL_TOKENS):
                part = list(prompt[start : start + PREFILL_TOKENS])
                kv.extend(len(part))
                logits = engine.forward([SequenceChunk(kv, part, 1)])
            text.append(int(logits[-1].argmax()))
            if time.perf_counter() > deadline:
                break
        going = [i for i, text in enumerate(texts) if text and text[-1] not in engine.eos_token_ids]
        while going and len(texts[going[0]]) < num_tokens and time.perf_counter() < deadline:
            for i in going:
                sequences[i].extend(1)
            said = engine.forward([SequenceChunk(sequences[i], [texts[i][-1]], 1) for i in going])
            for i, token_id in zip(going, said.argmax(dim=-1).tolist(), strict=True):
                texts[i].append(token_id)
            going = [i for i in going if texts[i][-1] not in engine.eos_token_ids]
    finally:
        for kv in sequences:
            kv.free()
    return [GeneratedText(tuple(prompt), tuple(text)) for prompt, text in zip(prompts, texts, strict=True) if text]


def ranks(engine: Engine, text: GeneratedText) -> tuple[int, ...]:
    """Rank of each output token among the draft's candidates, teacher-forced; see `agreement`.

    The first candidate is the argmax, as in the worker: if several tokens share the maximum, topk may name another
    one first. Stops before a token outside the draft's vocabulary.
    """
    from outrider.engine.model import SequenceChunk

    whole = [*text.prompt_token_ids, *text.token_ids]
    start = len(text.prompt_token_ids)
    end = num_readable(engine, whole)
    kv = engine.new_sequence()
    found: list[int] = []
    try:
        # The logits after token i predict token i + 1, so the last token is not fed.
        for first in range(0, end - 1, PREFILL_TOKENS):
            part = whole[first : min(first + PREFILL_TOKENS, end - 1)]
            kv.extend(len(part))
            wanted = min(len(part), max(0, first + len(part) - (start - 1)))
            logits = engine.forward([SequenceChunk(kv, part, wanted)])
            if wanted:
                position = first + len(part) - wanted + 1
                found += ranks_of(logits, whole[position : position + wanted])
    finally:
        kv.free()
    return tuple(found)


def ranks_within(engine: Engine, texts: Sequence[GeneratedText], budget_s: float) -> tuple[tuple[int, ...], ...]:
    """`ranks` of as many sequences as the budget allows, at least one."""
    deadline = time.perf_counter() + budget_s
    found: list[tuple[int, ...]] = []
    for text in texts:
        if found and time.perf_counter() > deadline:
            break
        found.append(ranks(engine, text))
    return tuple(found)


def num_readable(engine: Engine | HeadEngine, token_ids: Sequence[int]) -> int:
    """Number of tokens before the first one outside the engine's vocabulary."""
    return next((i for i in range(len(token_ids)) if token_ids[i] >= engine.vocab_size), len(token_ids))


def ranks_of(logits: torch.Tensor, token_ids: Sequence[int]) -> list[int]:
    """Ranks of tokens among the likeliest of their rows.  # logits: [len(token_ids), vocab_size]"""
    best = logits.argmax(dim=-1).tolist()
    likeliest = logits.topk(min(NUM_RANKED, logits.shape[-1]), dim=-1).indices.tolist()
    found = []
    for token_id, first, row in zip(token_ids, best, likeliest, strict=True):
        ordered = [first, *(other for other in row if other != first)][:NUM_RANKED]
        found.append(ordered.index(token_id) if token_id in ordered else UNRANKED)
    return found


def check_texts(texts: Sequence[object], budget_s: float) -> None:
    """Raises InvalidRequest if nothing was generated in time."""
    if not texts:
        raise InvalidRequest(
            "budget_s",
            f"the target generated nothing within {budget_s:g} s; raise --budget-s or give shorter prompts",
        )
