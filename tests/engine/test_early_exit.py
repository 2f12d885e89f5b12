"""A model that is left early is its own first layers, and nothing else of it is loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from draft_worker.__main__ import own_name
from outrider.engine.loading.loading import load_model
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from outrider.engine.model import ModelLoadError
from tests import models
from tests.engine.conformance import LOGITS_LEN, reference
from tests.engine.sequences import logits_of, text
from tests.families import GREEN, Family

REFUSED = ("family-gemma4_text",)


def first_layers(key: str, count: int) -> nn.Module:
    """transformers' model, of which the other layers are taken out."""
    model = copy.deepcopy(reference(key))
    config = model.config.get_text_config()
    for module in model.base_model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                setattr(module, name, child[:count])
    config.num_hidden_layers = count
    return model


@pytest.mark.parametrize(
    "family", [each for each in GREEN if each.key not in REFUSED], ids=lambda family: family.model_type
)
def test_the_first_layers_draft_what_transformers_says_of_them(family: Family) -> None:
    engine = models.load(models.engine_config(models.model_dir(family.key), early_exit_layer=1))
    token_ids = text(LOGITS_LEN, 3, engine.vocab_size)
    with torch.inference_mode():
        expected = first_layers(family.key, 1)(torch.tensor([token_ids]), use_cache=False).logits[0]
    assert engine.model.config.get_text_config().num_hidden_layers == 1  # type: ignore[operator]
    assert float((logits_of(engine, token_ids, 60) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_the_other_layers_take_no_memory() -> None:
    folder = models.model_dir("llama")
    whole = models.engine("llama")
    part = models.load(models.engine_config(folder, early_exit_layer=1))
    layer = sum(parameter.numel() for parameter in models.random_model("llama").model.layers[0].parameters())
    assert part.num_parameters == whole.num_parameters - layer * (whole.num_layers - 1)
    planned = [plan_memory(folder, ServingShape(torch.bfloat16, early_exit_layer=each)).weights for each in (None, 1)]
    assert planned[0] - planned[1] == 2 * layer * (whole.num_layers - 1)
    assert part.kv_bytes_per_token * whole.num_layers == whole.kv_bytes_per_token


def test_as_many_layers_as_there_are_are_refused_by_name() -> None:
    options = models.engine_config(models.model_dir("llama"), early_exit_layer=9)
    with pytest.raises(ModelLoadError, match=r"--early-exit-layer 9 leaves nothing out: the model has \d layers"):
        load_model(options)


@pytest.mark.parametrize("num_layers", [0, -1])
def test_no_layer_at_all_is_refused(num_layers: int) -> None:
    options = models.engine_config(models.model_dir("llama"), early_exit_layer=num_layers)
    with pytest.raises(ModelLoadError, match=rf"--early-exit-layer {num_layers}: at least one layer must run"):
        load_model(options)


@pytest.mark.parametrize("key", REFUSED)
def test_a_family_whose_layers_share_a_tensor_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelLoadError, match=r"--early-exit-layer: gemma4_text has one embedding for all layers"):
        load_model(models.engine_config(models.model_dir(key), early_exit_layer=1))


def test_it_has_a_name_of_its_own() -> None:
    """Acceptance is remembered by the draft's name."""
    folder = models.model_dir("llama")
    assert own_name(folder, 2) == f"{own_name(folder, None)}-2-layers"
