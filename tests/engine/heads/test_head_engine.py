"""A head drafts like any model: trees, features that arrive late, moved entries, any batch composition."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import load_head
from outrider.engine.layers import linear
from outrider.engine.layers.linear import LinearForm
from outrider.engine.sequence_chunk import SequenceChunk
from tests import models
from tests.engine.heads import engines
from tests.engine.heads.checkpoints import LENGTH, token_ids
from tests.engine.heads.engines import feature_of, features, give, head_engine, run, start

NAMES = tuple(case.name for case in engines.ATTENDING)
SOME = ("original", "speculators-qwen3", "mtp-deepseek")


@pytest.mark.parametrize("name", NAMES)
def test_tree_rows_give_what_their_paths_give_run_row_by_row(name: str) -> None:
    engine, prefix = head_engine(name), token_ids()
    parents, tokens = [-1, -1, 0, 0, 1, 2], [3, 9, 27, 18, 54, 33]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), LENGTH + node])
    kv, _ = start(engine, prefix, features(name, LENGTH)[:-2])
    found = run(engine, kv, tokens, tree_start=LENGTH, paths=paths)
    for leaf in set(range(len(parents))) - set(parents):
        line, _ = start(engine, prefix, features(name, LENGTH)[:-2])
        for entry in paths[leaf]:
            node = entry - LENGTH
            expected = run(engine, line, [tokens[node]])[0]
            assert torch.allclose(found[node], expected, atol=1e-5)
            own = feature_of(engine, line, line.length - 1)
            assert torch.allclose(feature_of(engine, kv, entry), own, atol=1e-5)
        line.free()
    kv.free()


@pytest.mark.parametrize("name", NAMES)
def test_running_again_once_features_have_arrived_is_a_fresh_run(name: str) -> None:
    engine, tokens = head_engine(name), token_ids()
    kv, before = start(engine, tokens, features(name, LENGTH)[:3])
    give(engine, kv, 3, features(name, LENGTH)[3:])
    kv.truncate(4)
    again = run(engine, kv, tokens[4:])
    fresh, expected = start(engine, tokens, features(name, LENGTH))
    assert torch.allclose(again, expected[4:], atol=1e-5)
    assert not torch.allclose(before[4:], expected[4:], atol=1e-2)
    assert torch.allclose(before[:4], expected[:4], atol=1e-5)
    kv.free()
    fresh.free()


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(SOME), st.integers(0, LENGTH), st.lists(st.integers(1, LENGTH - 1), max_size=3, unique=True))
def test_a_sequence_in_pieces_gives_what_it_gives_at_once(name: str, num_given: int, cuts: list[int]) -> None:
    engine, tokens = head_engine(name), token_ids()
    whole, expected = start(engine, tokens, features(name, LENGTH)[:num_given])
    kv = engine.new_sequence()
    parts = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), LENGTH]):
        kv.extend(end - begin)
        if begin < num_given:
            give(engine, kv, begin, features(name, LENGTH)[begin : min(end, num_given)])
        parts.append(engine.forward([SequenceChunk(kv, tokens[begin:end], end - begin)]))
    assert torch.allclose(torch.cat(parts), expected, atol=1e-5)
    kv.free()
    whole.free()


def test_an_entry_without_the_targets_feature_holds_the_heads_own_output() -> None:
    """EAGLE-3 feeds its residual stream; 3.1 and MTP feed what the output layer reads."""
    for name, is_normed in (("original", False), ("speculators-qwen3", True), ("mtp-glm", True)):
        engine = head_engine(name)
        kv, logits = start(engine, token_ids(), features(name, LENGTH)[:-1])
        own = feature_of(engine, kv, LENGTH - 1)
        normed = own if is_normed else engine.head.norm(own[None])[0]
        assert torch.allclose(engine.head.logits(normed[None])[0], logits[-1], atol=1e-5)
        assert torch.equal(feature_of(engine, kv, 2), features(name, LENGTH)[2])
        kv.free()


def test_rows_run_again_in_place_and_never_replace_the_targets_feature() -> None:
    engine, name, tokens = head_engine("original"), "original", token_ids()
    kv, before = start(engine, tokens, features(name, LENGTH)[:3])
    give(engine, kv, 3, features(name, LENGTH)[3:])
    middle = engine.forward([SequenceChunk(engine.first_entries(kv, 7), tokens[4:7], 3)])
    last = engine.forward([SequenceChunk(kv, tokens[7:], 2)])
    fresh, expected = start(engine, tokens, features(name, LENGTH))
    assert torch.allclose(torch.cat([before[:4], middle, last]), expected, atol=1e-5)
    assert torch.equal(engine.features[kv.slots(0, LENGTH)], features(name, LENGTH))
    engine.forget_features(kv.slots(5, 6))
    engine.forward([SequenceChunk(kv, tokens[5:], 1)])
    assert not torch.equal(feature_of(engine, kv, 5), features(name, LENGTH)[5])
    kv.free()
    fresh.free()


def test_a_block_that_is_handed_out_again_has_no_features_of_the_target() -> None:
    engine, name = head_engine("original"), "original"
    kv, _ = start(engine, token_ids(), features(name, LENGTH)[:2])
    expected = run(engine, kv, [1, 2])
    kv.free()
    kv, _ = start(engine, token_ids()[::-1], features(name, LENGTH))
    kv.free()
    kv, _ = start(engine, token_ids(), features(name, LENGTH)[:2])
    assert torch.equal(run(engine, kv, [1, 2]), expected)
    kv.free()


def test_moved_entries_take_their_features_along() -> None:
    """A branch becomes the sequence: its nodes move to where their siblings were."""
    engine, name, tokens = head_engine("original"), "original", token_ids()
    paths = [[LENGTH], [LENGTH + 1], [LENGTH + 1, LENGTH + 2]]
    kv, _ = start(engine, tokens, features(name, LENGTH))
    run(engine, kv, [3, 9, 27], tree_start=LENGTH, paths=paths)
    engine.move_entries(kv.slots(LENGTH + 1, LENGTH + 3), kv.slots(LENGTH, LENGTH + 2))
    kv.truncate(LENGTH + 2)
    found = run(engine, kv, [5])
    straight, _ = start(engine, tokens, features(name, LENGTH))
    run(engine, straight, [9])
    run(engine, straight, [27])
    assert torch.allclose(found, run(engine, straight, [5]), atol=1e-5)
    kv.free()
    straight.free()


def test_no_row_but_the_first_depends_on_the_first_token() -> None:
    """References have no row for it."""
    for name in NAMES:
        engine, tokens = head_engine(name), token_ids()
        kv, logits = start(engine, tokens, features(name, LENGTH))
        other, changed = start(engine, [tokens[0] ^ 1, *tokens[1:]], features(name, LENGTH))
        assert torch.equal(logits[1:], changed[1:])
        assert not torch.equal(logits[0], changed[0])
        kv.free()
        other.free()


def probed(layer: torch.nn.Linear, quantization: str = "none") -> tuple[LinearForm, bool]:
    """`choose_form` with fewer row counts."""
    forms = linear.forms_for(layer.weight, quantization)
    return next(form for form in forms if linear.is_batch_invariant(form, layer, (2, 7, 8, 9, 33, 96))), True


@pytest.mark.parametrize(("name", "dtype"), [("speculators-qwen3", "bfloat16"), ("mtp-glm", "float32")])
def test_a_row_has_the_same_bits_in_any_batch_composition(name: str, dtype: str) -> None:
    head, target = engines.folders(name)
    with patch.object(linear, "choose_form", probed):
        engine = load_head(models.engine_config(head, dtype, kv_cache_gib=0.004), target)
    tokens, given = token_ids(), features(name, LENGTH)

    def together(count: int) -> torch.Tensor:
        chunks = []
        for number in range(count):
            kv = engine.new_sequence()
            kv.extend(LENGTH)
            give(engine, kv, 0, given[: LENGTH - number % 4])
            chunks.append(SequenceChunk(kv, tokens, LENGTH))
        found = engine.forward(chunks)
        for chunk in chunks:
            chunk.kv.free()
        return found[:LENGTH]

    alone = together(1)
    assert all(torch.equal(together(count), alone) for count in (2, 5, 9))


def test_a_layer_published_in_blocks_of_fp8_gives_what_its_weights_written_out_give(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes its MTP layer so."""
    case = engines.CASES["mtp-deepseek"]
    blocks, written_out = case.write(tmp_path / "blocks"), case.write(tmp_path / "plain")
    config = {**case.config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    (blocks / "config.json").write_text(json.dumps(config))
    stored, plain = {}, {}
    for key, each in case.tensors().items():
        stored[key] = plain[key] = each
        if "_proj" in key and "eh_proj" not in key:
            scale = each.view(each.shape[0] // 8, 8, each.shape[1] // 8, 8).abs().amax((1, 3)) / 448
            wide = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)
            stored[key] = (each / wide).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale
            plain[key] = stored[key].float() * wide
    save_file(stored, blocks / "model.safetensors")
    save_file(plain, written_out / "model.safetensors")
    found = []
    for folder in (blocks, written_out):
        with engines.without_probes():
            engine = load_head(models.engine_config(folder, kv_cache_gib=0.004), folder)
        found.append(start(engine, token_ids(), features(case.name, LENGTH))[1])
    assert torch.equal(*found)


def test_features_of_another_width_are_refused() -> None:
    engine: HeadEngine = head_engine("original")
    with pytest.raises(ValueError, match="features are 32 wide"):
        engine.set_features(np.array([8, 9]), torch.zeros(2, 96))
