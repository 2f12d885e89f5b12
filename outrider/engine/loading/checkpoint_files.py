"""Files of a checkpoint in Hugging Face format: which ones hold the weights, and whether they are whole.

The loader asks before it serves, `outrider fetch` before it hands a folder over.

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigurationError
from outrider.model_files import file_beside, parse_json, read_json

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""
SINGLE_FILE: Final = "model.safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX_FILE: Final = f"model{INDEX_SUFFIX}"
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_LENGTH_BYTES: Final = 8  # before the header
_DIMENSIONS_MAX: Final = 32
_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of an element, by the format's names of types."""


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
    first = _first_file(model_dir, config)
    names = sorted(set(weight_map(first).values())) if _is_index(first) else [first.name]
    if (model_dir / ADAPTER_FILES[1]).is_file():
        names.append(ADAPTER_FILES[1])
    return [model_dir / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """The names of files by the names of the tensors in them, as an index has them, all beside it. Raises
    ConfigurationError."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(f"{index} has no weight_map")
    return {str(tensor): file_beside(index, name).name for tensor, name in found.items()}


def tensors_of(path: Path) -> list[Tensor]:
    """Reads the tensors from a safetensors file's header. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if header_len > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_len} bytes")
            header = parse_json(file.read(header_len))
        header.pop("__metadata__", None)
        return [_tensor(path, _LENGTH_BYTES + header_len, name, each) for name, each in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read as safetensors: {error}") from error


def _tensor(path: Path, data_begin: int, name: str, described: dict[str, Any]) -> Tensor:
    """A tensor of a header, whose shape and offsets agree. Raises ValueError, KeyError or TypeError."""
    dtype, shape, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
    numbers = [*shape, begin, end]
    if len(shape) > _DIMENSIONS_MAX or not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers):
        raise ValueError(f"the shape or the offsets of {name[:100]!r} are no such numbers")
    num_bits = prod(shape) * _BITS[dtype]
    if num_bits != 8 * (end - begin):
        raise ValueError(
            f"{name[:100]!r} has the shape {shape} of {dtype}, which are {num_bits / 8:g} bytes, and the offsets of "
            f"{end - begin}"
        )
    return Tensor(name, dtype, tuple(shape), path, data_begin + begin, end - begin)


def check_checkpoint(model_dir: Path) -> None:
    """Checks that every file of the weights is there, has the bytes that its header promises, and has the tensors that
    the index places in it. Reads headers alone.

    Raises DamagedCheckpoint, or ConfigurationError if a description cannot be read.
    """
    config = read_json(model_dir / "config.json")
    first = _first_file(model_dir, config)
    placed = weight_map(first) if _is_index(first) else {}
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
                f"{path} lacks {len(absent)} tensors that {first.name} places in it, such as {absent[0]}; the file and "
                "the index belong to different versions of the model"
            )


def unfinished_fetch(model_dir: Path) -> Path | None:
    """The folder in which `outrider fetch` gathers what will be this folder, if it is there."""
    gathered = partial_folder(model_dir)
    return gathered if gathered.is_dir() else None


def partial_folder(folder: Path) -> Path:
    """The folder beside another one that `outrider fetch` fills before it renames it."""
    return folder.with_name(f".{folder.name}.partial")


def _first_file(model_dir: Path, config: dict[str, Any]) -> Path:
    """The file of the weights, or the index that names their files. Raises ConfigurationError."""
    usual = SINGLE_FILE if (model_dir / SINGLE_FILE).is_file() else INDEX_FILE
    return file_beside(model_dir / "config.json", config.get("transformers_weights") or usual)


def _is_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX)


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
