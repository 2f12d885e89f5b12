"""The fused decoder computes what transformers' own modules compute, for every family, step and length it takes."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outrider.engine.compiled.kernels import available, products
from outrider.engine.kv.kv_plan import KvPlan
from outrider.engine.layers import decoder
from outrider.engine.layers.decoder import FAMILIES, why_not
from outrider.engine.layers.kv_layout import find_layout
from outrider.engine.layers.linear import LinearForms
from outrider.engine.layers.quantized_linear import Int8Linear
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import LOOKAHEAD_ENTRIES, Engine, ModelLoadError, SequenceChunk
from tests import models
from tests.engine.sequences import feed, logits_of, text

needs_kernels = pytest.mark.skipif(not available(), reason="the installation found no C++ compiler")

WINDOW = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied, one KV head": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("LlamaConfig", {"head_dim": 128, "num_key_value_heads": 4}),
    "llama, width 72": ("LlamaConfig", {"hidden_size": 72, "head_dim": 32, "intermediate_size": 100}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mistral, no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, window in some layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, window in some layers": (
        "Qwen3Config",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "llama, llama3 scaling": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, linear scaling": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama, yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, dynamic scaling": ("LlamaConfig", {"rope_parameters": DYNAMIC}),
    "llama, a window in its configuration": ("LlamaConfig", {"sliding_window": WINDOW}),
    "llama, long": ("LlamaConfig", {"max_position_embeddings": 2200}),
    "llama, gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama, 24 wide heads": ("LlamaConfig", {"head_dim": 24}),
}
FOUR = ("llama", "mistral", "qwen2", "qwen3")
ODD = (
    "llama, tied, one KV head",
    "llama, biases",
    "llama, wide heads",
    "llama, width 72",
    "mistral, no window",
    "qwen2, window in some layers",
    "qwen3, window in some layers",
    "llama, llama3 scaling",
    "llama, linear scaling",
    "llama, yarn",
)


@functools.cache
def model_dir(name: str) -> Any:
    """Random norms and biases, too, where transformers starts with ones and zeros; all weights fit bfloat16."""
    class_name, values = MODELS[name]
    config = getattr(transformers, class_name)(**(models.GATED | {"num_hidden_layers": 3} | values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.data.normal_(0.0, 0.3)
            parameter.data = parameter.data.bfloat16().float()
    directory = models.root_dir() / f"decoder-{name.replace(' ', '-').replace(',', '')}"
    model.save_pretrained(directory)
    return directory


def load(name: str, dtype: str = "float32", **options: Any) -> Engine:
    return models.load(models.engine_config(model_dir(name), dtype, **options))


@functools.cache
def engines(name: str, dtype: str) -> tuple[Engine, Engine]:
    """One with kernels and one without."""
    fused, plain = load(name, dtype), load(name, dtype, enforce_eager=True)
    assert is_fused(fused), name
    assert not is_fused(plain)
    return fused, plain


def is_fused(engine: Engine) -> bool:
    return engine._fused is not None


def assert_close(fused: torch.Tensor, plain: torch.Tensor) -> None:
    """In float32."""
    difference, largest = float((fused - plain).abs().max()), float(plain.abs().max())
    assert difference <= 1e-4 * largest, f"{difference:.3g} apart, the largest is {largest:.3g}"


def assert_as_exact(fused: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Roundings differ, and add up over the layers; ours must not be the worse ones."""
    own, permitted = (float((logits - exact).square().mean().sqrt()) for logits in (fused, plain))
    assert own <= 1.1 * permitted, f"{own:.3g} off, transformers' modules {permitted:.3g}"


Work = Callable[[Engine], torch.Tensor]


def prefill(engine: Engine) -> torch.Tensor:
    return logits_of(engine, text(150, 1, engine.vocab_size))


def chunked_prefill_beside_decoding(engine: Engine) -> torch.Tensor:
    """One sequence decodes while another's prompt comes in chunks of odd sizes."""
    first, second = text(60, 2, engine.vocab_size), text(120, 3, engine.vocab_size)
    kvs = [engine.new_sequence(), engine.new_sequence()]
    rows = [feed(engine, kvs[0], first[:40], 1)]
    done = 0
    for index, size in enumerate((1, 7, 33, 64, 15)):
        kvs[0].extend(1)
        kvs[1].extend(size)
        chunks = [
            SequenceChunk(kvs[0], [first[40 + index]], 1),
            SequenceChunk(kvs[1], second[done : done + size], size),
        ]
        rows.append(engine.forward(chunks))
        done += size
    for kv in kvs:
        kv.free()
    return torch.cat(rows)


def trees(engine: Engine) -> torch.Tensor:
    """Two trees grow in two steps each beside a sequence that decodes; a root to begin with, branches below."""
    prompts = [text(n, n, engine.vocab_size) for n in (30, 53, 17)]
    kvs = [engine.new_sequence() for _ in prompts]
    rows = [feed(engine, kv, prompt, 1) for kv, prompt in zip(kvs, prompts, strict=True)]
    parents = [[-1, -1, 0], [0, 1, 1, 2, 5]]
    paths: dict[int, list[list[int]]] = {0: [], 1: []}
    for new in parents:
        chunks = []
        for tree in (0, 1):
            start = len(prompts[tree])
            for parent in new:
                above = paths[tree][parent] if parent >= 0 else []
                paths[tree].append([*above, start + len(paths[tree])])
            kvs[tree].extend(len(new))
            token_ids = text(len(new), 7 + tree + len(new), engine.vocab_size)
            chunks.append(
                SequenceChunk(kvs[tree], token_ids, len(new), tree_start=start, paths=paths[tree][-len(new) :])
            )
        kvs[2].extend(1)
        rows.append(engine.forward([chunks[0], SequenceChunk(kvs[2], [len(new)], 1), chunks[1]]))
    for kv in kvs:
        kv.free()
    return torch.cat(rows)


def some_logits(engine: Engine) -> torch.Tensor:
    """Chunks that want none, some and all of their rows."""
    prompts = [text(n, n, engine.vocab_size) for n in (9, 20, 6)]
    kvs = [engine.new_sequence() for _ in prompts]
    for kv, prompt in zip(kvs, prompts, strict=True):
        kv.extend(len(prompt))
    wanted = (0, 4, 6)
    logits = engine.forward([SequenceChunk(kv, prompt, n) for kv, prompt, n in zip(kvs, prompts, wanted, strict=True)])
    assert logits.shape == (10, engine.vocab_size)
    for kv in kvs:
        kv.free()
    return logits


WORKS: Mapping[str, Work] = {
    "prefill": prefill,
    "chunked": chunked_prefill_beside_decoding,
    "trees": trees,
    "some": some_logits,
}


@needs_kernels
class TestAgreement:
    @pytest.mark.parametrize("name", FOUR)
    @pytest.mark.parametrize("work", WORKS)
    def test_logits_are_those_of_transformers_modules(self, name: str, work: str) -> None:
        fused, plain = engines(name, "float32")
        assert_close(WORKS[work](fused), WORKS[work](plain))
        fused.allocator.check_integrity([])

    @pytest.mark.parametrize("name", FOUR)
    @pytest.mark.parametrize("work", WORKS)
    def test_bfloat16_is_as_near_to_the_exact_logits_as_transformers_modules(self, name: str, work: str) -> None:
        fused, plain = engines(name, "bfloat16")
        exact = engines(name, "float32")[1]
        assert_as_exact(*(WORKS[work](engine) for engine in (fused, plain, exact)))

    @pytest.mark.parametrize("name", ODD)
    def test_so_they_are_for_odd_shapes_biases_windows_and_scalings(self, name: str) -> None:
        fused, plain = engines(name, "float32")
        for work in (prefill, trees):
            assert_close(work(fused), work(plain))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", [*FOUR, "qwen2, window in some layers"])
    def test_no_row_depends_on_its_company(self, name: str, dtype: str) -> None:
        """I2, bit for bit."""
        assert batch_invariance_failures(engines(name, dtype)[0]) == []

    def test_tied_embeddings_stay(self) -> None:
        fused, _ = engines("qwen3", "float32")
        embedding: Any = fused.model.get_submodule("model.embed_tokens")
        assert embedding.weight.shape == (fused.vocab_size, 64)

    def test_a_window_that_the_family_does_not_know_is_not_applied(self) -> None:
        fused, plain = engines("llama, a window in its configuration", "float32")
        assert_close(prefill(fused), prefill(plain))


@needs_kernels
class TestPositions:
    @pytest.mark.thorough
    def test_they_go_beyond_the_longest_sequence_by_the_lookahead(self) -> None:
        """A draft's tree, or hints that are verified, at the very end of a sequence of the longest length."""
        for use_kernels in (True, False):
            engine = load("llama", enforce_eager=not use_kernels, max_model_len=64)
            kv = engine.new_sequence()
            feed(engine, kv, text(64, 1, engine.vocab_size), 1)
            start, rows = kv.length, []
            for depth in range(1, LOOKAHEAD_ENTRIES + 1):  # one branch as deep as there is room
                kv.extend(1)
                path = [list(range(start, start + depth))]
                rows.append(engine.forward([SequenceChunk(kv, [depth % 50], 1, tree_start=start, paths=path)]))
            kv.free()
            if use_kernels:
                fused = torch.cat(rows)
        assert_close(fused, torch.cat(rows))

    @pytest.mark.thorough
    def test_a_sequence_longer_than_any_before_finds_room(self) -> None:
        """Scratch is made for 1024 keys at a time."""
        engine, plain = (load("llama, long", enforce_eager=not use_kernels) for use_kernels in (True, False))
        for length in (1000, 1100, 2100, 30):
            token_ids = text(length, length, engine.vocab_size)
            fused, expected = (logits_of(e, token_ids, prefill=length - 5)[-5:] for e in (engine, plain))
            assert_close(fused, expected)

    @pytest.mark.parametrize("rope", ["llama, dynamic scaling"])
    def test_scaling_that_moves_beyond_its_length_is_still_served_within_it(self, rope: str) -> None:
        plain = load(rope, enforce_eager=True)
        assert_close(prefill(load(rope)), prefill(plain))


@pytest.mark.skipif(products() is None, reason="this processor multiplies otherwise")
class TestStepsInOneCall:
    @pytest.mark.parametrize("name", [*FOUR, *ODD])
    def test_it_has_the_bits_of_call_after_call(self, name: str) -> None:
        at_once, one_by_one = load(name, "bfloat16"), load(name, "bfloat16")
        assert at_once._fused is not None
        assert one_by_one._fused is not None
        assert at_once._fused._whole is not None
        one_by_one._fused._whole = None
        for work in (prefill, chunked_prefill_beside_decoding, trees):
            assert torch.equal(work(at_once), work(one_by_one)), work.__name__

    @pytest.mark.parametrize("token_id", [-1, 10**9])
    def test_a_token_outside_the_vocabulary_is_refused(self, token_id: int) -> None:
        engine = load("llama", "bfloat16")
        kv = engine.new_sequence()
        kv.extend(2)
        with pytest.raises(IndexError, match="vocabulary"):
            engine.forward([SequenceChunk(kv, [3, token_id], 1)])

    def test_without_compiled_products_steps_go_call_after_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outrider.engine.layers.linear.products", lambda: None)
        engine = load("llama", "bfloat16")
        assert engine._fused is not None
        assert engine._fused._whole is None
        assert batch_invariance_failures(engine) == []


@needs_kernels
class TestInt8:
    @pytest.mark.parametrize("name", FOUR)
    def test_it_stays_close_and_keeps_rows_apart(self, name: str) -> None:
        fused = load(name, "bfloat16", quantization="int8")
        assert is_fused(fused)
        assert linear_classes(fused) == {Int8Linear}
        plain = load(name, "bfloat16", quantization="int8", enforce_eager=True)
        exact = engines(name, "float32")[1]
        assert_as_exact(*(prefill(engine) for engine in (fused, plain, exact)))
        assert batch_invariance_failures(fused) == []


def linear_classes(engine: Engine) -> set[type]:
    """The classes of linear layers in a fused engine."""
    assert engine._fused is not None
    return {type(product) for layer in engine._fused._layers for product in layer.products()}


@dataclass
class _Config:
    hidden_act: str = "silu"


def fake_model(class_name: str, **attributes: Any) -> Any:
    """Something of this class name that has what `why_not` asks for."""
    attention = type("Attention", (), {"head_dim": attributes.pop("head_dim", 64)})()
    layer = type("Layer", (), {"self_attn": attention})()
    body = type("Body", (), {"layers": [layer]})()
    values = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "config": _Config(), "model": body}
    return type(class_name, (), values | attributes)()


class TestWhyNot:
    @needs_kernels
    @pytest.mark.parametrize("family", FAMILIES)
    def test_nothing_stands_in_the_way_of_the_four_families(self, family: str) -> None:
        assert why_not(fake_model(family)) is None

    def test_another_family_is_named_with_those_that_work(self) -> None:
        reason = why_not(fake_model("OPTForCausalLM"))
        assert reason is not None
        assert "OPTForCausalLM" in reason
        assert all(family in reason for family in FAMILIES)

    def test_a_model_elsewhere_is_told_by_its_device(self) -> None:
        reason = why_not(fake_model("LlamaForCausalLM", device=torch.device("cuda", 0)))
        assert reason is not None
        assert "cuda" in reason

    def test_without_a_compiler_it_says_how_to_get_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoder, "kernels", lambda dtype: None)
        reason = why_not(fake_model("LlamaForCausalLM"))
        assert reason is not None
        assert "C++ compiler" in reason

    @needs_kernels
    def test_another_activation_is_named(self) -> None:
        reason = why_not(fake_model("LlamaForCausalLM", config=_Config("gelu")))
        assert reason is not None
        assert "gelu" in reason

    @needs_kernels
    @pytest.mark.parametrize("head_dim", [24, 40, 80, 256])
    def test_heads_of_another_width_are_named(self, head_dim: int) -> None:
        reason = why_not(fake_model("LlamaForCausalLM", head_dim=head_dim))
        assert reason is not None
        assert str(head_dim) in reason

    @needs_kernels
    def test_another_type_has_no_kernels(self) -> None:
        assert why_not(fake_model("LlamaForCausalLM", dtype=torch.float16)) is not None


class TestFallback:
    @pytest.mark.parametrize("name", ["llama, gelu", "llama, 24 wide heads"])
    def test_a_model_that_cannot_be_fused_is_served_and_the_log_says_why(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger="outrider.engine.loading.loading"):
            engine = load(name)
        assert not is_fused(engine)
        assert "without compiled kernels" in caplog.text
        assert prefill(engine).isfinite().all()
        assert batch_invariance_failures(engine) == []

    def test_without_a_compiler_it_is_served_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoder, "kernels", lambda dtype: None)
        engine = load("qwen2")
        assert not is_fused(engine)
        assert torch.equal(prefill(engine), prefill(load("qwen2", enforce_eager=True)))

    @needs_kernels
    def test_wrong_arithmetic_is_refused_at_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The comparison with transformers' own answer covers the fused decoder, too."""
        forward = decoder.FusedDecoder.forward
        monkeypatch.setattr(decoder.FusedDecoder, "forward", lambda *args: 1.01 * forward(*args))
        with pytest.raises(ModelLoadError, match="LlamaForCausalLM"):
            load("llama")


@needs_kernels
class TestWeights:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", FOUR)
    def test_those_that_were_joined_or_packed_are_released(self, name: str, dtype: str) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir(name), dtype=getattr(torch, dtype), local_files_only=True
        )
        model.eval().requires_grad_(False)
        joined = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
        copied = {key: weakref.ref(parameter) for key, parameter in model.named_parameters() if key.endswith(joined)}
        assert len(copied) == 15
        kv = KvPlan(num_blocks=9, block_size=8, num_scratch_blocks=0, max_model_len=64, num_bytes=0)
        engine = Engine(model, models.engine_config(model_dir(name), dtype), find_layout(model), 0, kv)
        with torch.inference_mode():
            engine.fuse(LinearForms())
        gc.collect()
        assert [key for key, reference in copied.items() if reference() is not None] == []
        assert not any(isinstance(module, nn.Linear) for module in model.model.modules())

    def test_nothing_is_counted_twice(self) -> None:
        """The status reports what the model was loaded with."""
        fused, plain = engines("llama", "float32")
        assert fused.num_parameters == plain.num_parameters
