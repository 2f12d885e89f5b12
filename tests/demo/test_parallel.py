"""Training with mask tokens: what a row of a mask sees is what it sees when the draft is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo import parallel, teacher
from demo.distill import Library
from demo.evaluate import Texts
from demo.evaluate_parallel import offset_matches, table
from demo.parallel import MASK_TOKEN_ID, MAX_OFFSET, Rows, draw_rows, row_logits
from demo.pretrain import Recipe
from tests.demo.test_training import tiny_model


@torch.inference_mode()
def test_rows_are_those_of_single_sequences_with_masks_at_the_end() -> None:
    model, token_ids = tiny_model(), torch.randint(3, 64, (2, 20))
    rows = draw_rows(20, 7, seed=1)
    logits = row_logits(model, token_ids, rows)
    for index, (anchor, offset) in enumerate(zip(rows.anchors.tolist(), rows.offsets.tolist(), strict=True)):
        masks = torch.full((2, offset), MASK_TOKEN_ID)
        alone = model(torch.cat([token_ids[:, : anchor + 1], masks], dim=1)).logits[:, -1]
        torch.testing.assert_close(logits[:, index], alone, atol=1e-4, rtol=1e-4)


def test_a_row_is_kept_only_with_all_masks_before_it() -> None:
    rows = draw_rows(100, 30, seed=2)
    kept = set(zip(rows.anchors.tolist(), rows.offsets.tolist(), strict=True))
    assert {(anchor, 0) for anchor in range(100)} <= kept
    assert all((anchor, offset - 1) in kept for anchor, offset in kept if offset > 0)
    assert all(anchor >= 30 and anchor + offset < 100 for anchor, offset in kept if offset > 0)
    counts = [int((rows.offsets == offset).sum()) for offset in range(MAX_OFFSET + 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[1] > 0.5 * 70


def test_training_continues_and_lowers_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(teacher, "ANSWER_LEN", 12)
    monkeypatch.setattr(teacher, "NUM_KEPT", 8)
    tokens = torch.randint(3, 64, (500,))
    target = tiny_model()
    paths = teacher.generate_lessons(target, tokens, tmp_path / "lessons", num_batches=1, limit_s=60.0, rows=8)
    lesson, chosen = teacher.load_lessons(paths[0]), torch.arange(8)
    model = tiny_model()
    with torch.no_grad():
        before, _ = parallel.parallel_loss(model, lesson, chosen, 0.5, seed=0)
    for num_steps in (3, 12):
        recipe = Recipe("parallel", num_steps=num_steps, limit_s=1e9, peak_rate=3e-3, warmup_steps=1, batch_tokens=500)
        parallel.train(model, Library(tmp_path / "lessons"), recipe, tmp_path / f"{num_steps}.pt")
    with torch.no_grad():
        after, num_tokens = parallel.parallel_loss(model, lesson, chosen, 0.5, seed=0)
    assert num_tokens == 8 * (lesson.token_ids.shape[1] - 1)
    assert after < before


def test_the_evaluation_counts_what_the_rows_say() -> None:
    model = tiny_model()
    token_ids = torch.randint(3, 64, (1, 40))
    texts = Texts(token_ids, torch.ones_like(token_ids), prompt_len=10)
    matches = offset_matches(model, texts, num_rows=3)
    anchors = range(9, 37, 3)
    assert matches.shape == (len(anchors), 3)
    with torch.inference_mode():
        for index, anchor in enumerate(anchors):
            tokens = torch.cat([token_ids[:, : anchor + 1], torch.full((1, 2), MASK_TOKEN_ID)], dim=1)
            said = model(tokens).logits[0, -3:].argmax(-1)
            assert torch.equal(matches[index], said == token_ids[0, anchor + 1 : anchor + 4])
    assert len(table(matches).splitlines()) == 4


def test_a_mask_sees_its_token_and_the_masks_before_it() -> None:
    rows = Rows(torch.tensor([0, 1, 2, 1, 1]), torch.tensor([0, 0, 0, 1, 2]))
    assert rows.positions.tolist() == [0, 1, 2, 2, 3]
    assert rows.visible().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
