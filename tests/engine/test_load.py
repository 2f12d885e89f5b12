"""Tests of load errors: a model that the engine cannot run is refused at load, with the reason and a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.loading.loading import load_model
from outrider.engine.loading.self_test import batch_invariance_failures
from outrider.engine.model import ModelLoadError, SequenceChunk
from outrider.engine.options import EngineOptions
from outrider.errors import ConfigurationError
from outrider.settings import settings_of
from outrider.text.tokenizer import Tokenizer
from tests import models
from tests.engine.sequences import text


def test_load_errors_are_the_operators_to_fix() -> None:
    assert issubclass(ModelLoadError, ConfigurationError)


def test_missing_folder_and_missing_config_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(models.engine_config(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(models.engine_config(tmp_path))


def test_missing_weights_say_so(tmp_path: Path) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_model(models.engine_config(directory))


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers and only warn."""
    directory = models.copy_of("llama", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"k_proj|missing"):
        load_model(models.engine_config(directory))


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=f"{file} .*cut off.*outrider fetch"):
        load_model(models.engine_config(directory))


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[:-1], "two.safetensors": names[-1:]}
    placed = {name: shard for shard, its in shards.items() for name in its}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    for shard, its in shards.items():
        save_file({name: tensors[name] for name in its}, directory / shard, metadata={"format": "pt"})
    load_model(models.engine_config(directory))
    (directory / "two.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 of its 2 files of weights, such as two\.safetensors"):
        load_model(models.engine_config(directory))


def test_a_fetch_that_is_not_finished_is_named(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    with pytest.raises(ModelLoadError, match=r"no model in .*model yet: `outrider fetch` runs or was broken off"):
        load_model(models.engine_config(tmp_path / "model"))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(ModelLoadError, match=str(directory)):
        load_model(models.engine_config(directory))


@pytest.mark.parametrize("config", ["{", "{}", "[]", '{"model_type": "no_such_thing"}'])
def test_config_that_makes_no_sense_is_refused(tmp_path: Path, config: str) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    (directory / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=str(directory)):
        load_model(models.engine_config(directory))


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'float16'.*bfloat16, float32"):
        settings_of(EngineOptions)["dtype"].read("float16")


def test_bounds_of_the_context_are_checked() -> None:
    with pytest.raises(ModelLoadError, match="max_model_len is 513"):
        load_model(models.engine_config(models.model_dir("llama"), max_model_len=513))


def test_kv_cache_too_small_for_one_sequence_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ModelLoadError, match=r"KV cache hold no sequence of 512 tokens"):
        load_model(models.engine_config(models.model_dir("llama"), kv_cache_gib=2**-14))


@pytest.mark.parametrize("max_model_len", [2, 8, 20])
def test_self_test_works_for_every_permitted_context(max_model_len: int) -> None:
    """The worker runs it at start; a short context must not break it."""
    engine = load_model(models.engine_config(models.model_dir("llama"), max_model_len=max_model_len))
    assert batch_invariance_failures(engine) == []
    engine.allocator.check_integrity([])


def test_frequencies_that_depend_on_the_longest_sequence_are_refused_or_kept_apart() -> None:
    """I2: with longrope, transformers picks the rotary frequencies of a whole batch by its longest position."""
    try:
        engine = load_model(models.engine_config(models.model_dir("longrope")))
    except ModelLoadError as error:
        assert "Phi3" in str(error)  # noqa: PT017 - either outcome is right
        return
    short, long = text(20, 1, engine.vocab_size), text(100, 2, engine.vocab_size)
    kvs = [engine.new_sequence() for _ in range(3)]
    kvs[0].extend(20)
    alone = engine.forward([SequenceChunk(kvs[0], short, 1)])[0]
    kvs[1].extend(20)
    kvs[2].extend(100)
    together = engine.forward([SequenceChunk(kvs[1], short, 1), SequenceChunk(kvs[2], long, 1)])[0]
    for kv in kvs:
        kv.free()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_the_end_tokens_of_the_model_and_of_the_tokenizer_are_united(tmp_path: Path) -> None:
    """As in vLLM: the end of a chat model's turn may stand in its tokenizer's configuration alone."""
    directory = models.copy_of("llama", tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert Tokenizer(directory).eos_token_ids == {0, 5, 7}
    assert load_model(models.engine_config(directory)).eos_token_ids == {0, 5, 7}
    (directory / "tokenizer.json").unlink()
    assert load_model(models.engine_config(directory)).eos_token_ids == {5, 7}
    shutil.rmtree(directory)


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    """Reading them would run what is in them."""
    directory = models.copy_of("llama", tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    ran = tmp_path / "ran"
    torch.save(_Booby(ran), directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="save them as safetensors"):
        load_model(models.engine_config(directory))
    assert not ran.exists()


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    directory = models.copy_of("llama", tmp_path / "model")
    ran = tmp_path / "ran"
    (directory / "theirs.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
        "class Config(C):\n    model_type = 'theirs'\nclass Model(M):\n    config_class = Config\n"
    )
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=str(directory)):
        load_model(models.engine_config(directory))
    assert not ran.exists()


class _Booby:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")
