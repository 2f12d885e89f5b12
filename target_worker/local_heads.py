"""Draft heads that run beside the target's model, on the features that its engine keeps (`Engine.tap`).

A head with attention (EAGLE-3, MTP) drafts one token after the other: its first pass runs the committed tokens that it
has not run yet, each on the target's feature of the token before it, and further passes run on the head's own output.
Medusa heads guess all tokens from the target's last state at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from outrider.engine.heads.checkpoint import HeadKind, open_head
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import load_head, load_medusa
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.model import DTYPES, Engine
from outrider.engine.sampling.logit_processing import NEVER, is_idle, process
from outrider.engine.sampling.sampling import likely_choices, most_likely
from outrider.engine.sequence_chunk import SequenceChunk
from outrider.grammar import GrammarViolation
from outrider.hints.confidence import confidence_level
from outrider.sampling_params import DecodingMode
from target_worker.messages import Drafted, HeadItem, HeadResult, HeadTurn

MAX_DEPTH = 16


class LocalHead(Protocol):
    """A draft head beside a target's engine (`head_turns.DraftsLocally`)."""

    allocator: BlockAllocator | None
    max_depth: int

    def draft(self, turn: HeadTurn) -> HeadResult:
        """Runs a turn."""


ObserveMs = Callable[[float], None]
"""Takes the milliseconds of a turn."""


def load_local_head(folder: Path, target_dir: Path, engine: Engine, observe_ms: ObserveMs) -> LocalHead:
    """Loads the head in `folder` to run beside `engine`, which keeps its features. Raises ModelLoadError."""
    if engine.features is None:
        raise ModelLoadError(f"the engine keeps no states for the draft head {folder}")
    if open_head(folder).kind is HeadKind.MEDUSA:
        return MedusaDrafter(
            engine, load_medusa(folder, target_dir, DTYPES[engine.config.dtype], engine.device), observe_ms
        )
    options = replace(
        engine.config, model=folder, max_model_len=engine.max_model_len, beside_bytes=0, beside_bytes_per_token=0
    )
    head = load_head(options, target_dir, engine.allocator.num_blocks * engine.block_size)
    _warm_up(head)
    return AttentiveDrafter(engine, head, observe_ms)


def _warm_up(head: HeadEngine) -> None:
    """Runs some passes: the first ones are slow, and the scheduler learns from passes what one costs."""
    kv = head.new_sequence()
    for count in (16, 1, 1, 1):
        kv.extend(count)
        head.forward([SequenceChunk(kv, [0] * count, 1)])
    kv.free()


@dataclass(slots=True)
class _Draft:
    """The tokens drafted for an item so far."""

    item: HeadItem
    token_ids: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    reach: float = 1.0  # probability that all of them are accepted
    is_over: bool = False  # nothing can follow, or may

    def add(self, token_id: int, chance: float) -> None:
        """Adds a token that the head gives so much probability."""
        level = confidence_level(chance)
        self.reach *= self.item.chance(len(self.token_ids), level)
        self.token_ids.append(token_id)
        self.levels.append(level)
        self.is_over = len(self.token_ids) == len(self.item.records)

    @property
    def promise(self) -> float:
        """Expected tokens of one more."""
        return self.reach * self.item.records[len(self.token_ids)]

    def drafted(self) -> Drafted:
        return Drafted(self.token_ids, self.levels)


def _going_on(drafts: Sequence[_Draft], turn: HeadTurn) -> list[_Draft]:
    """The drafts that are worth a row of one more pass; none where the pass as a whole is not worth its time."""
    found = [draft for draft in drafts if not draft.is_over and draft.promise >= turn.row_worth]
    promised = sum(draft.promise - turn.row_worth for draft in found)
    return found if promised >= turn.pass_worth else []


class AttentiveDrafter:
    """A head with attention, which has a KV cache of its own."""

    max_depth = MAX_DEPTH

    def __init__(self, target: Engine, head: HeadEngine, observe_ms: ObserveMs) -> None:
        self._target, self._head, self._observe_ms = target, head, observe_ms
        self.allocator: BlockAllocator | None = head.allocator

    @torch.inference_mode()
    def draft(self, turn: HeadTurn) -> HeadResult:
        """Runs a turn: a pass over the committed tokens, then one for each further token drafted."""
        started = time.perf_counter()
        chunks = [self._run_committed(item) for item in turn.items]
        drafts = [_Draft(item) for item in turn.items]
        growing = [draft for draft in drafts if draft.item.context is not None]
        _extend(growing, self._head.forward(chunks))
        passes = [(sum(len(chunk.token_ids) for chunk in chunks), _ms_since(started))]
        while growing := _going_on(growing, turn):
            started = time.perf_counter()
            _extend(growing, self._head.forward([self._run_drafted(draft) for draft in growing]))
            passes.append((len(growing), _ms_since(started)))
        for item in turn.items:
            assert item.kv is not None
            item.kv.truncate(item.end)
        self._observe_ms(sum(pass_ms for _, pass_ms in passes))
        return HeadResult([draft.drafted() for draft in drafts], passes)

    def _run_committed(self, item: HeadItem) -> SequenceChunk:
        kv, features = item.kv, self._target.features
        assert kv is not None
        assert features is not None
        kv.extend(item.end - item.start)
        first, last = max(item.start - 1, 0), item.end - 1  # the feature of the last token is not known yet
        slots = torch.from_numpy(item.target_kv.slots(first, last)).to(features.device)
        self._head.set_features(kv.slots(first, last), features.index_select(0, slots))
        return SequenceChunk(kv, item.token_ids[item.start : item.end], 0 if item.context is None else 1)

    @staticmethod
    def _run_drafted(draft: _Draft) -> SequenceChunk:
        kv = draft.item.kv
        assert kv is not None
        kv.extend(1)
        return SequenceChunk(kv, draft.token_ids[-1:], 1)


class MedusaDrafter:
    """Heads that each guess one later token from the same state."""

    allocator: BlockAllocator | None = None

    def __init__(self, target: Engine, heads: MedusaHeads, observe_ms: ObserveMs) -> None:
        self._target, self._heads, self._observe_ms = target, heads, observe_ms
        self.max_depth = heads.num_heads

    @torch.inference_mode()
    def draft(self, turn: HeadTurn) -> HeadResult:
        """Runs a turn: one pass of all heads."""
        started = time.perf_counter()
        features = self._target.features
        assert features is not None
        drafts = [_Draft(item) for item in turn.items]
        growing = [draft for draft in drafts if draft.item.context is not None and draft.item.end > 1]
        if growing:
            # Of the token before the last: the target's own choice after it is committed.
            slots = np.concatenate(
                [draft.item.target_kv.slots(draft.item.end - 2, draft.item.end - 1) for draft in growing]
            )
            states = features.index_select(0, torch.from_numpy(slots).to(features.device))
            most = max(len(draft.item.records) for draft in growing)
            for logits in self._heads(states)[:most]:
                _extend(growing, logits)
        passes = [(len(growing), _ms_since(started))]
        self._observe_ms(passes[0][1])
        return HeadResult([draft.drafted() for draft in drafts], passes)


def _extend(drafts: Sequence[_Draft], logits: torch.Tensor) -> None:
    """Adds the likeliest token to each draft.  # float32 [at least len(drafts), vocab_size]"""
    if not drafts:
        return
    likeliest = None
    for row, draft in enumerate(drafts):
        if draft.is_over:
            continue
        if draft.item.sampling.decoding_mode is DecodingMode.GREEDY and _is_simple(draft):
            likeliest = likeliest or most_likely(logits[: len(drafts)], 1)  # of all rows in one call
            draft.add(likeliest[0][row][0], likeliest[1][row][0])
        else:
            _add_processed(draft, logits[row : row + 1])


def _is_simple(draft: _Draft) -> bool:
    context = draft.item.context
    assert context is not None
    return is_idle(draft.item.sampling, context)


def _add_processed(draft: _Draft, logits: torch.Tensor) -> None:
    """Adds the token that the target would take with these logits.  # [1, vocab_size]

    Under rejection sampling that is the likeliest one: a hint without a distribution is accepted with its probability.
    """
    item = draft.item
    assert item.context is not None
    context = replace(item.context, continuations=[draft.token_ids])
    try:
        processed = process(logits, item.sampling, context)
    except GrammarViolation:  # a limit of the grammar's parser
        draft.is_over = True
        return
    if processed.amax() == NEVER:
        draft.is_over = True
        return
    ((token_id,),), ((chance,),) = likely_choices(processed, item.sampling, item.seed, context.positions, 1)
    draft.add(token_id, chance)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
