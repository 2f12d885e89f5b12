"""A target's own MTP layer is offered and measured, without a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

from command_line.draft_kinds import Kind
from command_line.progress import Progress
from command_line.tune.findings import Settings
from command_line.tune.sources.compare import measure
from command_line.tune.sources.forecasts import Place
from command_line.tune.sources.measuring import Plan
from command_line.tune.sources.offers import Offer, is_plain_model, offers
from command_line.tune.times import Overheads
from tests.engine.heads.mtp_checkpoints import DEEPSEEK, MTP_CASES


def write_target(folder: Path) -> Path:
    """A whole DeepSeek-V3 with random weights and the MTP layer of the first case."""
    [case, *_] = MTP_CASES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**DEEPSEEK)
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dict(case.config)))
    file = folder / "model.safetensors"
    own = load_file(file)
    save_file(case.tensors() | own, file, metadata={"format": "pt"})
    return folder


@pytest.mark.thorough
def test_the_layer_drafts_beside_its_target_alone(tmp_path: Path) -> None:
    target = write_target(tmp_path)
    offered = offers(target, [], [], is_everything=True)
    assert offered == [Offer(Kind.MTP, target), Offer(Kind.EARLY_EXIT, target, 1)]
    assert offers(target, [], [], is_everything=False) == []
    settings = Settings("float32", "none", 1, context_len=16, num_tokens=12, budget_s=0.5)
    plan = Plan(settings, longest=64, num_hints_max=3, overheads=Overheads())
    prompts = [[5, 17, 30, 3], [8, 9]]
    with Progress(Console(quiet=True)) as progress:
        facts, [layer, lookup] = measure(target, offered[:1], prompts, plan, progress)
    assert (layer.name, layer.place, lookup.offer.kind) == ("MTP layer", Place.BESIDE, Kind.LOOKUP)
    assert layer.profile is not None
    assert layer.num_tokens == lookup.num_tokens == sum(len(text.token_ids) for text in facts.texts) > 0


def test_a_model_with_such_a_layer_is_a_draft_model_for_others(tmp_path: Path) -> None:
    assert is_plain_model(write_target(tmp_path))
