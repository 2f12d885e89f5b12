"""Which models does the engine run, and as what? Every family of `tests.families` against transformers itself.

`python -m tests.engine.conformance --markdown` prints the tables of `docs/reference/models.md`; the tests beside this
module ask the same questions one by one. All in float32, where transformers' own answer and ours may differ in rounding
only; bit-for-bit equality in any batch composition (I2) is asked for in bfloat16 as well.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.shards import shards_layers
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import Engine, ModelLoadError, SequenceChunk
from tests import models
from tests.engine.sequences import feed, logits_of, sharing, text
from tests.families import FAMILIES, Family

NUM_NEW_TOKENS = 64
PROMPT_LENS = (1, 7, 20, 33, 61)
LOGITS_LEN = 100
"""Longer than windows and attention chunks (24) and than one of our chunks of keys (64)."""


@functools.cache
def reference(key: str) -> Any:
    """transformers' own model, with its attention as the family defines it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        models.model_dir(key), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def reference_logits(key: str, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits of every token of one text.  # [num_tokens, vocab_size]"""
    return reference(key)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def logits_differ(key: str) -> float:
    """Largest difference of the logits of one text, fed in two pieces, over the largest logit."""
    engine = models.engine(key)
    token_ids = text(LOGITS_LEN, 1, engine.vocab_size)
    expected = reference_logits(key, token_ids)
    found = logits_of(engine, token_ids, prefill=41)
    return float((found - expected).abs().max() / expected.abs().max())


def prompts() -> list[list[int]]:
    # Token 1 is the padding of OPT's default; it is avoided only because `generate` warns about it.
    return [[3 + t % (models.VOCAB_SIZE - 3) for t in text(n, n, models.VOCAB_SIZE)] for n in PROMPT_LENS]


@dataclass
class Writer:
    """One sequence that grows greedily."""

    kv: KVSequence
    token_ids: list[int]
    final_len: int
    num_shared: int = 0  # leading KV entries that were offered to others, and so are final

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.kv.length

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) == self.final_len


def write_together(engine: Engine, rng: np.random.Generator, *, disturb: bool) -> list[list[int]]:
    """Greedy texts of all prompts in ragged steps: chunks of random size, and sequences that pause at random.

    With `disturb`, KV is rolled back and forked in between, and forks write nonsense beside their originals.
    """
    writers = [Writer(engine.new_sequence(), list(p), len(p) + NUM_NEW_TOKENS) for p in prompts()]
    while not all(writer.is_done for writer in writers):
        active = [writer for writer in writers if not writer.is_done and rng.random() < 0.85]
        if not active:
            continue
        chunks = []
        for writer in active:
            size = int(rng.integers(1, writer.num_pending + 1)) if rng.random() < 0.5 else writer.num_pending
            start = writer.kv.length
            writer.kv.extend(size)
            is_last = writer.num_pending == 0
            chunks.append(SequenceChunk(writer.kv, writer.token_ids[start : start + size], int(is_last)))
        rows = iter(engine.forward(chunks))
        for writer, chunk in zip(active, chunks, strict=True):
            if chunk.num_logits:
                writer.token_ids.append(int(next(rows).argmax()))
        if disturb:
            for writer in writers:
                _disturb(engine, writer, rng)
    for writer in writers:
        writer.kv.free()
    engine.allocator.check_integrity([])
    return [writer.token_ids for writer in writers]


def _disturb(engine: Engine, writer: Writer, rng: np.random.Generator) -> None:
    if rng.random() < 0.05:
        length = writer.kv.length
        writer.kv.truncate(int(rng.integers(max(writer.num_shared, length - 12), length + 1)))
    if rng.random() < 0.05 and writer.kv.length:
        fork = sharing(engine, writer.kv, writer.token_ids[: writer.kv.length])
        writer.num_shared = fork.length
        if rng.random() < 0.5:  # go on with the fork; the original writes nonsense
            fork, writer.kv = writer.kv, fork
        fork.truncate(int(rng.integers(max(writer.num_shared, fork.length - 4), fork.length + 1)))
        feed(engine, fork, text(int(rng.integers(1, 12)), int(rng.integers(1000)), engine.vocab_size), 1)
        fork.free()


def first_departure(key: str, texts: Sequence[Sequence[int]]) -> str | None:
    """The position of the first token that differs from transformers' greedy output, in words; None if there is none.

    One forward pass over the finished sequence gives transformers' choice at each position, given the tokens before it;
    as long as those agree, the sequence is transformers' own greedy output.
    """
    for prompt, token_ids in zip(prompts(), texts, strict=True):
        said = reference_logits(key, token_ids).argmax(dim=-1).tolist()
        for place in range(len(prompt), len(token_ids)):
            if token_ids[place] != said[place - 1]:
                return f"token {place - len(prompt)} after a prompt of {len(prompt)}"
    return None


def greedy_departs(key: str) -> str | None:
    """The first difference with ragged batches and chunked prefill; None if there is none."""
    return first_departure(key, write_together(models.engine(key), np.random.default_rng(1), disturb=False))


def disturbed_departs(key: str) -> str | None:
    """The first difference with rollbacks and forks in between as well; None if there is none."""
    return first_departure(key, write_together(models.engine(key), np.random.default_rng(2), disturb=True))


def invariance_failures(key: str) -> list[str]:
    return [
        f"{failure}, {dtype}"
        for dtype in ("float32", "bfloat16")
        for failure in batch_invariance_failures(models.engine(key, dtype), num_rounds=2)
    ]


LOGITS_TOLERANCE = 1e-4
COLUMNS = (
    "family",
    "example models",
    "logits",
    "greedy text",
    "rollback and forks",
    "batch-invariant",
    "kernels",
    "tensor-parallel plan",
)
REFUSAL_COLUMNS = ("refused", "example models", "why")


def row(family: Family) -> tuple[str, ...]:
    """The line of a family that is served."""
    engine = models.engine(family.key)
    difference = logits_differ(family.key)
    failures = invariance_failures(family.key)
    return (
        f"`{family.model_type}`",
        family.examples,
        "yes" if difference <= LOGITS_TOLERANCE else f"no: {difference:.1e} apart",
        _yes_unless(greedy_departs(family.key)),
        _yes_unless(disturbed_departs(family.key)),
        "yes" if not failures else f"no: {family.variant or failures[0]}",
        "fused" if engine.is_fused else "plain",
        "yes" if has_plan(family.key) else "no",
    )


def has_plan(key: str) -> bool:
    """Whether transformers knows how to cut a family's layers between ranks."""
    model: Any = models.engine(key).model
    return shards_layers(model.tp_plan)


def _yes_unless(departure: str | None) -> str:
    return "yes" if departure is None else f"no: {departure}"


def refusal_row(family: Family) -> tuple[str, ...]:
    """The line of a family that `load_model` refuses."""
    try:
        models.engine(family.key)
    except ModelLoadError as error:
        return f"`{family.model_type}`", family.examples, str(error).partition(": ")[2]
    raise AssertionError(f"{family.model_type} is not refused")


def tables(families: Sequence[Family] = FAMILIES) -> str:
    """Markdown tables of the model families that are served, green ones first, and of those that are refused."""
    served = [row(each) for each in sorted(families, key=lambda each: not each.is_green) if not each.refused]
    refused = [refusal_row(each) for each in families if each.refused]
    return f"{_table(COLUMNS, served)}\n\n{_table(REFUSAL_COLUMNS, refused)}"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/reference/models.md")
    parser.add_argument("family", nargs="*", help="only these model types")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    chosen = [each for each in FAMILIES if not arguments.family or each.model_type in arguments.family]
    if arguments.markdown:
        print(tables(chosen))
        return
    for family in chosen:
        print(*(refusal_row(family) if family.refused else row(family)), sep="  ", flush=True)


if __name__ == "__main__":
    main()
