"""Draft heads beside the target of these tests: real ones with random weights, and one that knows what is right."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.engine.heads.loading import feature_source, load_medusa
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.model import Engine
from target_worker.local_heads import AttentiveDrafter, MedusaDrafter
from target_worker.messages import Drafted, HeadResult, HeadTurn
from target_worker.scheduling.head_turns import DraftsLocally
from tests import models
from tests.exactness.heads import WIDTH, head_engine

NUM_MEDUSA_HEADS = 3
LOCAL_HEADS = ("eagle3", "medusa", "guessing")


def make_local_head(kind: str, target: Engine, right: Mapping[str, Sequence[int]], luck: int) -> DraftsLocally:
    """A head for `target`, which must keep its features alone. right: texts by session id, prompt included."""
    match kind:
        case "eagle3":
            head = head_engine(target)
            head.allocator.check_integrity([])
            return SteadyHead(AttentiveDrafter(target, head, _ignore))
        case "medusa":
            return SteadyHead(MedusaDrafter(target, medusa_heads(target), _ignore))
    return GuessingHead(right, target.vocab_size, luck)


def _ignore(_turn_ms: float) -> None:
    pass


class SteadyHead:
    """A head whose passes take the same time always, and hardly any: a run repeats itself."""

    def __init__(self, head: DraftsLocally) -> None:
        self._head = head
        self.allocator, self.max_depth = head.allocator, head.max_depth

    def draft(self, turn: HeadTurn) -> HeadResult:
        result = self._head.draft(turn)
        return replace(result, passes=[(rows, 0.01 + 0.001 * rows) for rows, _ in result.passes])


class GuessingHead:
    """Drafts what is right, most of the time."""

    allocator: BlockAllocator | None = None
    max_depth = 6

    def __init__(self, right: Mapping[str, Sequence[int]], vocab_size: int, luck: int) -> None:
        self._right, self._vocab_size, self._rng = right, vocab_size, random.Random(luck)

    def draft(self, turn: HeadTurn) -> HeadResult:
        drafts = []
        for item in turn.items:
            assert item.context is not None
            text = self._right.get(item.session_id, ())
            token_ids = [
                self._rng.randrange(self._vocab_size) if self._rng.random() < 0.2 else token_id
                for token_id in text[item.end : item.end + len(item.records)]
            ]
            drafts.append(Drafted(token_ids, [self._rng.randrange(1, 128) for _ in token_ids]))
        return HeadResult(drafts, [(len(turn.items), 0.01)])


@functools.cache
def medusa_heads(target: Engine) -> MedusaHeads:
    """Random heads of one block each."""
    folder = write_medusa(models.root_dir() / f"medusa-{target.vocab_size}", target.vocab_size)
    target.tap(feature_source(folder, target.config.model, "float32", "cpu"))
    return load_medusa(folder, target.config.model, torch.float32)


def write_medusa(folder: Path, vocab_size: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1}))
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for number in range(NUM_MEDUSA_HEADS):
        tensors[f"{number}.0.linear.weight"] = 0.3 * torch.randn(WIDTH, WIDTH, generator=generator)
        tensors[f"{number}.0.linear.bias"] = torch.zeros(WIDTH)
        tensors[f"{number}.1.weight"] = 0.3 * torch.randn(vocab_size, WIDTH, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
