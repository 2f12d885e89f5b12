"""The parts of training that a mistake would silently spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo import checkpoints, teacher, vocabulary
from demo.distill import alignment_loss, batches
from demo.optimizer import Budget, MasterAdamW, learning_rate
from demo.pretrain import Recipe, Stage, pretrain


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "ANSWER_LEN", 12)
    monkeypatch.setattr(teacher, "NUM_KEPT", 8)


@pytest.mark.usefixtures("short_answers")
def test_lessons_hold_what_the_target_says_and_thinks() -> None:
    model = tiny_model()
    prompts = torch.randint(64, (3, 9))
    lessons = teacher.write_lessons(model, prompts, temperature=0.0, seed=0)
    token_ids = lessons.token_ids.long()
    assert token_ids.shape == (3, 21)
    assert torch.equal(token_ids[:, :9], prompts)
    with torch.inference_mode():
        logprobs = model(token_ids[:, :-1]).logits.log_softmax(-1)
    assert torch.equal(token_ids[:, 9:], logprobs.argmax(-1)[:, 8:])
    expected, ids = logprobs.topk(8, dim=-1)
    assert (lessons.kept_ids.long() == ids).float().mean() > 0.99
    torch.testing.assert_close(lessons.kept_logprobs.float(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.usefixtures("short_answers")
def test_interrupted_lessons_are_continued(tmp_path: Path) -> None:
    model, tokens = tiny_model(), torch.randint(64, (1000,))
    first = teacher.generate_lessons(model, tokens, tmp_path, num_batches=1, limit_s=60.0, rows=2)
    written = first[0].stat().st_mtime_ns
    both = teacher.generate_lessons(model, tokens, tmp_path, num_batches=2, limit_s=60.0, rows=2)
    assert len(both) == 2
    assert both[0].stat().st_mtime_ns == written
    lessons = [teacher.load_lessons(path) for path in both]
    seen = [(id(lesson), row) for lesson, rows in batches(lessons, 64, epoch=0) for row in rows.tolist()]
    assert len(seen) == len(set(seen)) == 4


def test_alignment_loss_is_the_divergence_when_everything_is_kept() -> None:
    draft, target = torch.randn(5, 16), torch.randn(5, 16)
    logprobs, ids = target.log_softmax(-1).sort(descending=True)
    loss = alignment_loss(draft, ids, logprobs, torch.ones(5), argmax_share=0.0)
    expected = torch.nn.functional.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-3)
    same = alignment_loss(target, ids, logprobs, torch.ones(5), argmax_share=0.0)
    assert abs(same.item()) < 1e-3


def test_masters_keep_updates_that_bfloat16_would_lose() -> None:
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model, weight_decay=0.0)
    for _ in range(20):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(1e-3)
    assert model.weight.item() == pytest.approx(0.98, abs=4e-3)


def test_stage_resumes_where_it_was_saved(tmp_path: Path) -> None:
    recipe = Recipe("test", num_steps=4, limit_s=60.0, peak_rate=1e-3, batch_tokens=64, short_len=16, long_len=32)
    tokens = torch.randint(64, (500,))
    trained = pretrain(tiny_model(), tokens, recipe, tmp_path / "stage.pt")
    again = Stage(tiny_model(), recipe, tmp_path / "stage.pt")
    assert again.is_done
    assert again.budget.step == 4
    for old, new in zip(trained.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_rate_warms_up_and_ends_small_whatever_ends_the_stage() -> None:
    assert learning_rate(1.0, step=0, warmup_steps=10, progress=0.0) == pytest.approx(0.1)
    assert learning_rate(1.0, step=50, warmup_steps=10, progress=0.5) == pytest.approx(0.51)
    assert learning_rate(1.0, step=99, warmup_steps=10, progress=1.0) == pytest.approx(0.02)
    assert Budget(num_steps=1000, limit_s=1.0, step=1, spent_s=2.0).progress() == 1.0


def test_publishing_replaces_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    tokenizer = vocabulary.train_tokenizer(["def f(x):\n    return x\n" * 10])
    for seed in (0, 1):
        model = checkpoints.new_model(checkpoints.draft_config(), seed)
        checkpoints.publish(model, tokenizer, tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight, atol=1e-3, rtol=1e-2)
