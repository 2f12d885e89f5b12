"""Files of a checkpoint in Hugging Face format: which ones hold the weights, and whether they are whole.

The loader asks before it serves, `outrider fetch` before it hands a folder over.

Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigurationError

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""
SINGLE_FILE: Final = "model.safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX_FILE: Final = f"model{INDEX_SUFFIX}"
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_LENGTH_BYTES: Final = 8  # before the header


class DamagedCheckpoint(ConfigurationError):
    """A file of the weights is missing or not whole."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's name, type, shape and location in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int  # offset of its bytes in the file
    num_bytes: int


def weight_files(model_dir: Path, config: dict[str, Any]) -> list[Path]:
    """The files that transformers reads the weights from, each once. Raises ConfigurationError."""
    name = str(config.get("transformers_weights") or _usual_file(model_dir))
    names = [name] if not name.endswith(INDEX_SUFFIX) else sorted(set(weight_map(model_dir / name).values()))
    if (model_dir / ADAPTER_FILES[1]).is_file():
        names.append(ADAPTER_FILES[1])
    return [model_dir / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """The names of files by the names of the tensors in them, as an index has them. Raises ConfigurationError."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(f"{index} has no weight_map")
    return {str(tensor): str(name) for tensor, name in found.items()}


def tensors_of(path: Path) -> list[Tensor]:
    """Reads the tensors from a safetensors file's header. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if header_len > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_len} bytes")
            header = json.loads(file.read(header_len))
        header.pop("__metadata__", None)
        return [
            Tensor(
                name,
                str(each["dtype"]),
                tuple(int(size) for size in each["shape"]),
                path,
                _LENGTH_BYTES + header_len + int(each["data_offsets"][0]),
                int(each["data_offsets"][1]) - int(each["data_offsets"][0]),
            )
            for name, each in header.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read as safetensors: {error}") from error


def check_checkpoint(model_dir: Path) -> None:
    """Checks that every file of the weights is there, has the bytes that its header promises, and has the tensors that
    the index places in it. Reads headers alone.

    Raises DamagedCheckpoint, or ConfigurationError if a description cannot be read.
    """
    config = read_json(model_dir / "config.json")
    name = str(config.get("transformers_weights") or _usual_file(model_dir))
    placed = weight_map(model_dir / name) if name.endswith(INDEX_SUFFIX) else {}
    files = weight_files(model_dir, config)
    if missing := [path.name for path in files if not path.is_file()]:
        raise DamagedCheckpoint(
            f"{model_dir} lacks {len(missing)} of its {len(files)} files of weights, such as {missing[0]}; the copy or "
            "download was not finished"
        )
    for path in files:
        names = {tensor.name for tensor in _whole_tensors(path)}
        absent = [tensor for tensor, file in placed.items() if file == path.name and tensor not in names]
        if absent:
            raise DamagedCheckpoint(
                f"{path} lacks {len(absent)} tensors that {name} places in it, such as {absent[0]}; the file and the "
                "index belong to different versions of the model"
            )


def unfinished_fetch(model_dir: Path) -> Path | None:
    """The folder in which `outrider fetch` gathers what will be this folder, if it is there."""
    gathered = partial_folder(model_dir)
    return gathered if gathered.is_dir() else None


def partial_folder(folder: Path) -> Path:
    """The folder beside another one that `outrider fetch` fills before it renames it."""
    return folder.with_name(f".{folder.name}.partial")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ConfigurationError."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return found


def _usual_file(model_dir: Path) -> str:
    return SINGLE_FILE if (model_dir / SINGLE_FILE).is_file() else INDEX_FILE


def _whole_tensors(path: Path) -> list[Tensor]:
    """The tensors of a file that has all their bytes, and none besides. Raises DamagedCheckpoint."""
    num_bytes = path.stat().st_size
    try:
        tensors = tensors_of(path)
    except ConfigurationError as error:
        raise DamagedCheckpoint(f"{error.message}; it has {num_bytes} bytes, and is cut off or damaged") from error
    end = max((tensor.begin + tensor.num_bytes for tensor in tensors), default=None)
    if end is not None and end != num_bytes:
        raise DamagedCheckpoint(
            f"{path} has {num_bytes} bytes, and its header promises {end}: it is "
            f"{'cut off' if num_bytes < end else 'damaged'}"
        )
    if any(later < earlier for earlier, later in _gaps(tensors)):
        raise DamagedCheckpoint(f"{path} is damaged: tensors of its header overlap")
    return tensors


def _gaps(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Ends of tensors, each with the beginning of the next one."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.begin, tensor.num_bytes))
    for one, other in pairwise(ordered):
        yield one.begin + one.num_bytes, other.begin
