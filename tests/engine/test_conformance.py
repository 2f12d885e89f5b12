"""The engine says what transformers' own `generate` says (float32, greedy), however its work is cut up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers

from outrider.engine.kv_cache import KVSequence
from outrider.engine.model import Engine, SequenceChunk
from tests import models
from tests.engine.sequences import feed, text

NUM_NEW_TOKENS = 64
PROMPT_LENS = (1, 7, 20, 33, 61)


@functools.cache
def expected_texts(family: str) -> list[list[int]]:
    """transformers' own continuation of each prompt, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.model_dir(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = []
    for prompt in prompts():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        texts.append(output[0].tolist())
    return texts


def prompts() -> list[list[int]]:
    # Token 1 is the padding of OPT's default; it is avoided only because `generate` warns about it.
    return [[3 + t % (models.VOCAB_SIZE - 3) for t in text(n, n, models.VOCAB_SIZE)] for n in PROMPT_LENS]


@dataclass
class Writer:
    """One sequence that grows greedily."""

    kv: KVSequence
    token_ids: list[int]
    final_len: int

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
            engine.copy_blocks(writer.kv.extend(size))
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
        writer.kv.truncate(int(rng.integers(max(0, writer.kv.length - 12), writer.kv.length + 1)))
    if rng.random() < 0.05 and writer.kv.length:
        fork = writer.kv.fork()
        if rng.random() < 0.5:  # go on with the fork; the original writes nonsense
            fork, writer.kv = writer.kv, fork
        fork.truncate(int(rng.integers(max(0, fork.length - 4), fork.length + 1)))
        feed(engine, fork, text(int(rng.integers(1, 12)), int(rng.integers(1000)), engine.vocab_size), 1)
        fork.free()


@pytest.mark.parametrize("family", models.SUPPORTED)
class TestGreedyTextIsThatOfTransformers:
    """I2, and the acceptance test of design section 8: identical tokens."""

    def test_reference_text_is_varied_enough_to_tell_models_apart(self, family: str) -> None:
        new = {tuple(t[n:]) for n, t in zip(PROMPT_LENS, expected_texts(family), strict=True)}
        assert len(new) == len(PROMPT_LENS)
        assert max(len(set(tokens)) for tokens in new) >= 8

    def test_ragged_batches_and_chunked_prefill(self, family: str) -> None:
        engine = models.engine(family)
        assert write_together(engine, np.random.default_rng(1), disturb=False) == expected_texts(family)

    def test_rollback_and_forks_in_between(self, family: str) -> None:
        engine = models.engine(family)
        assert write_together(engine, np.random.default_rng(2), disturb=True) == expected_texts(family)


def test_sliding_window_is_shorter_than_the_text_and_matters() -> None:
    """Otherwise the conformance test of Mistral would show nothing."""
    engine = models.engine("mistral")
    window = engine.model.config.sliding_window
    assert window == models.SLIDING_WINDOW < min(PROMPT_LENS) + NUM_NEW_TOKENS
    base = text(4 * window, 5, engine.vocab_size)
    within, beyond = list(base), list(base)
    within[-window] = (within[-window] + 1) % engine.vocab_size
    beyond[0] = (beyond[0] + 1) % engine.vocab_size  # two layers see 2 * window - 1 back
    outputs = []
    for token_ids in (base, within, beyond):
        kv = engine.new_sequence()
        outputs.append(feed(engine, kv, token_ids, 1)[0])
        kv.free()
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_long_prefill_in_one_piece_equals_one_in_many() -> None:
    """More rows than one attention call takes (256)."""
    engine = models.engine("llama")
    token_ids = text(450, 11, engine.vocab_size)
    whole = engine.new_sequence()
    pieces = engine.new_sequence()
    expected = feed(engine, whole, token_ids, 450)
    outputs = [feed(engine, pieces, token_ids[i : i + 90], 90) for i in range(0, 450, 90)]
    whole.free()
    pieces.free()
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-4)
