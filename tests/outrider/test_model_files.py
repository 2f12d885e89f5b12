"""Descriptions in model folders may come from anybody: JSON that is too deep or too long, names that lead elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line.fetch.record import RECORD, Record, recorded_digests
from command_line.start.preflight import check_model
from outrider import model_files
from outrider.engine.heads.kind import folder_kind
from outrider.engine.loading.checkpoint_files import check_checkpoint, tensors_of, weight_files
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.errors import ConfigurationError
from outrider.model_files import JSON_DEPTH_MAX, file_beside, parse_json, read_json
from outrider.text.tokenizer import Tokenizer, fingerprint
from outrider.text.vocabulary_map import has_same_base
from tests.coordinator.tiny_model import write_model_dir

DEPTHS = [100, 400, 700, 2000, 100_000]
"""Below Python's limit for JSON, where walking through it is beyond, and above."""


def nested(depth: int, key: str | None = None) -> str:
    return '{"a":' * depth + "1" + "}" * depth if key is None else f'{{"{key}": {nested(depth)}}}'


def write_weights(path: Path, header: str) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))


@pytest.mark.parametrize("depth", DEPTHS)
def test_json_that_is_too_deep_is_an_error_of_its_file(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "x.json"
    path.write_text(nested(depth))
    with pytest.raises(ConfigurationError, match=r"x\.json: it is nested"):
        read_json(path)


def test_json_may_be_as_deep_as_descriptions_are() -> None:
    assert parse_json(nested(JSON_DEPTH_MAX))
    assert parse_json("[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX) is not None
    with pytest.raises(ValueError, match="nested"):
        parse_json(nested(JSON_DEPTH_MAX + 2))


def test_a_file_that_is_too_long_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "JSON_BYTES_MAX", 10)
    (tmp_path / "x.json").write_text('{"a": 1234567}')
    with pytest.raises(ConfigurationError, match="more than 10 bytes"):
        read_json(tmp_path / "x.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model_dir(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    write_weights(folder / "model.safetensors", header)
    return folder


READERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": check_checkpoint,
    "checkpoint's fingerprint": checkpoint_fingerprint,
    "tokenizer": Tokenizer,
    "tokenizer's fingerprint": fingerprint,
    "vocabularies": lambda folder: has_same_base(folder, folder),
    "draft head": folder_kind,
    "command": lambda folder: check_model(folder, "--target"),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "header", "index"])
def test_no_description_of_a_folder_ends_a_process(model: Path, name: str, depth: int) -> None:
    """Whoever reads a folder knows its errors: those that say which file it is."""
    if name == "header":
        write_weights(model / "model.safetensors", nested(depth, "a"))
    elif name == "index":
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(nested(depth, "weight_map"))
    elif name == "tokenizer.json":
        description = json.loads((model / name).read_text())
        text = json.dumps(description | {"normalizer": "HERE"}).replace('"HERE"', nested(depth))
        (model / name).write_text(text)
    else:
        (model / name).write_text(nested(depth, "extra_tokens"))
    refusals = []
    for reader in READERS.values():
        try:
            reader(model)
        except ConfigurationError as error:
            refusals.append(error.message)
    assert all(name in refusal or str(model) in refusal for refusal in refusals), refusals
    if depth == max(DEPTHS):
        assert refusals, "somebody has read it"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_record_that_came_with_a_model_is_none_if_it_is_too_deep(tmp_path: Path, depth: int) -> None:
    assert recorded_digests(nested(depth).encode()) == {}
    (tmp_path / RECORD).write_text(nested(depth))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Record.read(tmp_path)


NAMES = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/../../x.safetensors",
    "a\\x",
    "..",
    ".",
    "",
    "a\0b",
    5,
    ["a"],
    None,
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json names .*no file beside it"):
        file_beside(tmp_path / "config.json", name)


@pytest.mark.parametrize("name", [name for name in NAMES if name], ids=repr)
def test_weights_lie_in_their_folder(model: Path, name: Any) -> None:
    """One that the configuration names, and those that an index names."""
    write_weights(model.parent / "x.safetensors", json.dumps({}))
    (model / "config.json").write_text(json.dumps({"transformers_weights": name}))
    for read in (check_checkpoint, checkpoint_fingerprint):
        with pytest.raises(ConfigurationError, match="no file beside it"):
            read(model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no file beside it"):
        weight_files(model, {})
    with pytest.raises(ConfigurationError, match="no file beside it"):
        check_model(model, "--target")


def test_a_record_names_files_of_its_folder(tmp_path: Path) -> None:
    file = {"path": "../x", "size": 1, "sha256": "", "identity": "", "compared": "size"}
    record = {"version": 1, "source": "a", "name": "a", "revision": None, "fetched_at": "", "files": [file]}
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(ConfigurationError, match="not in the folder"):
        Record.read(tmp_path)
    record["files"] = [file | {"path": "additional_chat_templates/x.jinja"}]
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert Record.read(tmp_path) is not None


@pytest.mark.parametrize(
    "described",
    [
        {"dtype": "U8", "shape": [5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [True, 4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [1 << 70], "data_offsets": [0, 1 << 70]},
        {"dtype": "U8", "shape": [1] * 1000 + [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0]},
        {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]},
        {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [7], "data_offsets": [0, 4]},
        {},
        [],
        None,
    ],
    ids=str,
)
def test_a_shape_that_contradicts_the_offsets_is_damage(tmp_path: Path, described: Any) -> None:
    write_weights(tmp_path / "x.safetensors", json.dumps({"a": described}))
    with pytest.raises(ConfigurationError, match=r"x\.safetensors cannot be read as safetensors"):
        tensors_of(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F4", [8]), ("BF16", [2]), ("F32", []), ("U8", [4]), ("F8_E4M3", [2, 2])]
)
def test_a_shape_that_agrees_with_the_offsets_is_read(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    write_weights(
        tmp_path / "x.safetensors", json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 4]}})
    )
    (tensor,) = tensors_of(tmp_path / "x.safetensors")
    assert (tensor.dtype, tensor.shape, tensor.num_bytes) == (dtype, tuple(shape), 4)
