"""Mask tokens on a real engine: their rows are what transformers computes, whatever shares the step."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived, DetachSession, Step
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from draft_worker.session import DraftSession
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.options import MASK_TOKEN_KEYS
from outrider.sampling_params import SamplingParams
from outrider.text.vocabulary_map import VocabularyMap
from tests import models
from tests.engine.sequences import text

GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
PENALIZED = replace(GREEDY, presence_penalty=0.7)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=300, ignore_eos=True)
COUPLED = replace(SAMPLED, seed=4)
MASK = 5


class Recorder:
    """An engine that keeps the logits of its last pass."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mask_token_id = engine, MASK
        self.logits = torch.empty(0)

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        self.logits = self.engine.forward(chunks)
        return self.logits

    def move_entries(self, *slots: Any) -> None:
        self.engine.move_entries(*slots)


def largest_error(step: Step, logits: torch.Tensor, reference: Any) -> tuple[float, int]:
    """The largest difference from transformers in the rows of a step's last nodes and masks, relative to the largest
    logit, and the number of rows."""
    end, worst, num_rows = 0, 0.0, 0
    for item in step.items:
        end += len(item.node_ids) + item.num_masks
        if not item.num_masks:
            continue
        tokens = [*item.context.token_ids, *item.context.continuations[-1], *[MASK] * item.num_masks]
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0, -1 - item.num_masks :]
        error = (logits[end - len(expected) : end] - expected).abs().max() / expected.abs().max()
        worst = max(worst, error.item())
        num_rows += len(expected)
    return worst, num_rows


def some_branch(session: DraftSession, rng: random.Random) -> list[int]:
    """Tokens to commit: along the tree, most often by primary children, and now and then something else."""
    tokens: list[int] = []
    node = session.cursor_node
    for _ in range(rng.randrange(5)):
        if not node.children:
            break
        node = session.nodes[node.children[0] if rng.random() < 0.8 else rng.choice(node.children)]
        tokens.append(node.hint.token_id)
    return [*tokens, rng.randrange(40)] if rng.random() < 0.4 else tokens


@pytest.mark.parametrize(
    "sampling", [GREEDY, PENALIZED, COUPLED, SAMPLED], ids=["greedy", "penalized", "coupled", "rejection"]
)
def test_rows_of_masks_are_those_of_transformers(sampling: SamplingParams) -> None:
    """After commits that roll guesses back, in steps with other sessions and alternatives."""
    recorder = Recorder(models.engine("llama"))
    engine: Any = recorder
    reference = models.random_model("llama")
    limits = DraftLimits(
        max_num_seqs=4, max_model_len=400, max_nodes=60, num_mask_tokens=3, min_reach=0.0, min_sampled_reach=0.0
    )
    allocator = BlockAllocator(recorder.engine.allocator.num_blocks, recorder.engine.allocator.block_size)
    scheduler = DraftScheduler(limits, allocator, recorder.engine.vocab_size, reads_masks=True)
    for index, name in enumerate("abc"):
        tokens = text(5 + 30 * index, index, recorder.engine.vocab_size)
        scheduler.handle(AttachSession(name, 1, "target:1", tokens, sampling, 7))
    rng, num_compared = random.Random(3), 0
    for _ in range(30):
        step = scheduler.next_step()
        if step is not None:
            expansions = run_step(engine, step)
            error, num_rows = largest_error(step, recorder.logits, reference)
            assert error < 1e-5
            num_compared += num_rows
            scheduler.finish_step(step, expansions)
        session = scheduler.progress(rng.choice("abc"))
        assert session is not None
        known_len = len(session.token_ids)
        scheduler.handle(CommitReceived(session.session_id, known_len, some_branch(session, rng), True, False))
    assert num_compared > 60
    for name in "abc":
        scheduler.handle(DetachSession(name, 1))
    allocator.check_integrity([])


def last_logits(engine: Engine, tokens: Sequence[int]) -> torch.Tensor:
    kv = engine.new_sequence()
    kv.extend(len(tokens))
    logits = engine.forward([SequenceChunk(kv, tokens, 1)])[0]
    kv.free()
    return logits


def with_key(directory: Path, key: str, value: object) -> Path:
    folder = models.copy_of("llama", directory)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    return folder


@pytest.mark.parametrize("key", MASK_TOKEN_KEYS)
def test_the_configuration_names_the_mask_token(key: str, tmp_path: Path) -> None:
    engine = models.load(models.engine_config(with_key(tmp_path / "model", key, MASK)))
    assert engine.enable_masks()
    assert engine.mask_token_id == MASK


def test_other_models_have_none() -> None:
    assert not models.engine("llama").enable_masks()


@pytest.mark.parametrize("token_id", [-1, models.VOCAB_SIZE, "7", [3]])
def test_a_mask_token_outside_the_vocabulary_is_refused_by_name(token_id: object, tmp_path: Path) -> None:
    engine = models.load(models.engine_config(with_key(tmp_path / "model", "pard_token", token_id)))
    with pytest.raises(ModelLoadError, match="pard_token"):
        engine.enable_masks()


def test_a_foreign_vocabulary_has_the_mask_token_behind_its_own(tmp_path: Path) -> None:
    """The target's ids of tokens, and an id that none of its tokens has."""
    engine = models.load(models.engine_config(with_key(tmp_path / "model", "pard_token", MASK)))
    engine.enable_masks()
    own = last_logits(engine, [9, 8, 7, MASK])
    own_ids = [7, 8, 9, 20]
    engine.set_vocabulary(VocabularyMap(own_ids, [True] * len(own_ids)), frozenset())
    assert engine.mask_token_id == engine.vocab_size == len(own_ids)
    assert torch.equal(last_logits(engine, [2, 1, 0, engine.mask_token_id]), own[own_ids])
