"""Hidden states that a head reads are the model's own, in whatever form a step runs, and follow their KV entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.device_steps import DeviceSteps
from outrider.engine.layers.features import FeatureSource, ModuleTaps
from outrider.engine.model import Engine, ModelLoadError, SequenceChunk
from tests import models
from tests.engine.conformance import reference
from tests.engine.sequences import text
from tests.engine.test_paged_steps import BLOCK_SIZE, MAX_BLOCKS, NUM_SCRATCH, attend_row_by_row
from tests.families import GREEN, Family

LENGTH = 40


def tapped_engine(key: str, layer_ids: Sequence[int], dtype: str = "float32", **options: Any) -> Engine:
    engine = models.load(models.engine_config(models.model_dir(key), dtype, block_size=BLOCK_SIZE, **options))
    engine.tap(FeatureSource(tuple(layer_ids), len(layer_ids) * width(engine)))
    return engine


def width(engine: Engine) -> int:
    config: Any = engine.model.config.get_text_config()  # type: ignore[operator]
    return int(config.hidden_size)


def features(engine: Engine, token_ids: Sequence[int], parts: Sequence[int], num_logits: int = 1) -> torch.Tensor:
    """Those of a sequence that is fed in parts of these lengths.  # [num_tokens, size]"""
    kv = engine.new_sequence()
    for num_tokens in parts:
        kv.extend(num_tokens)
        fed = token_ids[kv.length - num_tokens : kv.length]
        engine.forward([SequenceChunk(kv, fed, min(num_logits, num_tokens))])
    assert engine.features is not None
    found = engine.features[torch.from_numpy(kv.slots(0, kv.length))]
    kv.free()
    return found


def own_states(key: str, token_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """transformers' own `hidden_states`, side by side.  # [num_tokens, num_taps * width]"""
    with torch.inference_mode():
        found = reference(key)(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer_id][0] for layer_id in layer_ids], dim=1)


@pytest.mark.parametrize("family", GREEN, ids=lambda family: family.key)
def test_features_are_the_hidden_states_of_transformers(family: Family) -> None:
    depth = reference(family.key).config.get_text_config().num_hidden_layers
    layer_ids = (depth, 0, depth - 1)
    engine = tapped_engine(family.key, layer_ids)
    token_ids = text(LENGTH, 3, engine.vocab_size)
    expected = own_states(family.key, token_ids, layer_ids)
    found = features(engine, token_ids, (23, 1, 16))
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_features_do_not_depend_on_the_parts_or_the_logits_asked_for(dtype: str, enforce_eager: bool) -> None:
    engine = tapped_engine("llama", (0, 1, 2), dtype, enforce_eager=enforce_eager)
    token_ids = text(LENGTH, 4, engine.vocab_size)
    once = features(engine, token_ids, (LENGTH,))
    assert torch.equal(once, features(engine, token_ids, (LENGTH,), num_logits=LENGTH))
    assert torch.equal(once, features(engine, token_ids, (7, 1, 1, 25, 6), num_logits=0))


def test_features_of_the_layout_for_gpus_are_the_same() -> None:
    engine = tapped_engine("llama", (1, 2), enforce_eager=True)
    scratch = [engine.allocator.allocate() for _ in range(NUM_SCRATCH)]
    longest = MAX_BLOCKS * BLOCK_SIZE
    steps = DeviceSteps(engine.model, engine.layers, BLOCK_SIZE, scratch, longest, attend_row_by_row)
    steps.tap(ModuleTaps(engine.model, (1, 2)))
    kv = engine.new_sequence()
    kv.extend(11)
    chunk = SequenceChunk(kv, text(11, 5, engine.vocab_size), 1)
    expected = own_states("llama", chunk.token_ids, (1, 2))
    tapped = torch.empty(11, 2, width(engine))
    assert steps.forward([chunk], [10], tapped) is not None
    torch.testing.assert_close(tapped.flatten(1), expected, rtol=1e-4, atol=1e-4)


def test_features_move_with_their_entries_and_are_projected() -> None:
    engine = models.load(models.engine_config(models.model_dir("llama"), block_size=BLOCK_SIZE))
    engine.tap(FeatureSource((1, 2), 3, lambda states: states[:, :3] + 1.0))
    token_ids = text(9, 6, engine.vocab_size)
    kv = engine.new_sequence()
    kv.extend(9)
    engine.forward([SequenceChunk(kv, token_ids, 1)])
    slots = kv.slots(0, 9)
    assert engine.features is not None
    expected = own_states("llama", token_ids, (1,))[:, :3] + 1.0
    torch.testing.assert_close(engine.features[torch.from_numpy(slots)], expected, rtol=1e-4, atol=1e-4)
    engine.move_entries(np.asarray(slots[[7, 8]]), np.asarray(slots[[6, 7]]))
    torch.testing.assert_close(engine.features[torch.from_numpy(slots[6:8])], expected[7:], rtol=1e-4, atol=1e-4)


def test_a_state_that_the_model_lacks_is_refused_by_name() -> None:
    engine = models.load(models.engine_config(models.model_dir("llama")))
    with pytest.raises(ModelLoadError, match=r"reads the states \(1, 9\), and the model has layers 0 to"):
        engine.tap(FeatureSource((1, 9), 2 * width(engine)))
