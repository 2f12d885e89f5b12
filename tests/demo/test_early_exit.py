"""Training for early exit: the first layers learn to guess what all of them say, and these stay as they were."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from demo import teacher
from demo.distill import Library
from demo.early_exit.evaluate import first_layers
from demo.pretrain import Recipe
from tests import models
from tests.demo.test_training import tiny_model
from tests.engine.sequences import logits_of

training = importlib.import_module("demo.early_exit.__main__")


@torch.inference_mode()
def test_logits_after_the_first_layers_are_those_the_engine_gives(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    token_ids = torch.randint(3, 64, (1, 20))
    early, full = training.exit_logits(tiny_model(), token_ids, 1)
    assert not torch.allclose(early, full, atol=0.1)
    torch.testing.assert_close(full, tiny_model()(token_ids).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first_layers(tmp_path, 1, torch.float32)(token_ids).logits, early, atol=1e-5, rtol=1e-5)
    engine = models.load(models.engine_config(tmp_path, early_exit_layer=1, kv_cache_gib=0.01))
    scale = float(early.abs().max())
    torch.testing.assert_close(logits_of(engine, token_ids[0].tolist(), 20), early[0], atol=1e-5 * scale, rtol=1e-4)


def test_training_continues_and_teaches_the_first_layers_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(teacher, "ANSWER_LEN", 12)
    monkeypatch.setattr(teacher, "NUM_KEPT", 8)
    monkeypatch.setattr(training, "EXITS", (1,))
    paths = teacher.generate_lessons(
        tiny_model(), torch.randint(3, 64, (500,)), tmp_path / "lessons", num_batches=1, limit_s=60.0, rows=8
    )
    lesson, chosen, model = teacher.load_lessons(paths[0]), torch.arange(8), tiny_model()
    with torch.no_grad():
        early_before, full_before, num_tokens = training.exit_losses(model, lesson, chosen, 1)
    assert full_before.abs() < 0.01
    assert num_tokens == 8 * (lesson.token_ids.shape[1] - 1)
    for num_steps in (3, 40):
        recipe = Recipe("exit", num_steps=num_steps, limit_s=1e9, peak_rate=1e-3, warmup_steps=1, batch_tokens=500)
        training.train(model, Library(tmp_path / "lessons"), recipe, tmp_path / f"{num_steps}.pt")
    with torch.no_grad():
        early, full, _ = training.exit_losses(model, lesson, chosen, 1)
    assert early < early_before - 0.3
    assert full < 0.2
