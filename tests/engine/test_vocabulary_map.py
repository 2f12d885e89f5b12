"""A draft with another vocabulary speaks the target's token ids."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from draft_worker.__main__ import parse_arguments, use_vocabulary
from outrider.engine.loading.loading import load_model
from outrider.errors import TokenizerMismatch
from outrider.text.tokenizer import Tokenizer
from outrider.text.vocabulary_map import has_same_base, map_vocabulary
from tests import models
from tests.engine.sequences import logits_of, text


def edit_tokenizer(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def shuffled(folder: Path) -> tuple[Path, list[int]]:
    """A model that is the one of `model_dir` under other token ids, and the new id of each old one."""
    models.copy_of("llama", folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    num_rows = models.VOCAB_SIZE
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).tolist()
    vocab = description["model"]["vocab"]
    new_vocab = {token: order[token_id] for token, token_id in vocab.items()}
    added = [token | {"id": order[token["id"]]} for token in description["added_tokens"]]
    edit_tokenizer(folder, model=description["model"] | {"vocab": new_vocab}, added_tokens=added)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.empty_like(tensors[name])
        rows[torch.tensor(order)] = tensors[name]
        tensors[name] = rows
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, order


def test_the_same_model_under_other_ids_says_the_same(tmp_path: Path) -> None:
    folder, order = shuffled(tmp_path / "shuffled")
    target_dir = models.model_dir("llama")
    target, own = Tokenizer(target_dir), Tokenizer(folder)
    vocabulary = map_vocabulary(target, own, models.VOCAB_SIZE)
    assert vocabulary.num_shared == len(vocabulary.own_ids) == target.num_ids
    assert list(vocabulary.own_ids) == order[: target.num_ids]
    engine = load_model(models.engine_config(folder))
    engine.set_vocabulary(vocabulary, target.eos_token_ids)
    words = text(40, 1, target.num_ids)
    expected = logits_of(models.engine("llama"), words, 10)[:, : target.num_ids]
    assert torch.equal(logits_of(engine, words, 10), expected)


def other_tokenizer(folder: Path, words: list[str], vocab_size: int) -> Path:
    folder.mkdir()
    tokenizer = RawTokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def test_only_tokens_that_both_have_are_guessed(tmp_path: Path) -> None:
    target = Tokenizer(other_tokenizer(tmp_path / "target", ["the cat sat on the mat"] * 9, 268))
    own = Tokenizer(models.model_dir("llama"))
    vocabulary = map_vocabulary(target, own, models.VOCAB_SIZE)
    for token_id, (own_id, is_shared) in enumerate(zip(vocabulary.own_ids, vocabulary.is_shared, strict=True)):
        spelled = target.token_bytes(token_id)
        if token_id in target.eos_token_ids:
            assert own_id in own.eos_token_ids
        elif is_shared:
            assert own.token_bytes(own_id) == spelled
        else:
            assert own_id == own.encode(spelled.decode(), add_special_tokens=False)[-1]
    missing = [token_id for token_id, is_shared in enumerate(vocabulary.is_shared) if not is_shared]
    assert missing
    assert vocabulary.num_shared > 256
    engine = load_model(models.engine_config(models.model_dir("llama")))
    engine.set_vocabulary(vocabulary, target.eos_token_ids)
    assert engine.vocab_size == target.num_ids
    logits = logits_of(engine, [1, missing[0], 5])
    assert bool((logits[:, missing] == float("-inf")).all())
    own_words = [vocabulary.own_ids[token_id] for token_id in (1, missing[0], 5)]
    plain = logits_of(models.engine("llama"), own_words)
    for token_id in (3, 100):
        assert torch.equal(logits[:, token_id], plain[:, vocabulary.own_ids[token_id]])


def arguments(model: Path, target: Path | None, *flags: str) -> argparse.Namespace:
    words = [] if target is None else ["--target-tokenizer", str(target)]
    return parse_arguments(["--model", str(model), *words, *flags])


def test_added_tokens_and_padding_may_differ(tmp_path: Path) -> None:
    folder = models.copy_of("llama", tmp_path / "target")
    description = json.loads((folder / "tokenizer.json").read_text())
    new_id = max(description["model"]["vocab"].values()) + 1
    extra = description["added_tokens"][0] | {"id": new_id, "content": "<|tool|>"}
    edit_tokenizer(folder, added_tokens=[*description["added_tokens"], extra])
    assert has_same_base(folder, models.model_dir("llama"))
    engine = load_model(models.engine_config(models.model_dir("llama")))
    assert use_vocabulary(engine, arguments(models.model_dir("llama"), folder)) == folder
    assert engine.vocab_size == new_id + 1
    logits = logits_of(engine, [1, new_id, 5])
    assert bool((logits[:, new_id] == float("-inf")).all())
    assert bool(logits[:, :new_id].isfinite().all())


def test_added_tokens_in_other_files_are_told_apart_by_name(tmp_path: Path) -> None:
    own, folder = (models.copy_of("llama", tmp_path / name) for name in ("own", "target"))
    new_id = Tokenizer(own).num_ids
    (own / "added_tokens.json").write_text(json.dumps({"<think>": new_id, "<tool>": new_id + 1}))
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": new_id, "<other>": new_id + 1}))
    assert has_same_base(folder, own)
    engine = load_model(models.engine_config(own))
    assert use_vocabulary(engine, arguments(own, folder)) == folder, "the same ids are other tokens"
    found = map_vocabulary(Tokenizer(folder), Tokenizer(own), new_id + 2)
    assert list(found.is_shared) == [True] * (new_id + 1) + [False]
    assert found.own_ids[new_id] == new_id + 1


def test_the_same_tokenizer_needs_no_map(tmp_path: Path) -> None:
    engine = load_model(models.engine_config(models.model_dir("llama")))
    folder = models.copy_of("llama", tmp_path / "target")
    assert use_vocabulary(engine, arguments(models.model_dir("llama"), folder)) == models.model_dir("llama")
    assert engine.vocab_size == models.VOCAB_SIZE


def test_another_way_to_cut_texts_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "target", ["the cat sat on the mat"] * 9, 268)
    engine = load_model(models.engine_config(models.model_dir("llama")))
    with pytest.raises(TokenizerMismatch, match="--allow-heterogeneous-vocab"):
        use_vocabulary(engine, arguments(models.model_dir("llama"), folder))
    allowed = arguments(models.model_dir("llama"), folder, "--allow-heterogeneous-vocab")
    assert use_vocabulary(engine, allowed) == folder
