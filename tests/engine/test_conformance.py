"""The engine says what transformers says, family by family, however its work is cut up (float32)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.layers.kv_layout import bytes_per_token, layout_of_config
from outrider.engine.loading.loading import load_model
from outrider.engine.model import ModelLoadError
from tests import models
from tests.engine import conformance
from tests.engine.sequences import feed, logits_of, text
from tests.engine.test_tree_attention import grow, random_tree
from tests.families import FAMILIES, GREEN, REFUSED, WINDOW, Family

CORE = (
    "llama", "llama4_text", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gemma4_text",
    "phi3", "olmo2", "gpt2", "gpt_bigcode", "gpt_oss", "opt", "starcoder2", "glm4", "deepseek_v3", "mimo_v2_flash",
)  # fmt: skip
"""The best known, and one of each kind of attention. The others are tested as thoroughly, but not by `make test`."""
MODELS = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")


def named(families: tuple[Family, ...]) -> pytest.MarkDecorator:
    marks = {True: (), False: pytest.mark.thorough}
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(each, id=each.model_type, marks=marks[each.model_type in CORE or bool(each.refused)])
            for each in families
        ],
        scope="module",  # a family's tests follow one another, in one process that builds its models once
    )


@named(GREEN)
class TestGreenFamilies:
    """Invariant I2: identical tokens."""

    def test_logits_are_those_of_transformers(self, family: Family) -> None:
        assert conformance.logits_differ(family.key) <= conformance.LOGITS_TOLERANCE

    def test_greedy_text_of_ragged_batches_with_rollbacks_and_forks(self, family: Family) -> None:
        assert conformance.disturbed_departs(family.key) is None

    def test_rows_have_the_same_bits_in_any_company(self, family: Family) -> None:
        assert conformance.invariance_failures(family.key) == []

    def test_tree_nodes_have_the_bits_of_their_paths(self, family: Family) -> None:
        engine = models.engine(family.key)
        tree = random_tree(np.random.default_rng(5), engine.vocab_size, 27, 9)
        kv = engine.new_sequence()
        rows = grow(engine, kv, tree, [4, 5])
        kv.free()
        for node in range(9):
            assert torch.equal(rows[node], logits_of(engine, tree.linear(node), prefill=27)[-1])

    def test_the_kv_of_a_token_is_known_without_weights(self, family: Family) -> None:
        engine = models.engine(family.key)
        layers = layout_of_config(models.random_model(family.key).config)
        shapes = [(each.num_kv_heads, each.key_dim, each.num_kv_heads, each.value_dim) for each in layers]
        assert shapes == [(*keys.shape[1:], *values.shape[1:]) for keys, values in engine.caches]
        assert bytes_per_token(layers, torch.float32) == engine.kv_bytes_per_token


@named(tuple(family for family in GREEN if family.model_type in CORE))
def test_greedy_text_of_ragged_batches(family: Family) -> None:
    """Tells whether a difference needs rollbacks and forks, which `TestGreenFamilies` has."""
    assert conformance.greedy_departs(family.key) is None


@named(REFUSED)
def test_what_cannot_be_served_is_refused_with_name_and_cause(family: Family) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_model(models.engine_config(models.model_dir(family.key)))
    assert family.refused is not None
    assert family.refused in str(caught.value)
    assert family.config.removesuffix("Config").lower() in str(caught.value).lower()


def documented_rows(first_column: str) -> list[list[str]]:
    """The cells below a table's head in the page of models."""
    text_of_table = MODELS.partition(f"\n| {first_column} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text_of_table.splitlines()[2:]]


def test_the_documents_name_the_families_that_this_suite_runs() -> None:
    """Its tables are the output of `python -m tests.engine.conformance --markdown`."""
    served = {cells[0]: cells[1:] for cells in documented_rows("family")}
    green = [name for name, cells in served.items() if not any(cell.startswith("no:") for cell in cells)]
    assert green == [f"`{family.model_type}`" for family in GREEN]
    refused = {cells[0]: cells[1:] for cells in documented_rows("refused")}
    for family in FAMILIES:
        examples, *verdict = (refused if family.refused else served)[f"`{family.model_type}`"]
        assert examples == family.examples
        assert (family.refused or family.variant or "yes") in " ".join(verdict)
    assert len(served) + len(refused) == len(FAMILIES)


def test_a_family_is_named_once_and_most_are_green() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    assert len(GREEN) >= 25
    assert set(CORE) <= {family.model_type for family in GREEN}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "llama4_text", "deepseek_v3"])
def test_one_pass_over_the_finished_text_finds_what_generate_writes(model_type: str) -> None:
    """`first_departure` stands in for transformers' own generation, which takes a hundred times as long."""
    key = f"family-{model_type}"
    texts = conformance.write_together(models.engine(key), np.random.default_rng(3), disturb=False)
    for prompt, token_ids in zip(conformance.prompts(), texts, strict=True):
        written = conformance.reference(key).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=conformance.NUM_NEW_TOKENS,
            min_new_tokens=conformance.NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        assert written[0].tolist() == token_ids
    spoilt = [*texts[:-1], [*texts[-1][:-1], (texts[-1][-1] + 1) % models.VOCAB_SIZE]]
    assert conformance.first_departure(key, spoilt) == "token 63 after a prompt of 61"
    assert max(len(set(token_ids)) for token_ids in texts) >= 8


@pytest.mark.parametrize(
    ("model_type", "reach"), [("mistral", 2 * (WINDOW - 1)), ("gemma2", None), ("llama4_text", None)]
)
def test_windows_and_chunks_are_shorter_than_the_text_and_matter(model_type: str, reach: int | None) -> None:
    """Otherwise the suite would show nothing of them. reach: positions back that all layers together see."""
    engine = models.engine(f"family-{model_type}")
    assert any(layer.visibility is not None for layer in engine.layers) or engine.is_fused
    base = text(4 * WINDOW, 5, engine.vocab_size)
    changed = list(base)
    changed[0] = (changed[0] + 1) % engine.vocab_size
    outputs = [logits_of(engine, token_ids)[-1] for token_ids in (base, changed)]
    assert torch.equal(*outputs) == (reach is not None)


def test_latent_attention_and_layers_of_different_shape_are_found() -> None:
    def found(model_type: str) -> list[tuple[int, int, int]]:
        layers = layout_of_config(models.random_model(f"family-{model_type}").config)
        return [(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers]

    assert found("deepseek_v3") == [(4, 24, 12)] * 2
    assert found("gemma4_text") == [(2, 16, 16), (2, 32, 32)]
    assert found("gpt_bigcode") == [(1, 16, 16)] * 2
    assert sorted(found("mimo_v2_flash")) == [(2, 24, 16), (4, 24, 16)]


def test_a_rule_of_visibility_is_that_of_the_configuration() -> None:
    layers = layout_of_config(models.random_model("family-gemma2").config)
    assert layers[1].visibility is None
    rule = models.engine("family-gemma2").layers[0].visibility
    assert rule is not None
    sees = rule(0, 0, torch.tensor([[40]]), torch.arange(60))[0]
    assert sees.nonzero().flatten().tolist() == list(range(41 - WINDOW, 41))


def test_llama_4_is_refused_where_its_queries_would_be_scaled_by_their_place_in_the_batch() -> None:
    directory = models.model_dir("family-llama4_text")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(re.sub(r'"floor_scale": \d+', '"floor_scale": 100', config))
    try:
        with pytest.raises(ModelLoadError, match="max-model-len to 99"):
            load_model(models.engine_config(directory))
        assert load_model(models.engine_config(directory, max_model_len=99)).max_model_len == 99
    finally:
        (directory / "config.json").write_text(config)


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
