"""The weights of a head's folder, by name. Safetensors alone: reading pickled files runs whatever is in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.loading.checkpoint_files import INDEX_SUFFIX, Tensor, tensors_of, weight_map
from outrider.engine.loading.checkpoint_formats import CheckpointFormat, checkpoint_format
from outrider.errors import ConfigurationError

PICKLED: Final = ("*.bin", "*.pt", "*.pth")
_CONVERT: Final = (
    "convert them where that does no harm: python -c \"import torch, safetensors.torch as s; t = torch.load('{name}', "
    "weights_only=True); s.save_file({{k: v.clone().contiguous() for k, v in t.items()}}, 'model.safetensors')\""
)


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The tensors of a folder; only the headers of its files have been read."""

    folder: Path
    headers: Mapping[str, Tensor]  # by name

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Reads the headers of all files of the folder. Raises ModelLoadError."""
        files = _files(folder)
        try:
            return cls(folder, {tensor.name: tensor for path in files for tensor in tensors_of(path)})
        except ConfigurationError as error:
            raise ModelLoadError(str(error)) from error

    def read(self, names: Mapping[str, str], published: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """Reads tensors: `names` maps what they are to be called to their names in the files.

        published: the `quantization_config` of a checkpoint with quantized weights, which are read as plain ones.
        Raises ModelLoadError naming what is missing.
        """
        form = _form(self.folder, published)
        self.require(name for name in names.values() if form is None or not name.endswith(".weight"))
        return {name: self._weight(stored, form) for name, stored in names.items()}

    def require(self, names: Iterable[str]) -> None:
        """Raises ModelLoadError naming tensors that no file has."""
        if missing := sorted(set(names) - self.headers.keys()):
            raise ModelLoadError(
                f"{self.folder} lacks {len(missing)} tensors of its head, such as {missing[0]}; the weights are "
                "incomplete or of another architecture"
            )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, None if it is not there."""
        return self.headers[name].shape if name in self.headers else None

    def ending(self, suffix: str) -> str | None:
        """The name of the one tensor that ends so, None if there is none. Raises ModelLoadError for several."""
        found = [name for name in self.headers if name == suffix or name.endswith(f".{suffix}")]
        if len(found) > 1:
            raise ModelLoadError(f"{self.folder} has several tensors {suffix}: {', '.join(sorted(found))}")
        return found[0] if found else None

    def _weight(self, name: str, form: CheckpointFormat | None) -> torch.Tensor:
        if form is None or not name.endswith(".weight"):
            return self._load(name)
        layer = name.removesuffix("weight")
        parts = {part: layer + part for part in form.tensor_names if layer + part in self.headers}
        if not parts:
            self.require([name])
        try:
            return form.read({part: self._load(stored) for part, stored in parts.items()})
        except (KeyError, ValueError, RuntimeError) as error:
            raise ModelLoadError(f"{self.folder} has a weight {name} that cannot be read: {error}") from error

    def _load(self, name: str) -> torch.Tensor:
        path = self.headers[name].path
        try:
            with safe_open(path, "pt") as file:
                loaded: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        return loaded


def _files(folder: Path) -> list[Path]:
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    names = {name for index in indices for name in weight_map(index).values()}
    files = [folder / name for name in sorted(names)] or sorted(folder.glob("*.safetensors"))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelLoadError(f"{folder} lacks {missing[0]}, which its index names; was the download finished?")
    if files:
        return files
    if pickled := sorted(path.name for pattern in PICKLED for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} has pickled weights ({pickled[0]}) alone, and reading these runs whatever their author wrote "
            f"into them; {_CONVERT.format(name=pickled[0])}"
        )
    raise ModelLoadError(f"{folder} has no weights (*.safetensors); was the download finished?")


def _form(folder: Path, published: Mapping[str, Any] | None) -> CheckpointFormat | None:
    try:
        return None if published is None else checkpoint_format(published)
    except ValueError as error:
        raise ModelLoadError(f"cannot load {folder}: {error}") from error
