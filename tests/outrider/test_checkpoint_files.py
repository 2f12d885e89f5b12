"""Files of a checkpoint: which ones hold the weights, and whether they are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.engine.loading.checkpoint_files import (
    DamagedCheckpoint,
    check_checkpoint,
    partial_folder,
    unfinished_fetch,
    weight_files,
)
from outrider.errors import ConfigurationError

INDEX = "model.safetensors.index.json"


def write(path: Path, *names: str, offsets: tuple[int, ...] = ()) -> None:
    """A file of tensors with four bytes each."""
    begins = offsets or tuple(range(0, 4 * len(names), 4))
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [begin, begin + 4]}
        for name, begin in zip(names, begins, strict=True)
    }
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(max(begins) + 4))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write(folder / "one.safetensors", "a", "b")
    write(folder / "two.safetensors", "c")
    placed = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return folder


def test_a_whole_checkpoint_passes(model: Path) -> None:
    check_checkpoint(model)
    assert [path.name for path in weight_files(model, {})] == ["one.safetensors", "two.safetensors"]


def test_one_file_counts_before_an_index(model: Path) -> None:
    write(model / "model.safetensors", "a")
    (model / "two.safetensors").unlink()
    check_checkpoint(model)


def test_files_that_the_configuration_names_count(model: Path) -> None:
    (model / "config.json").write_text('{"transformers_weights": "two.safetensors"}')
    (model / "one.safetensors").unlink()
    check_checkpoint(model)


def test_a_missing_file_is_named(model: Path) -> None:
    (model / "two.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"lacks 1 of its 2 files of weights, such as two\.safetensors"):
        check_checkpoint(model)


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 30, -1])
def test_a_file_that_is_cut_off_is_named(model: Path, num_bytes: int) -> None:
    path = model / "one.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DamagedCheckpoint, match=r"one\.safetensors .*cut off"):
        check_checkpoint(model)


def test_a_file_with_bytes_that_belong_to_nothing_is_named(model: Path) -> None:
    with (model / "one.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedCheckpoint, match=r"one\.safetensors has .* and its header promises .*damaged"):
        check_checkpoint(model)


def test_tensors_that_overlap_are_damage(model: Path) -> None:
    write(model / "one.safetensors", "a", "b", offsets=(0, 2))
    with pytest.raises(DamagedCheckpoint, match="overlap"):
        check_checkpoint(model)


def test_a_file_of_another_version_is_named(model: Path) -> None:
    write(model / "two.safetensors", "d")
    with pytest.raises(DamagedCheckpoint, match=rf"two\.safetensors lacks 1 tensors that {INDEX} places in it"):
        check_checkpoint(model)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}'])
def test_an_index_that_cannot_be_read_is_named(model: Path, content: str) -> None:
    (model / INDEX).write_text(content)
    with pytest.raises(ConfigurationError, match=r"index\.json"):
        check_checkpoint(model)


def test_an_unfinished_fetch_is_found(tmp_path: Path) -> None:
    assert unfinished_fetch(tmp_path / "model") is None
    partial_folder(tmp_path / "model").mkdir()
    assert unfinished_fetch(tmp_path / "model") == tmp_path / ".model.partial"
