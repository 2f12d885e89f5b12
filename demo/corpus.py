"""The corpus: Python sources of the running interpreter's standard library, split by file name.

A hash of its relative name determines whether a file is held out. The rule needs no list, so it works with every
interpreter version; `held_out.txt` lists the files it selected for the version that the shipped pair was trained on.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves, character maps and keyword tables are data, generated build settings contain the
# builder's folders, and the rest is not part of what people import.
SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "idlelib", "encodings", "pydoc_data",
})  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_PERCENT = 6


@dataclass(frozen=True)
class SourceFile:
    """One source file: its name relative to the library, with forward slashes, and its text."""

    name: str
    text: str


def library_root() -> Path:
    """The standard library folder of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name is excluded from training (about HELD_OUT_PERCENT of files)."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def is_skipped(name: str) -> bool:
    """Whether the file of this relative name belongs to no split at all."""
    parts = name.split("/")
    return any(part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES) for part in parts)


def source_names(root: Path | None = None) -> list[str]:
    """Names of the files that belong to a split, sorted."""
    root = root or library_root()
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        # Installed packages may be a hundred times larger than the library, so they are not even listed.
        folders[:] = [name for name in folders if not is_skipped(name)]
        names += [(Path(folder) / file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    return sorted(name for name in names if not is_skipped(name))


def _read(names: Iterable[str], root: Path | None) -> list[SourceFile]:
    """Reads the named files; empty ones and those that are not UTF-8 are left out."""
    files: list[SourceFile] = []
    for name in names:
        try:
            text = ((root or library_root()) / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            files.append(SourceFile(name, text))
    return files


def training_files(root: Path | None = None) -> list[SourceFile]:
    """Files that training, the tokenizer and distillation may see."""
    return _read((name for name in source_names(root) if not is_held_out(name)), root)


def held_out_files(root: Path | None = None) -> list[SourceFile]:
    """Files that no stage of training has seen."""
    return _read((name for name in source_names(root) if is_held_out(name)), root)


def held_out_prompts(
    count: int, *, seed: int = 0, chars_min: int = 100, chars_max: int = 700, root: Path | None = None
) -> list[str]:
    """Prompts cut from held-out files: they start at the beginning of a line and end before white space.

    A character is about 0.27 tokens, so the default lengths are 27 to 190 tokens. The same arguments give the same
    prompts on the same interpreter version.
    """
    files = [file for file in held_out_files(root) if len(file.text) > 2 * chars_max]
    if not files:
        raise ValueError("the standard library has no held-out file that is long enough")
    rng = random.Random(seed)
    prompts: list[str] = []
    while len(prompts) < count:
        text = rng.choice(files).text
        start = text.rfind("\n", 0, rng.randrange(len(text) - chars_max)) + 1
        end = start + rng.randint(chars_min, chars_max)
        while end < len(text) and not text[end].isspace():
            end += 1
        prompt = text[start:end].rstrip()
        if len(prompt) >= chars_min // 2:
            prompts.append(prompt)
    return prompts
