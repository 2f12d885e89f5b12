"""Steps laid out for FlashAttention, over a stand-in that attends row by row as torch documents it to.

What only a GPU can show (the kernel itself, graphs, speed) is in `test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.engine.device_steps import DeviceSteps, empty_step
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.attention import Visibility
from outrider.engine.layers.paged_attention import missing_parameters, window_of
from outrider.engine.layers.paged_layout import PagedShape, plan_paged
from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine, SequenceChunk
from tests import models
from tests.engine.sequences import sharing, text
from tests.engine.test_tree_attention import Tree, random_tree

BLOCK_SIZE = 8
NUM_SCRATCH = 24
MAX_BLOCKS = 40


def attend_row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """`varlen_attn` with its window, aligned at the end. Rows of no sequence stay undefined: not a number."""
    assert (window_size[1], num_splits, cu_seq_k) == (0, 1, None)
    assert max_q > 1  # for one row a sequence the kernel has another algorithm
    output = torch.full_like(query, float("nan"))
    starts = cu_seq_q.tolist()
    for number, num_keys in enumerate(seqused_k.tolist()):
        num_rows = starts[number + 1] - starts[number]
        assert num_rows <= max_q
        assert num_keys <= max_k
        keys, values = (cache[block_table[number].long()].flatten(0, 1) for cache in (key, value))
        for row in range(num_rows):
            count = max(num_keys - num_rows + row + 1, 0)
            place = starts[number] + row
            share = query.shape[1] // key.shape[2]
            first = 0 if window_size[0] < 0 else max(count - 1 - window_size[0], 0)
            own_keys = keys[first:count].repeat_interleave(share, dim=1).transpose(0, 1)
            own_values = values[first:count].repeat_interleave(share, dim=1).transpose(0, 1)
            scores = (query[place].unsqueeze(1) * own_keys).sum(-1).float() * scale
            weights = torch.softmax(scores, dim=-1).to(query.dtype)
            output[place] = (weights.unsqueeze(-1) * own_values).sum(1) if count else 0.0
    return output


@dataclass
class Pair:
    """One engine, and the same model's steps in the other layout."""

    engine: Engine
    steps: DeviceSteps

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """By the other layout, every row's logits; the engine's own are about the same."""
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        expected = self.engine.forward(chunks)
        found = self.steps.forward(chunks, range(num_rows))
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return found


@pytest.fixture(scope="module", params=["llama", "qwen3", "opt", "mistral"])
def pair(request: pytest.FixtureRequest) -> Pair:
    config = models.engine_config(
        models.model_dir(request.param), block_size=BLOCK_SIZE, enforce_eager=True, max_model_len=200
    )
    engine = load_model(config)
    scratch = [engine.allocator.allocate() for _ in range(NUM_SCRATCH)]
    return Pair(
        engine,
        DeviceSteps(engine.model, engine.layers, BLOCK_SIZE, scratch, MAX_BLOCKS * BLOCK_SIZE, attend_row_by_row),
    )


def feed(pair: Pair, kv: KVSequence, token_ids: Sequence[int]) -> torch.Tensor:
    kv.extend(len(token_ids))
    return pair.forward([SequenceChunk(kv, list(token_ids), len(token_ids))])


def line(pair: Pair, token_ids: Sequence[int], prefill: int) -> torch.Tensor:
    """Logits of a text of its own, the first `prefill` tokens fed apart."""
    kv = pair.engine.new_sequence()
    rows = [feed(pair, kv, part) for part in (token_ids[:prefill], token_ids[prefill:]) if part]
    kv.free()
    return torch.cat(rows)


@pytest.mark.parametrize(("prefix_len", "sizes"), [(5, [1, 3, 8, 2]), (60, [8, 6]), (24, [1] * 5 + [4])])
def test_tree_nodes_have_the_bits_of_their_paths(pair: Pair, prefix_len: int, sizes: list[int]) -> None:
    tree = random_tree(np.random.default_rng(prefix_len), pair.engine.vocab_size, prefix_len, sum(sizes))
    kv = pair.engine.new_sequence()
    feed(pair, kv, tree.prefix)
    rows, done = [], 0
    for size in sizes:
        kv.extend(size)
        chunk = tree.chunk(kv, list(range(done, done + size)), list(range(done + size)))
        rows.append(pair.forward([chunk]))
        done += size
    kv.free()
    together = torch.cat(rows)
    for node in range(sum(sizes)):
        assert torch.equal(together[node], line(pair, tree.linear(node), prefix_len)[-1])


def test_texts_forks_and_trees_share_a_step(pair: Pair) -> None:
    engine = pair.engine
    tree = random_tree(np.random.default_rng(3), engine.vocab_size, 17, 6)
    first, second = engine.new_sequence(), engine.new_sequence()
    feed(pair, first, tree.prefix)
    fork = sharing(engine, first, tree.prefix)
    feed(pair, fork, tree.prefix[fork.length :])
    words = text(40, 9, engine.vocab_size)
    for kv, count in ((first, 6), (second, 40), (fork, 3)):
        kv.extend(count)
    rows = pair.forward(
        [
            SequenceChunk(second, words, 40),
            tree.chunk(first, list(range(6)), list(range(6))),
            SequenceChunk(fork, words[:3], 3),
        ]
    )
    for kv in (first, second, fork):
        kv.free()
    assert torch.equal(rows[:40], line(pair, words, 0))
    for node in range(6):
        assert torch.equal(rows[40 + node], line(pair, tree.linear(node), 17)[-1])
    assert torch.equal(rows[46:], line(pair, tree.prefix + words[:3], 17)[-3:])


def test_a_larger_shape_changes_no_bit(pair: Pair) -> None:
    """A captured graph runs such a shape: more rows, sequences, blocks and copies than the step has."""
    engine = pair.engine
    tree = random_tree(np.random.default_rng(4), engine.vocab_size, 21, 5)
    kv = engine.new_sequence()
    feed(pair, kv, tree.prefix)
    kv.extend(5)
    chunk = tree.chunk(kv, list(range(5)), list(range(5)))
    expected = pair.forward([chunk])
    plan = plan_paged([chunk.query_block()], chunk.token_ids, range(5), BLOCK_SIZE, pair.steps._scratch_block_ids)
    assert plan is not None
    shape = PagedShape(32, 20, MAX_BLOCKS, NUM_SCRATCH * BLOCK_SIZE)
    assert shape.holds(plan.shape)
    with torch.inference_mode():
        logits, _ = pair.steps._run(torch.from_numpy(plan.write_down(shape)), shape, 32)
    kv.free()
    assert torch.equal(logits[:5], expected)
    assert bool(logits.isfinite().all())
    assert all(bool(cache.isfinite().all()) for layer in engine.caches for cache in layer)


def test_a_step_of_nothing_but_padding_is_harmless(pair: Pair) -> None:
    """Graphs are captured with it."""
    kept = line(pair, text(20, 1, pair.engine.vocab_size), 0)
    shape = PagedShape(16, 17, MAX_BLOCKS, NUM_SCRATCH * BLOCK_SIZE)
    with torch.inference_mode():
        logits, _ = pair.steps._run(torch.from_numpy(empty_step(shape)), shape, 16)
    assert bool(logits.isfinite().all())
    assert torch.equal(line(pair, text(20, 1, pair.engine.vocab_size), 0), kept)


def test_trees_beyond_the_scratch_blocks_are_left_to_the_other_layout(pair: Pair) -> None:
    engine = pair.engine
    tree = Tree(text(7, 1, engine.vocab_size), [-1] * 30, text(30, 2, engine.vocab_size))
    kv = engine.new_sequence()
    feed(pair, kv, tree.prefix)
    kv.extend(30)
    chunk = tree.chunk(kv, list(range(30)), list(range(30)))
    assert pair.steps.forward([chunk], range(30)) is None
    kv.free()


def test_logits_come_for_the_rows_that_are_wanted(pair: Pair) -> None:
    kv = pair.engine.new_sequence()
    kv.extend(20)
    chunk = SequenceChunk(kv, text(20, 5, pair.engine.vocab_size), 2)
    every = pair.forward([SequenceChunk(kv, chunk.token_ids, 20)])
    found = pair.steps.forward([chunk], [18, 19])
    kv.free()
    assert found is not None
    assert torch.equal(found, every[18:])


def test_windows_are_found() -> None:
    def within(window: int) -> Visibility:
        return lambda _sequence, _head, query, key: key > query - window

    assert window_of(lambda _sequence, _head, query, key: key <= query, 300) == 300
    assert [window_of(within(window), 300) for window in (1, 2, 65, 128, 299)] == [1, 2, 65, 128, 299]
    assert window_of(lambda *positions: within(100)(*positions) | (positions[3] < 4), 300) is None
    assert window_of(lambda _sequence, _head, query, key: query // 64 == key // 64, 300) is None
    assert window_of(lambda _sequence, _head, query, key: (query - key) % 2 == 0, 300) is None


def test_an_attention_that_knows_no_block_table_is_found_by_its_parameters() -> None:
    from torch.nn.attention.varlen import varlen_attn

    def older(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, seqused_k: torch.Tensor) -> None:
        """torch 2.11 had no more of them."""

    assert missing_parameters(varlen_attn) == []
    assert missing_parameters(attend_row_by_row) == []
    assert missing_parameters(older) == ["enable_gqa", "block_table", "num_splits"]
