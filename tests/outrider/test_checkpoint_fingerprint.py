"""A checkpoint's identity: equal for copies however they are stored, another one when what it computes changes."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from outrider.engine.loading import checkpoint_fingerprint as module
from outrider.engine.loading.checkpoint_fingerprint import (
    NUM_WINDOWS,
    WINDOW_BYTES,
    checkpoint_fingerprint,
    windows,
)
from outrider.errors import ConfigurationError

Tensors = dict[str, npt.NDArray[np.float32]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "_name_or_path": "/models/mine",
    "transformers_version": "5.0",
    "dtype": "float32",
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def some_tensors(num_layers: int = 3, width: int = 40) -> Tensors:
    chance = np.random.default_rng(0)
    names = [f"model.layers.{i}.{each}.weight" for i in range(num_layers) for each in ("mlp", "attention")]
    return {name: chance.standard_normal((width, width), np.float32) for name in [*names, "lm_head.weight"]}


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """A safetensors file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(each.tobytes() for each in tensors.values()))


def write_model(folder: Path, tensors: Tensors | None = None, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    write_tensors(folder / "model.safetensors", tensors or some_tensors())
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7}))
    return folder


def write_sharded(folder: Path, tensors: Tensors, num_files: int) -> Path:
    """The same model in several files with an index, in another order."""
    write_model(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, reverse=True)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file_name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in names[number::num_files]}
        write_tensors(folder / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(params=["whole", "sampled"])
def is_sampled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Small checkpoints are hashed whole, large ones are sampled; both must tell models apart."""
    if request.param == "sampled":
        monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
        monkeypatch.setattr(module, "NUM_WINDOWS", 21)  # three a tensor
        monkeypatch.setattr(module, "WINDOW_BYTES", 64)
    return request.param == "sampled"


@pytest.mark.usefixtures("is_sampled")
class TestIdentity:
    def test_a_copy_elsewhere_is_the_same_model(self, tmp_path: Path) -> None:
        original = write_model(tmp_path / "model")
        copy = shutil.copytree(original, tmp_path / "elsewhere" / "another-name")
        found = checkpoint_fingerprint(original)
        assert found == checkpoint_fingerprint(copy)
        assert len(found) == module.NUM_DIGITS
        assert int(found, 16)

    @pytest.mark.parametrize("num_files", [1, 3])
    def test_files_that_are_split_otherwise_hold_the_same_model(self, tmp_path: Path, num_files: int) -> None:
        whole = write_model(tmp_path / "whole")
        sharded = write_sharded(tmp_path / "sharded", some_tensors(), num_files)
        assert checkpoint_fingerprint(whole) == checkpoint_fingerprint(sharded)

    @pytest.mark.parametrize("name", some_tensors())
    def test_a_tensor_that_was_trained_further_makes_another_model(self, tmp_path: Path, name: str) -> None:
        tensors = some_tensors()
        tensors[name] = tensors[name] * np.float32(1.001)
        original = write_model(tmp_path / "model")
        tuned = write_model(tmp_path / "tuned", tensors)
        assert checkpoint_fingerprint(original) != checkpoint_fingerprint(tuned)

    def test_a_changed_tensor_in_one_shard_makes_another_model(self, tmp_path: Path) -> None:
        tensors = some_tensors()
        original = checkpoint_fingerprint(write_sharded(tmp_path / "model", tensors, 3))
        tensors["model.layers.1.mlp.weight"] += np.float32(0.01)
        assert original != checkpoint_fingerprint(write_sharded(tmp_path / "tuned", tensors, 3))

    @pytest.mark.parametrize(
        "change",
        [
            lambda tensors: {**tensors, "extra.weight": np.zeros((4, 4), np.float32)},
            lambda tensors: {name: tensors[name] for name in list(tensors)[:-1]},
            lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].reshape(20, 80)},
            lambda tensors: dict(zip(reversed(tensors), tensors.values(), strict=True)),
        ],
        ids=["added", "missing", "of another shape", "under other names"],
    )
    def test_other_tensors_make_another_model(self, tmp_path: Path, change: Callable[[Tensors], Tensors]) -> None:
        original = write_model(tmp_path / "model")
        changed = write_model(tmp_path / "changed", change(some_tensors()))
        assert checkpoint_fingerprint(original) != checkpoint_fingerprint(changed)


class TestConfiguration:
    @pytest.mark.parametrize(
        "change",
        [
            {"rms_norm_eps": 1e-6},
            {"sliding_window": 4096},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
            {"architectures": ["MistralForCausalLM"]},
            {"quantization_config": {"quant_method": "fp8"}},
            {"eos_token_id": 3},
        ],
        ids=str,
    )
    def test_a_setting_that_changes_the_output_makes_another_model(
        self, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        original = write_model(tmp_path / "model")
        changed = write_model(tmp_path / "changed", config=CONFIG | change)
        assert checkpoint_fingerprint(original) != checkpoint_fingerprint(changed)

    @pytest.mark.parametrize(
        "change",
        [
            {"_name_or_path": "someone/theirs"},
            {"transformers_version": "4.40"},
            {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
            {"text_config": {"dtype": "float16"}},
        ],
        ids=str,
    )
    def test_a_setting_without_effect_changes_nothing(self, tmp_path: Path, change: dict[str, Any]) -> None:
        original = write_model(tmp_path / "model", config=CONFIG | {"text_config": {}})
        changed = write_model(tmp_path / "changed", config={"text_config": {}} | CONFIG | change)
        assert checkpoint_fingerprint(original) == checkpoint_fingerprint(changed)

    def test_how_weights_are_quantized_is_compared_word_for_word(self, tmp_path: Path) -> None:
        """A `dtype` in there says how to read the weights."""
        first, second = (
            write_model(tmp_path / name, config=CONFIG | {"quantization_config": {"quant_method": "x", "dtype": name}})
            for name in ("int8", "int4")
        )
        assert checkpoint_fingerprint(first) != checkpoint_fingerprint(second)

    def test_ends_of_sequence_count_and_advice_on_sampling_does_not(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        original = checkpoint_fingerprint(folder)
        generation = folder / "generation_config.json"
        generation.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.1, "top_k": 5}))
        assert checkpoint_fingerprint(folder) == original
        generation.write_text(json.dumps({"eos_token_id": [2, 7]}))
        assert checkpoint_fingerprint(folder) != original

    def test_an_adapter_beside_the_weights_counts(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        seen = {checkpoint_fingerprint(folder)}
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 16}))
        seen.add(checkpoint_fingerprint(folder))
        for value in (0.0, 1.0):
            write_tensors(folder / "adapter_model.safetensors", {"lora_A": np.full((4, 4), value, np.float32)})
            seen.add(checkpoint_fingerprint(folder))
        assert len(seen) == 4

    def test_a_weight_file_that_the_configuration_names_is_the_one_that_counts(self, tmp_path: Path) -> None:
        config = CONFIG | {"transformers_weights": "mine.safetensors"}
        seen = set()
        for number in range(2):
            folder = write_model(tmp_path / f"model-{number}", config=config)
            write_tensors(folder / "mine.safetensors", {"weight": np.full((4, 4), number, np.float32)})
            seen.add(checkpoint_fingerprint(folder))
        assert len(seen) == 2


class TestCost:
    def test_reads_of_a_large_checkpoint_are_bounded(self) -> None:
        """A checkpoint of 140 GB in 723 tensors takes at most NUM_WINDOWS reads of one window each."""
        num_tensors, num_bytes = 723, 140 * 10**9
        parts = list(windows(num_bytes // num_tensors, NUM_WINDOWS // num_tensors))
        assert num_tensors * len(parts) <= NUM_WINDOWS
        assert {length for _, length in parts} == {WINDOW_BYTES}

    @pytest.mark.parametrize("num_windows", [1, 2, 7])
    def test_windows_are_spread_over_the_tensor_and_stay_inside(self, num_windows: int) -> None:
        num_bytes = 1_000_003
        parts = list(windows(num_bytes, num_windows))
        assert len(parts) == num_windows
        assert all(offset >= 0 and offset + length <= num_bytes for offset, length in parts)
        if num_windows > 1:
            assert (parts[0][0], sum(parts[-1])) == (0, num_bytes)
            gaps = [after[0] - before[0] for before, after in itertools.pairwise(parts)]
            assert max(gaps) - min(gaps) <= 1

    @pytest.mark.parametrize("num_bytes", [0, 1, WINDOW_BYTES, 3 * WINDOW_BYTES])
    def test_a_small_tensor_is_hashed_whole(self, num_bytes: int) -> None:
        assert sum(length for _, length in windows(num_bytes, 3)) == num_bytes

    def test_what_sampling_cannot_find_is_a_change_between_the_windows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The documented limit: of a large checkpoint one row may change unseen; of a small one nothing may."""
        tensors = some_tensors()
        original = write_model(tmp_path / "model", tensors)
        tensors["lm_head.weight"][5] += 1
        changed = write_model(tmp_path / "changed", tensors)
        assert checkpoint_fingerprint(original) != checkpoint_fingerprint(changed)
        monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
        monkeypatch.setattr(module, "NUM_WINDOWS", 14)
        monkeypatch.setattr(module, "WINDOW_BYTES", 64)
        assert checkpoint_fingerprint(original) == checkpoint_fingerprint(changed)


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("config.json", b"{"),
            ("config.json", b"[]"),
            ("model.safetensors", b""),
            ("model.safetensors", b"\xff" * 64),
            ("model.safetensors", struct.pack("<Q", 2) + b"[]"),
            ("model.safetensors", struct.pack("<Q", 12) + b'{"a": "bcd"}'),
        ],
    )
    def test_a_file_that_makes_no_sense_is_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        folder = write_model(tmp_path / "model")
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=name):
            checkpoint_fingerprint(folder)

    def test_missing_weights_and_a_missing_shard_are_named(self, tmp_path: Path) -> None:
        folder = write_sharded(tmp_path / "model", some_tensors(), 2)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ConfigurationError, match="model-00002-of-00002"):
            checkpoint_fingerprint(folder)
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(ConfigurationError, match=r"model\.safetensors\.index\.json"):
            checkpoint_fingerprint(folder)
