"""The compiled kernels against the same arithmetic spelt out, and bit for bit against themselves in other batches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.compiled.kernels import (
    HEAD_DIMS,
    MAX_QUERIES,
    Instructions,
    Kernels,
    Shape,
    available,
    every_product,
    kernels,
)
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.layers.attention import QueryBlock
from outrider.engine.layers.decoder import RaggedStep

pytestmark = pytest.mark.skipif(not available(), reason="the installation found no C++ compiler")

BOTH_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EXACT = {
    torch.float32: (2e-5, 2e-6),
    torch.bfloat16: (2**-7, 2e-5),
}  # rtol, atol of one rounding of the result
NUM_GUARDS = 64  # numbers behind an output that must stay as they were


def compiled(dtype: torch.dtype) -> Kernels:
    found = kernels(dtype)
    assert found is not None
    return found


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Guarded:
    """A tensor with numbers behind it that no kernel may touch."""

    def __init__(self, content: torch.Tensor) -> None:
        self._all = torch.full((content.numel() + NUM_GUARDS,), 7.0, dtype=content.dtype)
        self.tensor = self._all[: content.numel()].view(content.shape)
        self.tensor.copy_(content)

    def check(self) -> torch.Tensor:
        assert bool((self._all[-NUM_GUARDS:] == 7.0).all()), "written past the end"
        return self.tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, and not a number in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def rms_norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As transformers does it: rounded before the weight is applied, and after."""
    wide = values.double()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (normed.to(values.dtype).double() * weight.double()).to(values.dtype)


def add_rms_norm(
    residual: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its norm.  # [num_rows, width] each"""
    own, output = Guarded(residual), Guarded(torch.zeros_like(residual))
    compiled(residual.dtype).add_rms_norm(
        own.tensor.data_ptr(),
        None if addend is None else addend.data_ptr(),
        *(weight.data_ptr(), output.tensor.data_ptr(), *residual.shape, epsilon),
    )
    return own.check(), output.check()


class TestAddRMSNorm:
    @BOTH_TYPES
    @pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 31, 48, 100, 256, 1000])
    @pytest.mark.parametrize("has_addend", [True, False], ids=["added", "first"])
    def test_it_adds_and_normalises(self, dtype: torch.dtype, width: int, has_addend: bool) -> None:
        generator = seeded(width)
        residual, weight = normal(generator, dtype, 5, width) * 3, normal(generator, dtype, width)
        addend = normal(generator, dtype, 5, width) if has_addend else None
        total, output = add_rms_norm(residual, addend, weight)
        assert torch.equal(total, residual if addend is None else residual + addend)
        rtol, atol = (2e-5, 1e-6) if dtype == torch.float32 else (2**-6, 1e-6)  # two roundings
        torch.testing.assert_close(output, rms_norm(total, weight, 1e-6), rtol=rtol, atol=atol)

    @BOTH_TYPES
    def test_rows_of_zeros_and_of_large_numbers_have_a_norm(self, dtype: torch.dtype) -> None:
        residual = torch.stack([torch.zeros(40), torch.full((40,), 1e15), torch.full((40,), 1e-12)]).to(dtype)
        weight = torch.ones(40, dtype=dtype)
        _, output = add_rms_norm(residual, None, weight, 1e-5)
        torch.testing.assert_close(output, rms_norm(residual, weight, 1e-5), rtol=2**-7, atol=1e-12)

    @BOTH_TYPES
    @pytest.mark.parametrize("width", [17, 64, 1000])
    def test_a_row_has_the_bits_it_has_alone(self, dtype: torch.dtype, width: int) -> None:
        generator = seeded(1)
        residual, addend = normal(generator, dtype, 9, width), normal(generator, dtype, 9, width)
        weight = normal(generator, dtype, width)
        residual[4, 0] = float("nan")
        total, output = add_rms_norm(residual, addend, weight)
        for row in range(9):
            alone = add_rms_norm(residual[row : row + 1], addend[row : row + 1].clone(), weight)
            assert same_bits(total[row], alone[0][0])
            assert same_bits(output[row], alone[1][0])
        assert output.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]

    def test_sums_are_rounded_to_the_nearest_bfloat16(self) -> None:
        """Whatever the bits say: infinities, denormal numbers, what is not a number."""
        bits = torch.randint(-(2**15), 2**15, (2, 64, 100), generator=seeded(2), dtype=torch.int16)
        near = torch.randint(-60, 60, (64, 50), generator=seeded(3), dtype=torch.int16)
        bits[1, :, :50] = bits[0, :, :50] + near  # of like size, so that ties and cancellation occur
        residual, addend = bits.view(torch.bfloat16)
        total, _ = add_rms_norm(residual, addend, torch.ones(100, dtype=torch.bfloat16))
        assert same_bits(total, residual + addend)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = Guarded(gate_up.new_zeros(num_rows, width))
    compiled(gate_up.dtype).silu_mul(gate_up.data_ptr(), output.tensor.data_ptr(), num_rows, width)
    return output.check()


def exact_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


class TestSiluMul:
    @BOTH_TYPES
    @pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 96, 100, 500])
    def test_it_gates(self, dtype: torch.dtype, width: int) -> None:
        gate_up = normal(seeded(width), dtype, 4, 2 * width) * 4
        rtol, atol = EXACT[dtype]
        torch.testing.assert_close(silu_mul(gate_up), exact_silu_mul(gate_up), rtol=rtol, atol=atol)

    @BOTH_TYPES
    def test_the_exponential_holds_over_its_whole_range(self, dtype: torch.dtype) -> None:
        gate = torch.cat([torch.linspace(-120, 120, 961), torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30])])
        gate_up = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0).to(dtype)
        rtol = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(silu_mul(gate_up), exact_silu_mul(gate_up), rtol=rtol, atol=1e-6)

    @BOTH_TYPES
    @pytest.mark.parametrize("width", [17, 64])
    def test_a_row_has_the_bits_it_has_alone(self, dtype: torch.dtype, width: int) -> None:
        gate_up = normal(seeded(1), dtype, 9, 2 * width)
        gate_up[3, 1] = float("nan")
        together = silu_mul(gate_up)
        for row in range(9):
            assert same_bits(together[row], silu_mul(gate_up[row : row + 1].clone())[0])
        assert together.isnan().sum() == 1


class RefusedError(Exception):
    """The kernel does not know heads of this width."""


@dataclass
class Layer:
    """Shapes and a cache, in which sequences lie scattered."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    rotary_dim: int | None = None
    norm_epsilon: float = 1e-6
    num_blocks: int = 200
    has_dot_products: ClassVar[bool] = False  # attention of bfloat16 uses them
    allocator: BlockAllocator = field(init=False)
    keys: torch.Tensor = field(init=False)  # [num_slots, num_kv_heads, head_dim]
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.allocator = BlockAllocator(self.num_blocks, self.block_size)
        shape = (self.num_blocks * self.block_size, self.num_kv_heads, self.head_dim)
        self.keys = normal(seeded(11), self.dtype, *shape)
        self.values = normal(seeded(12), self.dtype, *shape)

    @property
    def instructions(self) -> int:
        has_dot_products = self.has_dot_products and self.dtype == torch.bfloat16
        return Instructions.AVX512_BF16 if has_dot_products else 0

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def half(self) -> int:
        return (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5

    @property
    def struct(self) -> Shape:
        return Shape(
            *(self.num_heads, self.num_kv_heads, self.head_dim, self.half, self.window, self.instructions),
            *(self.scale, self.softcap, self.norm_epsilon),
        )

    def sequences(self, lengths: Sequence[int]) -> list[KVSequence]:
        """Sequences of these lengths, whose blocks alternate in the cache."""
        made = [KVSequence(self.allocator) for _ in lengths]
        while any(kv.length < length for kv, length in zip(made, lengths, strict=True)):
            for kv, length in zip(made, lengths, strict=True):
                kv.extend(min(self.block_size, length - kv.length))
        return made

    def queries(self, blocks: Sequence[QueryBlock], seed: int = 13) -> torch.Tensor:
        """Random queries, keys and values of all rows of a step.  # [num_rows, width]"""
        return normal(seeded(seed), self.dtype, sum(block.num_rows for block in blocks), self.width)

    def attend(
        self, qkv: torch.Tensor, blocks: Sequence[QueryBlock], members: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """The attention output; rows of members that were not requested stay 7.  # [num_rows, num_heads * head_dim]"""
        step, shape = RaggedStep(blocks, self.block_size), self.struct
        assert step.num_rows == len(qkv)
        output = Guarded(torch.full((step.num_rows, self.num_heads * self.head_dim), 7.0, dtype=self.dtype))
        stride = step.num_keys_max + 3
        scores = np.full(MAX_QUERIES * stride + NUM_GUARDS, np.nan, dtype=np.float32)
        slots = np.full(stride + NUM_GUARDS, -1, dtype=np.int32)
        is_known = compiled(self.dtype).attend(
            *(qkv.data_ptr(), output.tensor.data_ptr()),
            *(ctypes.addressof(step.struct), ctypes.addressof(shape)),
            *(self.keys.data_ptr(), self.values.data_ptr(), scores.ctypes.data, stride, slots.ctypes.data),
            *(members or (0, step.num_members)),
        )
        assert np.isnan(scores[-NUM_GUARDS:]).all(), "scores were written past the end"
        assert (slots[stride:] == -1).all()
        attended = output.check()
        if not is_known:
            assert bool((attended == 7.0).all())
            raise RefusedError
        return attended

    def exact(self, qkv: torch.Tensor, blocks: Sequence[QueryBlock]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in double precision, a row at a time; and the sums of the weighted values' magnitudes."""
        queries = qkv[:, : self.num_heads * self.head_dim].double()
        share = self.num_heads // self.num_kv_heads
        rows, magnitudes = [], []
        for query, slots in zip(queries, visible_slots(blocks), strict=True):
            seen = torch.from_numpy(slots[-self.window :] if self.window else slots)
            keys = self.keys[seen].double().repeat_interleave(share, dim=1)  # [num_keys, num_heads, head_dim]
            values = self.values[seen].double().repeat_interleave(share, dim=1)
            scores = torch.einsum("hd,khd->hk", query.view(self.num_heads, -1), keys) * self.scale
            if self.softcap:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            weights = scores.softmax(dim=-1)
            rows.append(torch.einsum("hk,khd->hd", weights, values).flatten())
            magnitudes.append(torch.einsum("hk,khd->hd", weights, values.abs()).flatten())
        return torch.stack(rows), torch.stack(magnitudes)


def visible_slots(blocks: Sequence[QueryBlock]) -> list[np.ndarray]:
    """The KV slots that each row of a step attends to, in the order of positions."""
    found = []
    for block in blocks:
        slots = block.kv.slots(0, block.kv.length)
        if block.paths is None:
            found += [slots[: block.kv.length - block.num_rows + row + 1] for row in range(block.num_rows)]
        else:
            found += [np.concatenate([slots[: block.tree_start], slots[list(path)]]) for path in block.paths]
    return found


def rows_alone(blocks: Sequence[QueryBlock]) -> list[QueryBlock]:
    """Every row of a step as a block of its own."""
    alone = []
    for block in blocks:
        for row in range(block.num_rows):
            if block.paths is None:
                length = block.kv.length - block.num_rows + row + 1
                alone.append(QueryBlock(KVSequence(block.kv.allocator, block.kv.block_ids, length), 1))
            else:
                alone.append(QueryBlock(block.kv, 1, block.tree_start, [block.paths[row]]))
    return alone


def tree_block(kv: KVSequence, num_nodes: int, seed: int) -> QueryBlock:
    """The last `num_nodes` entries are nodes, each below the text or an earlier node."""
    rng = np.random.default_rng(seed)
    tree_start = kv.length - num_nodes
    paths: list[list[int]] = []
    for node in range(num_nodes):
        parent = int(rng.integers(max(-1, node - 4), node)) if node else -1
        paths.append([*(paths[parent] if parent >= 0 else []), tree_start + node])
    return QueryBlock(kv, num_nodes, tree_start, paths)


def assert_exact(layer: Layer, blocks: Sequence[QueryBlock]) -> None:
    """But for one rounding of the result, and with dot products one of each weight."""
    qkv = layer.queries(blocks)
    rtol, atol = EXACT[layer.dtype]
    found = layer.attend(qkv, blocks).double()
    exact, magnitudes = layer.exact(qkv, blocks)
    allowed = rtol * exact.abs() + atol + (2.0**-8 * magnitudes if layer.instructions else 0.0)
    assert bool(((found - exact).abs() <= allowed).all())


class TestAttend:
    @pytest.fixture(params=[False, True], ids=["any", "dot"], scope="class", autouse=True)
    @classmethod
    def _arithmetic(cls, request: pytest.FixtureRequest) -> Iterator[None]:
        if request.param and Instructions.AVX512_BF16 not in every_product():
            pytest.skip("this processor has no dot products of bfloat16")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Layer, "has_dot_products", request.param)
            yield

    @BOTH_TYPES
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 6, 7, 8])
    def test_query_heads_share_key_heads(self, dtype: torch.dtype, head_dim: int, share: int) -> None:
        layer = Layer(dtype, 2 * share, 2, head_dim)
        kvs = layer.sequences([35, 48, 5])
        assert_exact(layer, [QueryBlock(kvs[0], 1), QueryBlock(kvs[1], 9), QueryBlock(kvs[2], 5)])

    @BOTH_TYPES
    @pytest.mark.parametrize("block_size", [1, 7, 16])
    def test_any_number_of_keys(self, dtype: torch.dtype, block_size: int) -> None:
        lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 199, 200]
        layer = Layer(dtype, 4, 2, 32, block_size, num_blocks=sum(lengths) // block_size + 40)
        assert_exact(layer, [QueryBlock(kv, 1) for kv in layer.sequences(lengths)])

    @BOTH_TYPES
    @pytest.mark.parametrize("num_rows", [8, 23, 24, 25, 40, 130])
    @pytest.mark.parametrize("share", [1, 3])
    def test_more_rows_than_share_one_pass_over_the_keys(self, dtype: torch.dtype, num_rows: int, share: int) -> None:
        layer = Layer(dtype, 2 * share, 2, 16)
        kvs = layer.sequences([num_rows, num_rows + 37])
        assert_exact(layer, [QueryBlock(kv, num_rows) for kv in kvs])

    @BOTH_TYPES
    @pytest.mark.parametrize("window", [1, 2, 16, 24, 33])
    def test_a_window_hides_what_is_further_back(self, dtype: torch.dtype, window: int) -> None:
        layer = Layer(dtype, 4, 2, 32, 7, window)
        kvs = layer.sequences([90, 40, 70, 3])
        blocks = [
            QueryBlock(kvs[0], 1),
            QueryBlock(kvs[1], 40),
            tree_block(kvs[2], 12, 3),
            QueryBlock(kvs[3], 2),
        ]
        assert_exact(layer, blocks)

    @BOTH_TYPES
    @pytest.mark.parametrize("softcap", [0.5, 30.0])
    def test_scores_are_capped_softly(self, dtype: torch.dtype, softcap: float) -> None:
        layer = Layer(dtype, 4, 2, 32, softcap=softcap)
        kvs = layer.sequences([50, 30])
        assert_exact(layer, [QueryBlock(kvs[0], 6), tree_block(kvs[1], 7, 1)])

    @BOTH_TYPES
    @pytest.mark.parametrize("block_size", [1, 7, 16])
    @pytest.mark.parametrize("text_len", [0, 1, 16, 45])
    def test_a_node_sees_the_text_its_ancestors_and_itself(
        self, dtype: torch.dtype, block_size: int, text_len: int
    ) -> None:
        layer = Layer(dtype, 4, 2, 32, block_size)
        kvs = layer.sequences([text_len + 20, text_len + 30])
        assert_exact(layer, [tree_block(kv, 20, seed) for seed, kv in enumerate(kvs)])

    @BOTH_TYPES
    def test_scores_far_apart_do_not_overflow(self, dtype: torch.dtype) -> None:
        layer = Layer(dtype, 2, 1, 64)
        blocks = [QueryBlock(kv, 3) for kv in layer.sequences([40, 17])]
        qkv = layer.queries(blocks) * 64
        rtol, atol = (1e-3, 1e-3) if dtype == torch.float32 else (2**-7, 1e-3)
        torch.testing.assert_close(
            layer.attend(qkv, blocks), layer.exact(qkv, blocks)[0].to(dtype), rtol=rtol, atol=atol
        )

    @BOTH_TYPES
    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("window", [0, 20])
    def test_what_no_row_may_see_does_not_leak(self, dtype: torch.dtype, poison: float, window: int) -> None:
        """Other sequences, null block, stale entries behind a sequence's end, siblings in the tree."""
        layer = Layer(dtype, 4, 2, 32, 7, window)
        kvs = layer.sequences([33, 51, 40, 60])
        blocks = [QueryBlock(kvs[0], 1), QueryBlock(kvs[1], 30), tree_block(kvs[2], 10, 5)]
        qkv = layer.queries(blocks)
        before = layer.attend(qkv, blocks)
        is_seen = torch.zeros(len(layer.keys), dtype=torch.bool)
        is_seen[np.concatenate(visible_slots(blocks))] = True
        layer.keys[~is_seen], layer.values[~is_seen] = poison, poison
        assert torch.equal(layer.attend(qkv, blocks), before)

        nodes = rows_alone(blocks)[-10:]
        for row, node in enumerate(nodes):
            spoilt = Layer(dtype, 4, 2, 32, 7, window)
            seen = np.zeros(len(spoilt.keys), dtype=bool)
            seen[visible_slots([node])[0]] = True
            spoilt.keys[~seen], spoilt.values[~seen] = poison, poison
            assert torch.equal(spoilt.attend(qkv, blocks)[31 + row], before[31 + row])

    @BOTH_TYPES
    def test_a_range_of_members_writes_its_own_rows_only(self, dtype: torch.dtype) -> None:
        layer = Layer(dtype, 4, 2, 16)
        kvs = layer.sequences([20, 30, 40])
        blocks = [QueryBlock(kvs[0], 4), tree_block(kvs[1], 5, 0), QueryBlock(kvs[2], 6)]
        qkv = layer.queries(blocks)
        whole, part = layer.attend(qkv, blocks), layer.attend(qkv, blocks, (2, 5))
        assert torch.equal(part[5:8], whole[5:8])
        assert bool((part[:5] == 7.0).all())
        assert bool((part[8:] == 7.0).all())

    @pytest.mark.parametrize("head_dim", [48, 80, 96, 256])
    def test_a_head_of_another_width_is_refused_and_nothing_is_written(self, head_dim: int) -> None:
        layer = Layer(torch.float32, 2, 1, head_dim)
        blocks = [QueryBlock(kv, 1) for kv in layer.sequences([5])]
        with pytest.raises(RefusedError):
            layer.attend(layer.queries(blocks), blocks)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(
        parts=st.lists(st.tuples(st.booleans(), st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=5),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        head_dim=st.sampled_from(HEAD_DIMS),
        heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1), (8, 1), (7, 1)]),
        block_size=st.sampled_from([1, 7, 16]),
        window=st.sampled_from([0, 0, 1, 17, 40]),
        softcap=st.sampled_from([0.0, 0.0, 20.0]),
    )
    def test_a_row_has_the_bits_it_has_alone(
        self,
        parts: list[tuple[bool, int, int]],
        dtype: torch.dtype,
        head_dim: int,
        heads: tuple[int, int],
        block_size: int,
        window: int,
        softcap: float,
    ) -> None:
        """Parts: (a tree?, tokens before, rows)."""
        num_blocks = sum(before + rows for _, before, rows in parts) + 2
        layer = Layer(dtype, *heads, head_dim, block_size, window, softcap, num_blocks=num_blocks)
        kvs = layer.sequences([before + rows for _, before, rows in parts])
        blocks = [
            tree_block(kv, rows, before) if is_tree else QueryBlock(kv, rows)
            for kv, (is_tree, before, rows) in zip(kvs, parts, strict=True)
        ]
        qkv = layer.queries(blocks)
        together = layer.attend(qkv, blocks)
        for row, alone in enumerate(rows_alone(blocks)):
            assert torch.equal(together[row], layer.attend(qkv[row : row + 1].clone(), [alone])[0]), row

    @BOTH_TYPES
    @pytest.mark.parametrize("window", [0, 200, 300])
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_long_texts_are_read_in_blocks(self, dtype: torch.dtype, head_dim: int, window: int) -> None:
        """Keys come in blocks of 256, and queries in tiles of 96, whose ends are met here."""
        layer = Layer(dtype, 3, 1, head_dim, window=window)
        kvs = layer.sequences([255, 256, 257, 520, 770])
        blocks = [QueryBlock(kv, num_rows) for kv, num_rows in zip(kvs, (1, 3, 33, 130, 9), strict=True)]
        assert_exact(layer, blocks)
        qkv = layer.queries(blocks)
        together = layer.attend(qkv, blocks)
        for row, alone in enumerate(rows_alone(blocks)):
            assert torch.equal(together[row], layer.attend(qkv[row : row + 1].clone(), [alone])[0]), row

    @BOTH_TYPES
    def test_several_threads_change_no_bit(self, dtype: torch.dtype) -> None:
        layer = Layer(dtype, 6, 2, 64, num_blocks=80)
        kvs = layer.sequences([600, 300, 20])
        blocks = [QueryBlock(kvs[0], 200), QueryBlock(kvs[1], 9), QueryBlock(kvs[2], 1)]
        qkv = layer.queries(blocks)
        before = torch.get_num_threads()
        found = []
        try:
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                found.append(layer.attend(qkv, blocks))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(each, found[0]) for each in found)

    @BOTH_TYPES
    def test_a_node_has_the_bits_of_the_same_text_in_a_line(self, dtype: torch.dtype) -> None:
        layer = Layer(dtype, 4, 2, 64, 7)
        tree_kv, line_kv = layer.sequences([53, 53])
        block = tree_block(tree_kv, 20, 4)
        qkv = layer.queries([block])
        outputs = layer.attend(qkv, [block])
        for row, slots in enumerate(visible_slots([block])):
            line = KVSequence(layer.allocator, line_kv.block_ids, len(slots))
            to = line.slots(0, len(slots))
            layer.keys[to], layer.values[to] = layer.keys[slots], layer.values[slots]
            alone = layer.attend(qkv[row : row + 1].clone(), [QueryBlock(line, 1)])
            assert torch.equal(outputs[row], alone[0])


@dataclass
class Rotation:
    """Arguments of `rotate_and_store` besides a layer: rotation angles and the weights of norms."""

    layer: Layer
    has_norms: bool
    cosines: torch.Tensor = field(init=False)  # [num_positions, half]
    sines: torch.Tensor = field(init=False)
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layer = self.layer
        frequencies = 10000.0 ** -(torch.arange(layer.half) / max(layer.half, 1))
        angles = torch.arange(300).unsqueeze(1) * frequencies
        self.cosines, self.sines = angles.cos().contiguous(), angles.sin().contiguous()
        if self.has_norms:
            self.query_norm = normal(seeded(21), layer.dtype, layer.head_dim)
            self.key_norm = normal(seeded(22), layer.dtype, layer.head_dim)

    def run(self, qkv: torch.Tensor, blocks: Sequence[QueryBlock]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows and both caches afterwards; the layer's own stay as they were."""
        layer = self.layer
        step, shape = RaggedStep(blocks, layer.block_size), layer.struct
        rows, keys, values = Guarded(qkv), Guarded(layer.keys), Guarded(layer.values)
        norms = [None if norm is None else norm.data_ptr() for norm in (self.query_norm, self.key_norm)]
        compiled(layer.dtype).rotate_and_store(
            *(rows.tensor.data_ptr(), ctypes.addressof(step.struct), ctypes.addressof(shape)),
            *(self.cosines.data_ptr(), self.sines.data_ptr(), *norms),
            *(keys.tensor.data_ptr(), values.tensor.data_ptr()),
        )
        return rows.check(), keys.check(), values.check()

    def exact(self, heads: torch.Tensor, norm: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Rotated heads.  # [num_rows, num_heads, head_dim]"""
        half = self.layer.half
        if norm is not None:
            heads = rms_norm(heads, norm, self.layer.norm_epsilon)
        wide = heads.double()
        cosine, sine = (table[positions].double().unsqueeze(1) for table in (self.cosines, self.sines))
        first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        turned = [first * cosine - second * sine, second * cosine + first * sine, rest]
        return torch.cat(turned, dim=-1).to(heads.dtype)


def scattered_blocks(layer: Layer) -> list[QueryBlock]:
    """A prefill chunk, a decoded token and a tree; 6 + 1 + 8 rows."""
    kvs = layer.sequences([20, 150, 40])
    return [QueryBlock(kvs[0], 6), QueryBlock(kvs[1], 1), tree_block(kvs[2], 8, 2)]


ROTATED = [(dim, dim) for dim in HEAD_DIMS] + [(32, 16), (64, 24), (64, 48), (128, 32), (128, 10), (16, 0)]


class TestRotateAndStore:
    @BOTH_TYPES
    @pytest.mark.parametrize(("head_dim", "rotary_dim"), ROTATED)
    @pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
    @pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
    def test_queries_turn_in_place_and_keys_on_their_way_into_the_cache(
        self, dtype: torch.dtype, head_dim: int, rotary_dim: int, has_norms: bool, heads: tuple[int, int]
    ) -> None:
        layer = Layer(dtype, *heads, head_dim, 7, rotary_dim=rotary_dim, num_blocks=40)
        rotation, blocks = Rotation(layer, has_norms), scattered_blocks(layer)
        qkv = layer.queries(blocks)
        rows, keys, values = rotation.run(qkv, blocks)

        lengths = [len(slots) for slots in visible_slots(blocks)]
        positions = torch.tensor(lengths) - 1
        num_queries, num_keys = heads[0] * head_dim, heads[1] * head_dim
        split = [num_queries, num_keys, num_keys]
        query, key, value = (part.unflatten(1, (-1, head_dim)) for part in qkv.clone().split(split, dim=1))
        rtol, atol = EXACT[dtype] if not has_norms else ((2e-5, 1e-5) if dtype == torch.float32 else (2**-6, 0.05))
        close = {"rtol": rtol, "atol": atol}
        exact_query = rotation.exact(query, rotation.query_norm, positions)
        torch.testing.assert_close(rows[:, :num_queries], exact_query.flatten(1), **close)
        assert torch.equal(rows[:, num_queries:], qkv[:, num_queries:])

        slots = torch.from_numpy(np.concatenate([b.kv.slots(b.kv.length - b.num_rows, b.kv.length) for b in blocks]))
        torch.testing.assert_close(keys[slots], rotation.exact(key, rotation.key_norm, positions), **close)
        assert torch.equal(values[slots], value)
        others = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, slots, False)
        assert torch.equal(keys[others], layer.keys[others])
        assert torch.equal(values[others], layer.values[others])

    @BOTH_TYPES
    @pytest.mark.parametrize(("head_dim", "rotary_dim"), ROTATED)
    @pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
    def test_a_row_has_the_bits_it_has_alone(
        self, dtype: torch.dtype, head_dim: int, rotary_dim: int, has_norms: bool
    ) -> None:
        layer = Layer(dtype, 4, 2, head_dim, 7, rotary_dim=rotary_dim, num_blocks=40)
        rotation = Rotation(layer, has_norms)
        kvs = layer.sequences([20, 150])
        blocks = [QueryBlock(kvs[0], 6), QueryBlock(kvs[1], 2)]
        qkv = layer.queries(blocks)
        rows, keys, values = rotation.run(qkv, blocks)
        for row, alone in enumerate(rows_alone(blocks)):
            own_row, own_keys, own_values = rotation.run(qkv[row : row + 1], [alone])
            slot = visible_slots([alone])[0][-1]
            assert torch.equal(rows[row], own_row[0])
            assert torch.equal(keys[slot], own_keys[slot])
            assert torch.equal(values[slot], own_values[slot])

    def test_a_position_turns_by_its_own_angle_wherever_the_row_stands(self) -> None:
        layer = Layer(torch.float32, 1, 1, 16)
        rotation = Rotation(layer, has_norms=False)
        (kv,) = layer.sequences([200])
        qkv = torch.zeros(200, layer.width)
        qkv[:, 0] = 1.0
        rows, _, _ = rotation.run(qkv, [QueryBlock(kv, 200)])
        assert torch.equal(rows[:, 0], rotation.cosines[:200, 0])
        assert torch.equal(rows[:, 8], rotation.sines[:200, 0])


class TestLibrary:
    def test_other_types_have_no_kernels(self) -> None:
        assert kernels(torch.float16) is None
        assert kernels(torch.float64) is None
