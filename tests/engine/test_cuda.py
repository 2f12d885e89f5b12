"""Tests that need a GPU. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.layers.linear import PaddedLinear, forms_for, is_batch_invariant
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.options import Device, EngineOptions
from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sampling.sampling import probabilities
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import SamplingParams
from tests import models
from tests.engine.sequences import feed, logits_of, sharing, text
from tests.engine.test_tree_attention import grow, random_tree
from tests.engine.verification_cases import coupled_choice, verify_one

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A model with heads as wide as FlashAttention likes them, drafts' trees included."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory)
    return EngineOptions(model=directory, device=Device.CUDA, max_num_seqs=8, has_trees=True)


@pytest.fixture(scope="module")
def graphs(config: EngineOptions) -> Iterator[Engine]:
    yield load_model(config)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def eager(config: EngineOptions) -> Engine:
    return load_model(replace(config, enforce_eager=True))


def test_a_row_has_the_same_bits_in_any_company(graphs: Engine) -> None:
    assert batch_invariance_failures(graphs) == []


def test_steps_launched_as_graphs_have_the_same_bits(graphs: Engine, eager: Engine) -> None:
    assert graphs._device_steps is not None
    assert graphs._device_steps._graphs
    assert eager._device_steps is not None
    assert not eager._device_steps._graphs
    words = text(300, 1, graphs.vocab_size)
    for prefill in (0, 290, 299):
        assert torch.equal(logits_of(graphs, words, prefill), logits_of(eager, words, prefill))


@pytest.mark.parametrize(("prefix_len", "sizes"), [(5, [1, 3, 8]), (300, [8, 8]), (256, [1] * 4 + [6])])
def test_tree_nodes_have_the_bits_of_their_paths(graphs: Engine, prefix_len: int, sizes: list[int]) -> None:
    tree = random_tree(np.random.default_rng(prefix_len), graphs.vocab_size, prefix_len, sum(sizes))
    kv = graphs.new_sequence()
    rows = grow(graphs, kv, tree, sizes)
    kv.free()
    for node in range(sum(sizes)):
        assert torch.equal(rows[node], logits_of(graphs, tree.linear(node), prefill=prefix_len)[-1])


@pytest.mark.parametrize("family", models.SUPPORTED)
def test_logits_are_about_those_of_the_processor(family: str) -> None:
    """In float32, and so without FlashAttention."""
    here = models.engine(family)
    there = load_model(replace(here.config, device=Device.CUDA))
    words = text(60, 3, here.vocab_size)
    torch.testing.assert_close(logits_of(there, words, 20).cpu(), logits_of(here, words, 20), rtol=1e-3, atol=1e-3)


def test_a_conversation_goes_on_beside_another_that_shares_its_blocks(graphs: Engine) -> None:
    words = text(270, 5, graphs.vocab_size)
    kv = graphs.new_sequence()
    feed(graphs, kv, words[:260], 1)
    fork = sharing(graphs, kv, words[:260])
    feed(graphs, kv, words[10:20], 1)
    feed(graphs, fork, words[fork.length : 260], 1)
    assert torch.equal(feed(graphs, fork, words[260:], 10), logits_of(graphs, words, 260)[-10:])
    for sequence in (kv, fork):
        sequence.free()
    graphs.allocator.check_integrity([])


@pytest.mark.parametrize("shape", [(512, 512), (1024, 512), (512, 1024), (1000, 520)])
def test_products_keep_their_bits(shape: tuple[int, int]) -> None:
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device=DEVICE)
    (form,) = forms_for(linear.weight)
    assert is_batch_invariant(form, linear)
    built = form.build(linear)
    assert isinstance(built, PaddedLinear)
    assert built.in_blocks


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verdicts_are_those_of_the_processor(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_p=0.9,
        repetition_penalty=1.2,
        logit_bias=((3, 2.0),),
        min_tokens=4,
        num_logprobs=3,
    )
    logits = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)) * 3
    hints = [Hint(1, 0, int(logits[0].argmax())), Hint(2, 1, 5), Hint(3, 2, 6)]
    said = [[], [hints[0].token_id], [hints[0].token_id, 5], [hints[0].token_id, 5, 6]]
    logit_context = LogitContext([1, 2, 3], 3, said)
    verdicts = [verify_one(logits.to(device), hints, params, 7, logit_context) for device in ("cpu", DEVICE)]
    assert verdicts[0].token_ids == verdicts[1].token_ids
    if temperature:
        probs = probabilities(logits, params)
        assert coupled_choice(probs, 7, 3) == coupled_choice(probs.to(DEVICE), 7, 3)


def test_a_step_of_many_sequences_runs(graphs: Engine) -> None:
    sequences = [graphs.new_sequence() for _ in range(8)]
    chunks = []
    for number, kv in enumerate(sequences):
        words = text(1 + 40 * number, number, graphs.vocab_size)
        kv.extend(len(words))
        chunks.append(SequenceChunk(kv, words, 1))
    rows = graphs.forward(chunks)
    for kv in sequences:
        kv.free()
    for number, chunk in enumerate(chunks):
        assert torch.equal(rows[number], logits_of(graphs, chunk.token_ids)[-1])
