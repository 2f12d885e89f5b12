"""The `outrider` command over fake workers, which `python -m` finds first because they lie in its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FAKE_PACKAGES = Path(__file__).parent / "fake_packages"

Run = Callable[..., subprocess.Popen[str]]


def write_model(folder: Path, *words: str) -> Path:
    """A model folder that passes every early check; `words` are its vocabulary."""
    folder.mkdir()
    vocabulary = {word: i for i, word in enumerate(words or ("a", "b"))}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text("{}")
    write_weights(folder)
    return folder


def write_weights(folder: Path, num_parameters: int = 100) -> None:
    """As far as anybody reads it before it is loaded: a header, which says what would follow."""
    tensor = {"dtype": "BF16", "shape": [num_parameters // 10, 10], "data_offsets": [0, 2 * num_parameters]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def write_head(folder: Path, kind: str = "eagle3", **config: Any) -> Path:
    """A draft head's folder, as far as anybody reads it before it is loaded."""
    folder.mkdir()
    names = {"eagle3": ("fc.weight", "midlayer.hidden_norm.weight"), "medusa": ("0.0.linear.weight",)}[kind]
    kinds: dict[str, dict[str, Any]] = {
        "eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
        "medusa": {"medusa_num_heads": 1},
    }
    (folder / "config.json").write_text(json.dumps(kinds[kind] | config))
    tensors = {name: {"dtype": "BF16", "shape": [10, 10], "data_offsets": [0, 200]} for name in names}
    header = json.dumps(tensors).encode()
    (folder / f"{kind}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a target and a draft."""
    return write_model(tmp_path / "target"), write_model(tmp_path / "draft")


@pytest.fixture
def outrider(tmp_path: Path) -> Iterator[Run]:
    """Starts `outrider` over fake workers, with arguments and, by keyword, environment variables."""
    yield from _commands_in(FAKE_PACKAGES, tmp_path)


@pytest.fixture
def real_outrider(tmp_path: Path) -> Iterator[Run]:
    """As `outrider`, with the real workers and coordinator."""
    yield from _commands_in(ROOT, tmp_path)


def _commands_in(folder: Path, tmp_path: Path) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OUTRIDER_CACHE_DIR": str(tmp_path / "cache"),
            "COLUMNS": "200",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "command_line", *map(str, arguments)],
            cwd=folder,
            env=environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
    for process in started:
        process.communicate(timeout=60)


def family(process: subprocess.Popen[str]) -> list[int]:
    """Pids of a running process and of all its descendants."""
    root = psutil.Process(process.pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


def commands(process: subprocess.Popen[str]) -> dict[int, list[str]]:
    """Command lines of a running process and its descendants by pid; without those that are just ending."""
    found: dict[int, list[str]] = {}
    for pid in family(process):
        with suppress(psutil.NoSuchProcess):
            found[pid] = psutil.Process(pid).cmdline()
    return found
