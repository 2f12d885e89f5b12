"""I2, bit for bit: what a row computes does not depend on the batch composition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.engine.compiled.kernels import (
    GROUP,
    Instructions,
    Products,
    every_product,
    has_onednn_products,
    products,
)
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers import quantized_linear
from outrider.engine.layers.linear import (
    COMPILED_FORMS,
    INT8_FORMS,
    PACKED_FORMS,
    PLAIN_FORMS,
    CompiledLinear,
    LinearForm,
    PackedLinear,
    PaddedLinear,
    choose_form,
    forms_for,
    is_batch_invariant,
)
from outrider.engine.layers.quantized_linear import Fp8Linear, Int8Linear
from outrider.engine.loading import loading
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.threads import threads
from tests import models
from tests.engine.sequences import text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
needs_products = pytest.mark.skipif(products() is None, reason="this processor multiplies otherwise")
any_products = pytest.mark.parametrize(
    "found",
    [
        pytest.param(
            every_product().get(each),
            id=each.name,
            marks=pytest.mark.skipif(each not in every_product(), reason=f"no compiled {each.name} here"),
        )
        for each in Instructions
    ],
)
needs_onednn = pytest.mark.skipif(not has_onednn_products(), reason="oneDNN has no bfloat16 here")


def load_sharing(**options: Any) -> Engine:
    """An engine whose steps have one thread or two."""
    config = models.engine_config(models.model_dir("llama"), "bfloat16", num_threads=2, **options)
    return models.load(replace(config, num_threads_beside_draft=1))


class TestTheWholeEngine:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("family", models.SUPPORTED)
    def test_self_test_finds_nothing(self, family: str, dtype: str) -> None:
        engine = models.engine(family, dtype)
        assert batch_invariance_failures(engine) == []
        engine.allocator.check_integrity([])

    @pytest.mark.parametrize("family", ["llama", "opt"])
    @pytest.mark.parametrize("quantization", ["int8", "fp8"])
    def test_self_test_finds_nothing_with_quantized_weights(self, family: str, quantization: str) -> None:
        engine = load_model(models.engine_config(models.model_dir(family), "bfloat16", quantization=quantization))
        assert batch_invariance_failures(engine) == []
        plain = {module for module in engine.model.modules() if type(module) is nn.Linear}
        assert plain <= {engine.model.lm_head}
        assert type(engine.model.lm_head) not in (Int8Linear, Fp8Linear)

    @pytest.mark.skipif(products() is None, reason="only compiled products are independent of threads for sure")
    def test_steps_with_different_numbers_of_threads_have_the_same_bits(self) -> None:
        with threads(torch.get_num_threads()):
            engine = load_sharing()
            assert engine.can_share_cores
            token_ids = text(60, 1, engine.vocab_size)
            logits = []
            for beside_draft in (False, True):
                engine.use_threads(beside_draft=beside_draft)
                kv = engine.new_sequence()
                kv.extend(60)
                logits.append(engine.forward([SequenceChunk(kv, token_ids, 60)]))
                kv.free()
            assert torch.equal(*logits)
            assert torch.get_num_threads() == 1, "what runs outside of a step keeps its threads"

    @pytest.mark.parametrize("is_eager", [True, False])
    def test_results_that_depend_on_threads_keep_one_number_of_them(
        self, is_eager: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Modules of others may, and the self-test finds what does."""
        if not is_eager:
            monkeypatch.setattr(loading, "batch_invariance_failures", lambda *_, **__: ["a block of 8"])
        with threads(torch.get_num_threads()):
            engine = load_sharing(enforce_eager=is_eager)
            assert not engine.can_share_cores
            assert torch.get_num_threads() == 1
        assert "1 threads always" in caplog.text

    def test_self_test_notices_a_linear_that_depends_on_its_batch(self) -> None:
        """The check can fail."""
        engine = load_model(models.engine_config(models.model_dir("llama")))
        engine.model.lm_head = Depends(engine.model.lm_head, more_than=8)
        assert batch_invariance_failures(engine) != []

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_random_company_and_lengths_across_chunk_borders(self, dtype: str) -> None:
        """The rows of a sequence are compared with its rows alone, one token at a time."""
        engine = models.engine("llama", dtype)
        rng = np.random.default_rng(4)
        token_ids = text(200, 1, engine.vocab_size)
        starts = (3, 58, 63, 64, 120, 127, 191)
        alone = {start: _rows(engine, token_ids, start, [1] * 9) for start in starts}
        for start in starts:
            for _ in range(3):
                first = int(rng.integers(1, 9))
                lengths = rng.integers(1, 400, int(rng.integers(0, 6))).tolist()
                others_token_ids = [text(n, n, engine.vocab_size) for n in lengths]
                together = _rows(engine, token_ids, start, [first, 9 - first], others_token_ids)
                assert torch.equal(alone[start], together), (start, first, lengths)


def _rows(
    engine: Engine,
    token_ids: list[int],
    start: int,
    pieces: list[int],
    others_token_ids: list[list[int]] | None = None,
) -> torch.Tensor:
    """Logits of the tokens from `start` on, fed in `pieces`; others prefill and decode in the same steps."""
    kv = engine.new_sequence()
    kv.extend(start)
    engine.forward([SequenceChunk(kv, token_ids[:start], 1)])
    others = [(engine.new_sequence(), list(tokens)) for tokens in others_token_ids or []]
    rows, done = [], start
    for piece in pieces:
        chunks: list[SequenceChunk] = []
        for other, tokens in others:
            part = tokens[: max(1, len(tokens) - 3)] if other.length == 0 else tokens[-3:]
            other.extend(len(part))
            chunks.append(SequenceChunk(other, part, 1))
        kv.extend(piece)
        chunks.insert(len(chunks) // 2, SequenceChunk(kv, token_ids[done : done + piece], piece))
        position = (len(chunks) - 1) // 2
        rows.append(engine.forward(chunks)[position : position + piece])
        done += piece
    sequences: list[KVSequence] = [kv, *(other for other, _ in others)]
    for sequence in sequences:
        sequence.free()
    return torch.cat(rows)


class Depends(nn.Module):
    """A linear layer that computes the rows from `first_row` on differently in batches of more than so many."""

    def __init__(self, inner: nn.Module, more_than: int, first_row: int = 0) -> None:
        super().__init__()
        self.inner, self.more_than, self.first_row = inner, more_than, first_row

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs).clone()
        rows = outputs.view(-1, outputs.shape[-1])
        if len(rows) > self.more_than:
            rows[self.first_row :] *= 1.01
        return outputs


class TestLinearLayers:
    @pytest.mark.parametrize(
        ("dtype", "quantization"),
        [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "fp8")],
    )
    @pytest.mark.parametrize(
        ("num_outputs", "width"), [(96, 64), (288, 64), (64, 192), (384, 1024), (192, 1500), (100, 2816)]
    )
    @pytest.mark.parametrize("bias", [True, False])
    def test_every_row_of_the_chosen_form_has_the_bits_it_has_alone(
        self, num_outputs: int, width: int, dtype: str, quantization: str, bias: bool
    ) -> None:
        """All rows, for row counts that the self-test did not try as well."""
        torch.manual_seed(num_outputs + width)
        plain = nn.Linear(width, num_outputs, bias=bias, dtype=DTYPES[dtype]).requires_grad_(False)
        form, holds = choose_form(plain, quantization)
        assert holds, "no form is batch-invariant on this machine"
        built = form.build(plain)
        inputs = torch.randn(300, width).to(DTYPES[dtype])
        with torch.inference_mode():
            alone = torch.cat([built(inputs[i : i + 1]) for i in range(len(inputs))])
            for count in (2, 5, 8, 15, 24, 40, 63, 72, 100, 128, 192, 255, 257, 300):
                together = built(inputs[:count])
                differing = [i for i in range(count) if not torch.equal(together[i], alone[i])]
                assert not differing, f"{form.name}: {count} rows, rows {differing} differ"
            assert torch.equal(built(inputs[None, :7])[0], alone[:7])  # the shape that transformers hands in

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("num_outputs", "width"), [(96, 64), (288, 64), (384, 384), (384, 1024), (192, 1500), (100, 2816)]
    )
    def test_inputs_that_cancel_show_no_difference_in_the_order_of_sums(
        self, num_outputs: int, width: int, dtype: str
    ) -> None:
        """Inputs whose exact sums are 0 leave only rounding errors in the output, which bfloat16 otherwise hides.

        At width 1500 the packed form without a split differs in one of hundreds of rows for random inputs, in every row
        for these.
        """
        generator = torch.Generator().manual_seed(width)
        half = torch.randn(num_outputs, width // 2, generator=generator).to(DTYPES[dtype])
        inputs = torch.randn(140, width // 2, generator=generator).to(DTYPES[dtype])
        order = torch.randperm(width, generator=generator)
        torch.manual_seed(num_outputs)
        plain = nn.Linear(width, num_outputs, bias=False, dtype=DTYPES[dtype]).requires_grad_(False)
        form, _ = choose_form(plain)
        plain.weight.copy_(torch.cat([half, half], dim=1)[:, order])
        rows = torch.cat([inputs, -inputs], dim=1)[:, order].contiguous()
        built = form.build(plain)
        with torch.inference_mode():
            alone = torch.cat([built(rows[i : i + 1]) for i in range(len(rows))])
            for count in (2, 3, 8, 17, 33, 64, 65, 129, 140):
                assert torch.equal(built(rows[:count]), alone[:count]), f"{form.name}, {count} rows"

    @pytest.mark.parametrize(
        "form",
        [
            *(pytest.param(form, marks=needs_products) for form in COMPILED_FORMS),
            *(pytest.param(form, marks=needs_onednn) for form in PACKED_FORMS),
            *PLAIN_FORMS,
            *INT8_FORMS,
        ],
        ids=lambda form: form.name,
    )
    @pytest.mark.parametrize("bias", [True, False])
    def test_every_form_computes_the_layer(self, form: LinearForm, bias: bool) -> None:
        torch.manual_seed(0)
        plain = nn.Linear(1500, 40, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
        inputs = torch.randn(1, 11, 1500).to(torch.bfloat16)
        with torch.inference_mode():
            outputs = form.build(plain)(inputs)
            exact = nn.functional.linear(inputs.double(), plain.weight.double(), plain.bias.double() if bias else None)
        assert outputs.shape == exact.shape
        torch.testing.assert_close(outputs.double(), exact, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("bias", [True, False])
    def test_fp8_computes_the_layer_of_its_rounded_weights(self, bias: bool) -> None:
        torch.manual_seed(0)
        plain = nn.Linear(1500, 300, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
        inputs = torch.randn(1, 37, 1500).to(torch.bfloat16)
        with torch.inference_mode():
            built = Fp8Linear(plain)
            weight = built.weight.double() * built.scales.double().unsqueeze(1)
            exact = nn.functional.linear(inputs.double(), weight, plain.bias.double() if bias else None)
            torch.testing.assert_close(built(inputs).double(), exact, rtol=2e-2, atol=2e-2)
        # Three bits behind the leading one: half of an eighth.
        assert bool(((weight - plain.weight.double()).abs() <= plain.weight.double().abs() / 15 + 1e-4).all())
        assert built.weight.element_size() == 1

    def test_every_value_of_fp8_is_widened_as_torch_widens_it(self) -> None:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        numbers = every[~every.float().isnan()]
        assert torch.equal(quantized_linear._widened(numbers), numbers.to(torch.bfloat16))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with products of fp8")
    @pytest.mark.parametrize(("num_outputs", "width"), [(96, 64), (512, 1024), (100, 40)])
    def test_fp8_on_a_gpu(self, num_outputs: int, width: int) -> None:
        """Inputs are rounded there as well; rows still do not depend on the batch composition."""
        torch.manual_seed(0)
        plain = nn.Linear(width, num_outputs, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        inputs = torch.randn(70, width, device="cuda").to(torch.bfloat16)
        with torch.inference_mode():
            built = Fp8Linear(plain)
            exact = nn.functional.linear(inputs.double(), plain.weight.double(), plain.bias.double())
            torch.testing.assert_close(built(inputs).double(), exact, rtol=0.1, atol=0.1)
            alone = torch.cat([built(inputs[i : i + 1]) for i in range(len(inputs))])
            for count in (2, 8, 17, 33, 70):
                assert torch.equal(built(inputs[:count]), alone[:count])

    @any_products
    @pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5])
    @pytest.mark.parametrize("num_rows", [1, 2, 7, 9, 10, 18, 19, 40])
    def test_compiled_form_writes_all_outputs_and_no_more(
        self, num_outputs: int, num_rows: int, found: Products
    ) -> None:
        torch.manual_seed(num_outputs)
        plain = nn.Linear(34, num_outputs, dtype=torch.bfloat16).requires_grad_(False)
        rows = torch.randn(num_rows, 34).to(torch.bfloat16)
        built = CompiledLinear(plain, found)
        room = torch.full((num_rows * num_outputs + 64,), 7.0, dtype=torch.bfloat16)
        built.multiply(rows, room)
        exact = nn.functional.linear(rows.double(), plain.weight.double(), plain.bias.double())
        outputs = room[:-64].view(num_rows, num_outputs).double()
        torch.testing.assert_close(outputs, exact, rtol=2**-7, atol=1e-4)
        assert bool((room[-64:] == 7.0).all())

    @any_products
    def test_compiled_form_has_the_same_bits_in_any_batch(self, found: Products) -> None:
        """Tiles of every size, in inputs of which many cancel (`test_inputs_that_cancel…`)."""
        torch.manual_seed(3)
        half = torch.randn(100, 40).to(torch.bfloat16)
        plain = nn.Linear(80, 100, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        order = torch.randperm(80)
        plain.weight.copy_(torch.cat([half, half], dim=1)[:, order])
        rows = torch.randn(40, 40).to(torch.bfloat16)
        rows = torch.cat([rows, -rows], dim=1)[:, order].contiguous()
        built = CompiledLinear(plain, found)
        alone = torch.cat([built(rows[i : i + 1]) for i in range(len(rows))])
        assert bool(alone.any())
        for count in range(1, 41):
            assert torch.equal(built(rows[:count]), alone[:count]), count

    @any_products
    def test_compiled_form_keeps_what_is_not_a_number(self, found: Products) -> None:
        plain = nn.Linear(34, 100, dtype=torch.bfloat16).requires_grad_(False)
        rows = torch.randn(3, 34).to(torch.bfloat16)
        rows[1, 7] = torch.nan
        rows[2, 33] = torch.inf
        outputs = CompiledLinear(plain, found)(rows)
        assert bool(outputs[0].isfinite().all())
        assert bool(outputs[1].isnan().all())
        assert not bool(outputs[2].isfinite().any())

    @any_products
    def test_compiled_form_has_the_same_bits_with_any_number_of_threads(self, found: Products) -> None:
        plain = nn.Linear(96, 500, dtype=torch.bfloat16).requires_grad_(False)
        rows = torch.randn(13, 96).to(torch.bfloat16)
        every = []
        for num_threads in (1, 2, 5, 11, 100):  # there are eleven groups of outputs to share out
            outputs = torch.empty(13, 500, dtype=torch.bfloat16)
            CompiledLinear(plain, found).multiply(rows, outputs, num_threads)
            every.append(outputs)
        assert all(torch.equal(every[0], each) for each in every[1:])

    def test_without_products_of_bfloat16_the_plain_ones_are_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """oneDNN refuses to pack bfloat16 for processors with neither AVX-512 nor AVX-NE-CONVERT."""
        monkeypatch.setattr("outrider.engine.layers.linear.products", lambda: None)
        monkeypatch.setattr("outrider.engine.layers.linear.has_onednn_products", lambda: False)
        weight = torch.zeros(40, 64, dtype=torch.bfloat16)
        assert forms_for(weight) == PLAIN_FORMS

    @needs_onednn
    def test_packed_form_cuts_wide_inputs(self) -> None:
        plain = nn.Linear(1500, 40, dtype=torch.bfloat16).requires_grad_(False)
        assert len(PackedLinear(plain, 512).parts) == 3

    @pytest.mark.parametrize(("more_than", "first_row"), [(1, 0), (32, 0), (32, 32), (64, 64), (128, 128), (200, 100)])
    def test_a_layer_that_depends_on_its_batch_is_noticed(self, more_than: int, first_row: int) -> None:
        """Kernels treat the rows behind their last full tile differently: the last rows count most."""
        linear = nn.Linear(32, 16, bias=False).requires_grad_(False)
        padded = LinearForm("padded", lambda linear: PaddedLinear(linear, 16))
        spoilt = LinearForm("spoilt", lambda linear: Depends(padded.build(linear), more_than, first_row))
        assert is_batch_invariant(padded, linear)
        assert not is_batch_invariant(spoilt, linear)
