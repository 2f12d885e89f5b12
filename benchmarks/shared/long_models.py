"""The demo pair for longer sequences than it was trained on, with YaRN (2309.00071); used to measure long prompts.

On held-out code the demo's draft and target agree beyond their own 1024 tokens about as often as within them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lengthen(model_dir: Path, out_dir: Path, max_model_len: int) -> Path:
    """Copies a model to the new folder `out_dir` with a limit of `max_model_len` tokens. Returns `out_dir`.

    A model with such a limit is copied unchanged. Raises ValueError for other than plain rotary positions.
    """
    shutil.copytree(model_dir, out_dir)
    path = out_dir / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    trained_len: int = config["max_position_embeddings"]
    if max_model_len <= trained_len:
        return out_dir
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "default":
        raise ValueError(f"{model_dir} has rotary positions of the kind {rope.get('rope_type')!r}, not 'default'")
    config["max_position_embeddings"] = max_model_len
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": max_model_len / trained_len,
        "original_max_position_embeddings": trained_len,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return out_dir


@contextmanager
def long_models(target_dir: Path, draft_dir: Path, max_model_len: int) -> Iterator[tuple[Path, Path]]:
    """Lengthened copies of both models; deleted afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [(target_dir, Path(scratch) / "target"), (draft_dir, Path(scratch) / "draft")]
        target, draft = (lengthen(source, out, max_model_len) for source, out in folders)
        yield target, draft
