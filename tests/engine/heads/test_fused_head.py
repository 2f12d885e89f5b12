"""The fused form of an EAGLE-3 head gives the logits and features of transformers' modules."""

from __future__ import annotations

import functools
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.compiled import kernels
from outrider.engine.heads.fused_head import can_fuse
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import load_head
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.sequence_chunk import SequenceChunk
from tests import models
from tests.engine.heads.checkpoints import write_target
from tests.engine.heads.engines import head_engine
from tests.exactness.heads import WIDTH, write_head

VOCAB = 64  # of the target that `write_target` writes
pytestmark = pytest.mark.skipif(not kernels.available(), reason="the kernels are not compiled")


@functools.cache
def folders() -> tuple[Path, Path]:
    root = models.root_dir() / "fused-head"
    return write_head(root / "head", VOCAB, 128), write_target(root / "target")


@functools.cache
def engine(*, is_fused: bool, dtype: str = "float32") -> HeadEngine:
    head, target = folders()
    config = models.engine_config(head, dtype, kv_cache_gib=0.004)
    return load_head(replace(config, enforce_eager=not is_fused), target)


def test_a_head_is_fused_unless_that_is_turned_off() -> None:
    assert engine(is_fused=True)._fused is not None
    assert engine(is_fused=False)._fused is None


@pytest.mark.parametrize("name", ["mtp-deepseek", "speculators-qwen3"])
def test_what_has_another_shape_is_not_fused(name: str) -> None:
    """An MTP layer, and two layers."""
    assert not can_fuse(head_engine(name).head, torch.float32, "cpu")


class Forms:
    """A sequence in several forms of the head, fed alike: fused, as modules, and as modules in float32."""

    def __init__(self, dtype: str) -> None:
        self.engines = [
            engine(is_fused=True, dtype=dtype), engine(is_fused=False, dtype=dtype), engine(is_fused=False)
        ]  # fmt: skip
        self.kvs: list[KVSequence] = [each.new_sequence() for each in self.engines]

    def extend(self, count: int) -> None:
        for kv in self.kvs:
            kv.extend(count)

    def truncate(self, length: int) -> None:
        for kv in self.kvs:
            kv.truncate(length)

    def set_features(self, first: int, vectors: torch.Tensor) -> None:
        for head, kv in zip(self.engines, self.kvs, strict=True):
            head.set_features(kv.slots(first, first + len(vectors)), vectors)

    def free(self) -> None:
        for kv in self.kvs:
            kv.free()


def run(sequences: list[Forms], token_ids: list[list[int]], **tree: Any) -> list[torch.Tensor]:
    """Logits of all rows of one step of several sequences, in each form."""
    found = []
    for index, head in enumerate(sequences[0].engines):
        chunks = [
            SequenceChunk(each.kvs[index], ids, len(ids), **tree)
            for each, ids in zip(sequences, token_ids, strict=True)
        ]
        found.append(head.forward(chunks))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_the_modules(dtype: str) -> None:
    """Prompts in parts, single tokens, features that are there or not, several sequences of different lengths.

    In bfloat16 both round, and rows on the head's own output differ more with every row: neither is further from
    float32 than the other. Medians: a random head amplifies a difference over a long draft of its own.
    """
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    sequences = [Forms(dtype) for _ in range(3)]
    off: list[float] = []
    own: list[float] = []
    for step in range(12):
        ids = []
        for each in sequences:
            count = rng.choice([1, 1, 3, 20]) if step else rng.choice([1, 2, 7])
            first = each.kvs[0].length
            each.extend(count)
            ids.append([rng.randrange(VOCAB) for _ in range(count)])
            if rng.random() < 0.6:
                each.set_features(first, torch.randn(rng.randrange(1, count + 1), WIDTH, generator=generator))
        fused, modules, exact = run(sequences, ids)
        off.append(float((fused - exact).abs().mean()))
        own.append(float((modules - exact).abs().mean()))
        for each in sequences:
            if rng.random() < 0.3 and each.kvs[0].length > 60:
                each.truncate(rng.randrange(30, 60))
    assert statistics.median(off) <= (1.3 * statistics.median(own) if dtype == "bfloat16" else 5e-6)
    for each in sequences:
        each.free()


@pytest.mark.parametrize("committed", [1, 2, 9])
def test_rows_of_a_tree_are_those_of_the_modules(committed: int) -> None:
    generator = torch.Generator().manual_seed(committed)
    pair = Forms("float32")
    pair.extend(committed)
    pair.set_features(0, torch.randn(committed, WIDTH, generator=generator))
    run([pair], [list(range(committed))])
    first = committed
    paths = [[first], [first, first + 1], [first, first + 2], [first, first + 1, first + 3]]
    pair.extend(len(paths))
    fused, plain, _ = run([pair], [[7, 8, 9, 10]], tree_start=committed, paths=paths)
    assert torch.allclose(fused, plain, atol=1e-5 * max(float(plain.std()), 1.0))
    for head, kv in zip(pair.engines, pair.kvs, strict=True):
        assert head.features[torch.from_numpy(kv.slots(0, kv.length))].isfinite().all()
    pair.free()


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    pairs = [Forms("bfloat16") for _ in range(4)]
    for pair in pairs:
        pair.extend(20)
    alone = run(pairs[:1], [list(range(20))])[0]
    pairs[0].truncate(0)
    pairs[0].extend(20)
    together = run(pairs, [list(range(20))] * 4)[0]
    assert torch.equal(together[:20], alone)
    for pair in pairs:
        pair.free()
