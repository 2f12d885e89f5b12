"""Descriptions in model folders, which may come from anybody: JSON of bounded size and depth, names of files beside it.

Never imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigurationError

JSON_BYTES_MAX: Final = 256 << 20
"""Largest file of JSON that is read. Tokenizers with 256k entries have 33 MB."""
JSON_DEPTH_MAX: Final = 64
"""Deepest nesting of lists and objects. The deepest real file, a tokenizer, has eight levels; whoever walks through a
description recursively may rely on it."""


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested too deeply."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(JSON_DEPTH_MAX + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return found
    raise ValueError(f"it is nested deeper than {JSON_DEPTH_MAX} levels")


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Reads a JSON object; an empty one if the file is `optional` and there is none. Raises ConfigurationError."""
    if optional and not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            content = file.read(JSON_BYTES_MAX + 1)
        if len(content) > JSON_BYTES_MAX:
            raise ValueError(f"it has more than {JSON_BYTES_MAX} bytes")
        found = parse_json(content)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist; a model folder must hold one") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return found


def file_beside(description: Path, name: Any) -> Path:
    """The file of this name in the folder of a description that names it. Raises ConfigurationError for a name that
    leads anywhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ConfigurationError(f"{description} names {str(name)[:100]!r}, which is no file beside it")
    return description.parent / name
