"""A batch of tree nodes gives what every root-to-node path gives when it is run in a line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.model import Engine, SequenceChunk
from tests import models
from tests.engine.sequences import feed, logits_of, text


@dataclass
class Tree:
    """Random nodes below a prefix; `parents[i] < i`, -1 is the prefix itself."""

    prefix: list[int]
    parents: list[int]
    token_ids: list[int]

    def path(self, node: int) -> list[int]:
        """Node indices from the first below the prefix down to `node`."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def linear(self, node: int) -> list[int]:
        return self.prefix + [self.token_ids[i] for i in self.path(node)]

    def chunk(self, kv: KVSequence, nodes: list[int], entry_nodes: list[int]) -> SequenceChunk:
        """A step over `nodes`; `entry_nodes[i]` is the node of KV entry `len(prefix) + i`."""
        return SequenceChunk(
            kv,
            [self.token_ids[node] for node in nodes],
            len(nodes),
            tree_start=len(self.prefix),
            paths=[[len(self.prefix) + entry_nodes.index(n) for n in self.path(node)] for node in nodes],
        )


def random_tree(rng: np.random.Generator, vocab_size: int, prefix_len: int, num_nodes: int) -> Tree:
    parents = [int(rng.integers(max(-1, i - 5), i)) for i in range(num_nodes)]
    return Tree(
        text(prefix_len, int(rng.integers(1000)), vocab_size),
        parents,
        rng.integers(0, vocab_size, num_nodes).tolist(),
    )


def grow(engine: Engine, kv: KVSequence, tree: Tree, sizes: list[int]) -> torch.Tensor:
    """Feeds the prefix, then the nodes in steps of `sizes`.  # [num_nodes, vocab_size]"""
    feed(engine, kv, tree.prefix, 1)
    rows, done = [], 0
    for size in sizes:
        kv.extend(size)
        nodes = list(range(done, done + size))
        rows.append(engine.forward([tree.chunk(kv, nodes, list(range(done + size)))]))
        done += size
    return torch.cat(rows)


@pytest.mark.parametrize("family", models.SUPPORTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("prefix_len", "sizes"), [(5, [1, 3, 8, 2]), (60, [8, 8]), (23, [1] * 6 + [9])])
def test_tree_nodes_have_the_logits_of_their_paths(family: str, dtype: str, prefix_len: int, sizes: list[int]) -> None:
    """The very same bits: a draft equal to its target must make the same choices, near ties included."""
    engine = models.engine(family, dtype)
    rng = np.random.default_rng(prefix_len)
    tree = random_tree(rng, engine.vocab_size, prefix_len, sum(sizes))
    kv = engine.new_sequence()
    rows = grow(engine, kv, tree, sizes)
    kv.free()
    for node in range(sum(sizes)):
        expected = logits_of(engine, tree.linear(node), prefill=prefix_len)[-1]
        assert torch.equal(rows[node], expected)


def test_sliding_window_of_a_tree_node_counts_positions_not_entries() -> None:
    """Ten siblings stand between a node and its window's end; only depth may count."""
    engine = models.engine("mistral")
    prefix_len = models.SLIDING_WINDOW + 10
    tree = random_tree(np.random.default_rng(0), engine.vocab_size, prefix_len, 14)
    tree.parents[:] = [-1] * 11 + [10, 11, 12]
    kv = engine.new_sequence()
    rows = grow(engine, kv, tree, [11, 1, 1, 1])
    kv.free()
    assert torch.equal(rows[13], logits_of(engine, tree.linear(13))[-1])


def test_trees_and_lines_share_a_step() -> None:
    engine = models.engine("llama")
    tree = random_tree(np.random.default_rng(3), engine.vocab_size, 17, 6)
    line = text(40, 9, engine.vocab_size)
    first, second = engine.new_sequence(), engine.new_sequence()
    feed(engine, first, tree.prefix, 1)
    first.extend(6)
    second.extend(40)
    rows = engine.forward([SequenceChunk(second, line, 40), tree.chunk(first, list(range(6)), list(range(6)))])
    first.free()
    second.free()
    assert torch.equal(rows[:40], logits_of(engine, line))
    for node in range(6):
        expected = logits_of(engine, tree.linear(node))[-1]
        assert torch.equal(rows[40 + node], expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("prefix_len", "num_on_path"), [(40, 3), (250, 10), (256, 1), (509, 6)])
def test_nodes_share_a_step_with_the_line_that_they_follow(
    family: str, dtype: str, prefix_len: int, num_on_path: int
) -> None:
    """As a target verifies branches, around the borders of the kernels' blocks of 256 keys: they read the text's keys
    together, and each row has the bits that it has alone."""
    engine = models.engine(family, dtype)
    tree = random_tree(np.random.default_rng(prefix_len), engine.vocab_size, prefix_len, num_on_path + 40)
    tree.parents[:num_on_path] = range(-1, num_on_path - 1)
    branches = range(num_on_path, num_on_path + 40)
    kv = engine.new_sequence()
    feed(engine, kv, tree.prefix, 1)
    kv.extend(num_on_path + 40)
    on_path = KVSequence(kv.allocator, kv.block_ids, kv.length - 40)
    line = SequenceChunk(on_path, tree.token_ids[:num_on_path], num_on_path)
    company = engine.new_sequence()
    company.extend(30)
    other = SequenceChunk(company, text(30, 9, engine.vocab_size), 1)
    nodes = list(range(num_on_path + 40))
    rows = engine.forward([line, tree.chunk(kv, list(branches), nodes), other])
    kv.free()
    company.free()
    for node in nodes:
        assert torch.equal(rows[node], logits_of(engine, tree.linear(node), prefill=prefix_len)[-1])


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_after_entries_were_moved_together_the_path_goes_on_as_if_it_had_been_a_line(family: str, dtype: str) -> None:
    """`move_entries`, overlapping sources and destinations included; in every type the very same bits."""
    engine = models.engine(family, dtype)
    rng = np.random.default_rng(7)
    tree = random_tree(rng, engine.vocab_size, 13, 12)
    tree.parents[:] = [-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9]  # the path is 1 3 5 7 9 11
    path = tree.path(11)
    kv = engine.new_sequence()
    grow(engine, kv, tree, [2, 2, 2, 2, 2, 2])
    slots = kv.slots(0, kv.length)
    sources = np.asarray([13 + node for node in path])
    destinations = np.arange(13, 13 + len(path))
    engine.move_entries(slots[sources], slots[destinations])
    kv.truncate(13 + len(path))
    after = feed(engine, kv, [4, 5, 6], 3)
    kv.free()
    line = engine.new_sequence()
    feed(engine, line, tree.prefix, 1)
    for node in path:
        feed(engine, line, [tree.token_ids[node]], 1)
    expected = feed(engine, line, [4, 5, 6], 3)
    line.free()
    assert torch.equal(after, expected)
