"""A head that does not fit is refused at start, by one sentence that names the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.heads.loading import feature_shape, load_head, load_medusa, load_projection
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.layers import linear as linear_layers
from tests import models
from tests.engine.heads import engines
from tests.engine.heads.checkpoints import DRAFT_VOCAB, HIDDEN, VOCAB, linear, write_target

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a case's folders with changes to the head's configuration and tensors."""

    def write(name: str, change: Callable[[Tensors], object] = len, **config: Any) -> tuple[Path, Path]:
        case = engines.CASES[name]
        head = case.write(tmp_path / "head")
        values = {**case.config, **config}
        (head / "config.json").write_text(json.dumps(values))
        tensors = load_file(head / "model.safetensors")
        change(tensors)
        save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
        return head, head if name.startswith("mtp") else write_target(tmp_path / "target", case.target_hidden)

    return write


def load_both(head: Path, target: Path) -> None:
    load_head(models.engine_config(head, kv_cache_gib=0.004), target)
    load_projection(head, target, torch.float32)


def refusal(head: Path, target: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_head(models.engine_config(head, kv_cache_gib=0.004), target)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("original", {"target_hidden_size": 48}, "made for a target with hidden states of 48, and .* has 32"),
        ("original", {"vocab_size": 65}, "made for a vocabulary of 65 tokens, and .* has 64"),
        ("original", {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, r"the layers \[2, 5, 9\] .* ids from 0 to 6"),
        ("original", {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}, "the one after the last layer is not kept"),
        ("original", {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}, "distinct layer ids"),
        ("original", {"eagle_aux_hidden_state_layer_ids": [2, 3]}, "fc takes 96 numbers, and 2 layers of 32 give 64"),
        ("original", {"draft_vocab_size": 20}, "d2t has 24 entries, and draft_vocab_size is 20"),
        ("original", {"model_type": "gemma2"}, "layers of the family gemma2"),
        ("original", {"num_hidden_layers": 2}, r"lacks 9 tensors of its head, such as layers\.1"),
        ("original", {"norm_before_fc": True}, r"lacks 1 tensors of its head, such as input_norm\.weight"),
        ("speculators-llama", {"speculators_model_type": "dflash"}, "the kind dflash .*; can be read: EAGLE-3"),
        ("mtp-glm", {"num_nextn_predict_layers": 2}, "has 2 MTP layers; one can be run"),
        ("mtp-glm", {"num_hidden_layers": 9}, r"lacks the tensors of its MTP layer \(model\.layers\.9\.\*\)"),
        ("mtp-glm", {"model_type": "llama"}, "MTP layers of the family llama; can be read: deepseek_v3"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(
    folders: Callable[..., tuple[Path, Path]], name: str, config: dict[str, Any], said: str
) -> None:
    head, target = folders(name, **config)
    with pytest.raises(ModelLoadError, match=said):
        load_both(head, target)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("original", lambda t: t.pop("d2t"), "lacks the tensor d2t"),
        ("original", lambda t: t["d2t"].add_(VOCAB), "d2t maps to token ids from"),
        ("original", lambda t: t["d2t"].sub_(VOCAB), "d2t maps to token ids from -"),
        ("original", lambda t: t.update(d2t=-torch.arange(DRAFT_VOCAB)), "maps two of its tokens to one"),
        ("original", lambda t: t.update(t2d=torch.zeros(70, dtype=torch.bool)), "t2d has 70 entries"),
        ("original", lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"such as layers\.0\.mlp\.up_proj\.weight"),
        ("original", lambda t: t.update({"lm_head.weight": linear("x", 30, HIDDEN)}), r"lm_head.weight has the shape"),
        ("original", lambda t: t.pop("lm_head.weight"), r"lacks 1 tensors of its head, such as lm_head\.weight"),
        ("original", lambda t: t.update({"input_norm.weight": torch.ones(96)}), "does not explain, such as input_norm"),
        ("original", lambda t: t.update({"embed_norm.weight": torch.ones(32)}), "does not explain, such as embed_norm"),
        ("original", lambda t: t.pop("midlayer.hidden_norm.weight"), "a head of EAGLE 1 or 2"),
        ("mtp-deepseek", lambda t: t.pop("model.layers.4.mlp.experts.2.up_proj.weight"), r"layer\.mlp\.experts"),
        ("mtp-qwen", lambda t: t.pop("mtp.fc.weight"), r"lacks 1 tensors of its head, such as eh_proj\.weight"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    folders: Callable[..., tuple[Path, Path]], name: str, change: Callable[[Tensors], object], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load_both(*folders(name, change))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("medusa", lambda t: t.pop("1.1.linear.weight"), r"lacks 1 tensors of its head, such as 1\.1\.linear\.weight"),
        ("medusa", lambda t: t.pop("2.2.weight"), r"such as 2\.2\.weight"),
        ("medusa", lambda t: t.update({"0.2.weight": linear("x", 70, HIDDEN)}), "a vocabulary of 70 tokens"),
        ("medusa-vllm", lambda t: t["token_map"].add_(VOCAB), "one outside the vocabulary of 64"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(
    folders: Callable[..., tuple[Path, Path]], name: str, change: Callable[[Tensors], object], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load_medusa(*folders(name, change), torch.float32)


def test_medusa_heads_of_another_width_are_refused(folders: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    head, _ = folders("medusa")
    with pytest.raises(ModelLoadError, match=r"hidden states of 32, and .* has 40"):
        load_medusa(head, write_target(tmp_path / "wide", 40), torch.float32)


def test_medusa_does_not_run_without_its_target(folders: Callable[..., tuple[Path, Path]]) -> None:
    assert "run beside the target's model alone" in refusal(*folders("medusa"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled_weights_are_never_read_and_the_way_out_is_said(
    folders: Callable[..., tuple[Path, Path]], name: str
) -> None:
    head, target = folders("original")
    (head / "model.safetensors").rename(head / name)
    said = refusal(head, target)
    assert f"pickled weights ({name}) alone" in said
    assert f"torch.load('{name}', weights_only=True)" in said


def test_the_command_that_is_named_converts_pickled_weights(
    folders: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, target = folders("medusa")
    torch.save(load_file(head / "model.safetensors"), head / "medusa_lm_head.pt")
    (head / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError) as caught:
        feature_shape(head, target)
    monkeypatch.chdir(head)
    exec(str(caught.value).partition('python -c "')[2].rpartition('"')[0])
    assert feature_shape(head, target).feature_size == HIDDEN


def test_a_folder_that_is_no_head_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    assert "is no draft head of a known kind" in refusal(target, target)
    assert "no draft head in" in refusal(tmp_path / "nowhere", target)


def test_weights_in_several_files_are_read(folders: Callable[..., tuple[Path, Path]]) -> None:
    head, target = folders("original")
    tensors = load_file(head / "model.safetensors")
    placed = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(placed.values()):
        save_file({name: each for name, each in tensors.items() if placed[name] == file}, head / file)
    (head / "model.safetensors").unlink()
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert load_projection(head, target, torch.float32).layer_ids == (2, 3, 4)
    (head / "part-1.safetensors").unlink()
    assert "lacks part-1.safetensors, which its index names" in refusal(head, target)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_layer_that_the_head_lacks_is_the_targets(
    folders: Callable[..., tuple[Path, Path]], is_tied: bool
) -> None:
    def change(tensors: Tensors) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]

    head, target = folders("speculators-llama", change, draft_vocab_size=VOCAB)
    weights = load_file(target / "model.safetensors")
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    if is_tied:
        del weights["lm_head.weight"]
        save_file(weights, target / "model.safetensors")
    with patch.object(linear_layers, "choose_form", lambda *_: (linear_layers.PLAIN_FORMS[0], True)):
        engine = load_head(models.engine_config(head, kv_cache_gib=0.004), target)
    assert torch.equal(next(engine.head.output_layer().parameters()), weights[name])


def test_what_a_head_takes_from_its_target_is_said() -> None:
    assert feature_shape(*engines.folders("original")).layer_ids == (2, 3, 4)  # 2, 7 // 2, 7 - 3
    assert feature_shape(*engines.folders("original-wide")).layer_ids == (1, 5, 6)
    assert feature_shape(*engines.folders("mtp-glm")).layer_ids == ()
    assert feature_shape(*engines.folders("medusa")).feature_size == HIDDEN
