"""An EAGLE-3 head is trained as the engine runs it, and its twin for the grown target guesses the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from demo import checkpoints, teacher
from demo.distill import Library
from demo.eagle3 import evaluate
from demo.eagle3 import grow as grow_eagle3
from demo.eagle3.grow import grow_head
from demo.eagle3.head import Head, hidden_states, logits_of, unroll
from demo.evaluate import Texts, draft_acceptance, table_line
from demo.grow import GrowthError, Shape, grow
from demo.pretrain import Recipe
from demo.train import DEMO
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import feature_shape, load_head, load_projection
from tests import models
from tests.demo.test_training import tiny_model
from tests.engine.heads.engines import run, start, without_probes

training = importlib.import_module("demo.eagle3.__main__")
HEAD = DEMO / "eagle3_head"
LAYER_IDS = (0, 1)
LENGTH = 14
MAX_BYTES = 8_000_000
shipped = pytest.mark.skipif(not (HEAD / "model.safetensors").exists(), reason="no trained head here")


def tiny_target(folder: Path) -> LlamaForCausalLM:
    tiny_model().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tiny_head(target: LlamaForCausalLM) -> Head:
    torch.manual_seed(4)
    head = Head(target.config, LAYER_IDS)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
            weight.copy_(weight.bfloat16())
    return head.eval()


def engine_of(folder: Path, target_dir: Path) -> HeadEngine:
    with without_probes():
        return load_head(models.engine_config(folder, kv_cache_gib=0.01), target_dir)


@torch.inference_mode()
def assert_engine_gives_the_same(folder: Path, target_dir: Path, head: Head, target: LlamaForCausalLM) -> None:
    """Compares the rows with the target's features, and each chain, with the engine's."""
    token_ids = torch.randint(3, target.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
    hidden = hidden_states(target, token_ids[None], head.layer_ids)
    with without_probes():
        projection = load_projection(folder, target_dir, torch.float32)
    features = projection.project(hidden[0])
    num_depths = 5
    chains = [torch.arange(1, LENGTH - depth) for depth in range(1, num_depths)]
    depths = unroll(head, target, token_ids[None], hidden, chains)
    logits = [logits_of(head, target, each.states)[0] for each in depths]
    engine = engine_of(folder, target_dir)
    scale = float(logits[0].abs().max())
    for base in range(1, LENGTH - num_depths):
        # Features of the tokens before the base have arrived, those of the base and of all behind it have not.
        kv, found = start(engine, token_ids[: base + num_depths].tolist(), features[:base])
        torch.testing.assert_close(found[1 : base + 1], logits[0][:base], atol=1e-5 * scale, rtol=1e-4)
        for depth in range(1, num_depths):
            expected = logits[depth][base - 1]
            # A row takes the output of the one before it, and with it a multiple of its rounding.
            torch.testing.assert_close(found[base + depth], expected, atol=1e-4 * scale, rtol=1e-3)
        kv.free()


def test_the_engine_runs_what_training_ran(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    head = tiny_head(target)
    training.publish(head, tmp_path / "head")
    assert_engine_gives_the_same(tmp_path / "head", tmp_path / "target", head, target)


@shipped
def test_the_engine_runs_the_shipped_head_as_training_did() -> None:
    target = LlamaForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    assert_engine_gives_the_same(HEAD, DEMO / "target", evaluate.load(HEAD, target), target)


@shipped
def test_the_shipped_head_is_small_and_shares_what_its_target_has() -> None:
    assert {path.name for path in HEAD.iterdir()} == {"config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in HEAD.iterdir()) <= MAX_BYTES
    tensors = load_file(HEAD / "model.safetensors")
    assert all(each.dtype == torch.bfloat16 and each.isfinite().all() for each in tensors.values())
    assert not [name for name in tensors if "embed_tokens" in name or "lm_head" in name]
    config = json.loads((HEAD / "config.json").read_text())
    head = evaluate.load(HEAD, target_shape())
    assert config == training.published_config(head)


def target_shape() -> LlamaForCausalLM:
    """The demo target's shape without its weights."""
    return LlamaForCausalLM(checkpoints.target_config()).eval()


@torch.inference_mode()
def test_the_head_reads_the_states_that_enter_the_layers() -> None:
    target, token_ids = tiny_model(), torch.randint(64, (2, 9))
    expected = target.model(token_ids, output_hidden_states=True).hidden_states
    found = hidden_states(target, token_ids, (0, 1))
    torch.testing.assert_close(found, torch.cat(expected[:2], dim=-1))


def test_a_depth_keeps_chains_of_the_depth_before_it() -> None:
    chains = training.draw_chains(100, 30, seed=2)
    assert len(chains) == training.MAX_DEPTH
    for depth, bases in enumerate(chains, start=1):
        assert bases.tolist() == sorted(set(bases.tolist()))
        assert int(bases.min()) >= 30
        assert int(bases.max()) + depth < 100
        assert depth == 1 or set(bases.tolist()) <= set(chains[depth - 2].tolist())
    assert len(chains[0]) > 0.4 * 70


def test_rows_of_few_chains_are_those_of_all_chains() -> None:
    """Chains that a step leaves out change nothing of those that it runs."""
    target = tiny_model()
    head = tiny_head(target)
    token_ids = torch.randint(3, 64, (2, 30))
    hidden = hidden_states(target, token_ids, head.layer_ids)
    some = training.draw_chains(30, 5, seed=1)[:4]
    every = [torch.arange(1, 30 - depth) for depth in range(1, 5)]
    with torch.inference_mode():
        few, all_rows = (unroll(head, target, token_ids, hidden, chains) for chains in (some, every))
    for depth, (one, other) in enumerate(zip(few, all_rows, strict=True)):
        # The rows of all chains are in order, and the first stands at position 1 + depth.
        matching = other.states[:, one.positions - 1 - depth]
        torch.testing.assert_close(one.states, matching, atol=1e-4, rtol=1e-4)


def test_training_continues_and_lowers_the_loss_at_every_depth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(teacher, "ANSWER_LEN", 24)
    monkeypatch.setattr(teacher, "NUM_KEPT", 8)
    target = tiny_model()
    tokens = torch.randint(3, 64, (500,))
    paths = teacher.generate_lessons(target, tokens, tmp_path / "lessons", num_batches=1, limit_s=60.0, rows=8)
    lesson, chosen = teacher.load_lessons(paths[0]), torch.arange(8)
    token_ids = lesson.token_ids[:, :-1].long()
    hidden = hidden_states(target, token_ids, LAYER_IDS)
    chains = [torch.arange(lesson.prompt_len - 1, token_ids.shape[1] - depth) for depth in range(1, 7)]

    def first_choices(head: Head) -> list[float]:
        """How likely the head holds the target's first choice, in nats, by depth."""
        with torch.no_grad():
            found = []
            for each in unroll(head, target, token_ids, hidden, chains):
                logprobs = logits_of(head, target, each.states).log_softmax(-1)
                best = lesson.kept_ids[:, each.positions, :1].long()
                found.append(float(logprobs.gather(-1, best).mean()))
        return found

    torch.manual_seed(0)
    head = Head(target.config, LAYER_IDS)
    before, before_loss = first_choices(head), training.unrolled_loss(head, target, lesson, chosen, 0.5, seed=0)
    weights = {name: each.clone() for name, each in target.state_dict().items()}
    for num_steps in (3, 40):
        recipe = Recipe("eagle3", num_steps=num_steps, limit_s=1e9, peak_rate=3e-3, warmup_steps=1, batch_tokens=500)
        training.train(head, target, Library(tmp_path / "lessons"), recipe, tmp_path / f"{num_steps}.pt")
    after, (loss, num_tokens) = first_choices(head), training.unrolled_loss(head, target, lesson, chosen, 0.5, seed=0)
    assert num_tokens == token_ids.numel()
    assert loss < before_loss[0]
    assert all(new > old for new, old in zip(after, before, strict=True))
    assert all(torch.equal(each, weights[name]) for name, each in target.state_dict().items())


def guess_at(head: Head, target: LlamaForCausalLM, token_ids: torch.Tensor, depth: int) -> torch.Tensor:
    """The guess of the last token's row at a depth.  # int64 [1]"""
    last = len(token_ids) - 1
    hidden = hidden_states(target, token_ids[None], head.layer_ids)
    depths = unroll(head, target, token_ids[None], hidden, [torch.tensor([last - depth])] * depth)
    return logits_of(head, target, depths[-1].states)[0, -1:].argmax(-1)


@torch.inference_mode()
def test_the_evaluation_counts_what_the_engine_guesses(tmp_path: Path) -> None:
    """Behind a committed prefix the engine drafts, and each guess is right or wrong as the evaluation says."""
    target = tiny_target(tmp_path / "target")
    head = tiny_head(target)
    training.publish(head, tmp_path / "head")
    num_hints = 3
    token_ids = torch.randint(3, 64, (6,))
    for delay in (0, 2):  # a sequence of which chains of either delay guess some blocks
        for depth in (*range(delay, delay + num_hints), *range(delay, delay + num_hints)):
            token_ids = torch.cat([token_ids, guess_at(head, target, token_ids, depth)])
    right = evaluate.depth_matches(head, target, token_ids, 2 + num_hints)
    with without_probes():
        projection = load_projection(tmp_path / "head", tmp_path / "target", torch.float32)
    features = projection.project(hidden_states(target, token_ids[None], LAYER_IDS)[0])
    engine = engine_of(tmp_path / "head", tmp_path / "target")
    anchors = torch.arange(4, len(token_ids) - num_hints)
    for delay in (0, 2):
        found = evaluate.accepted(right, anchors, delay, num_hints)
        assert found.all(dim=1).sum() >= 2
        for anchor, expected in zip(anchors.tolist(), found.tolist(), strict=True):
            # The target's feature of the last committed token never is there; with a delay, others are missing too.
            kv, logits = start(engine, token_ids[: anchor + 1].tolist(), features[: anchor - delay])
            guesses = [int(logits[-1].argmax())]
            while len(guesses) < num_hints:
                guesses.append(int(run(engine, kv, guesses[-1:])[0].argmax()))
            kv.free()
            followers = token_ids[anchor + 1 : anchor + 1 + num_hints].tolist()
            num_right = next((i for i in range(num_hints) if guesses[i] != followers[i]), num_hints)
            assert expected == [number < num_right for number in range(num_hints)]


def test_a_draft_model_is_judged_behind_the_same_prefixes() -> None:
    draft = tiny_model()
    token_ids = draft.generate(torch.randint(3, 64, (1, 6)), max_new_tokens=9, do_sample=False, eos_token_id=None)
    token_ids[0, 10] = (token_ids[0, 10] + 1) % 64
    texts = Texts(token_ids, torch.ones_like(token_ids), prompt_len=6)
    found = draft_acceptance(draft, texts, num_hints=3)
    assert found.shape == (len(evaluate.anchors_of(texts, 0, 3)[1]), 3)
    # Tokens 6 to 9 are the draft's own, token 10 is not.
    assert found[:5].int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert table_line("draft", found[:5], found[:5]) == "| draft | 80.0% | 60.0% | 40.0% | 1.80 | 100.0% |"


TINY_GROWN = Shape(hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=2, intermediate_size=96)


def grown_pair(head_dir: Path, target_dir: Path, out: Path, shape: Shape) -> tuple[Path, Path]:
    return (
        grow_head(head_dir, out / "head", shape, dtype=torch.float32),
        grow(target_dir, out / "target", shape, dtype=torch.float32),
    )


@torch.inference_mode()
def guessed_logits(head_dir: Path, target_dir: Path, token_ids: list[int], num_given: int) -> torch.Tensor:
    """Logits of all rows; the features of all tokens from `num_given` on are the head's own."""
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    states = hidden_states(target, torch.tensor([token_ids]), feature_shape(head_dir, target_dir).layer_ids)
    with without_probes():
        features = load_projection(head_dir, target_dir, torch.float32).project(states[0])
    engine = engine_of(head_dir, target_dir)
    kv, logits = start(engine, token_ids, features[:num_given])
    kv.free()
    return logits[1:]


def assert_twins(head_dir: Path, target_dir: Path, out: Path, shape: Shape, vocab_size: int) -> None:
    grown_head, grown_target = grown_pair(head_dir, target_dir, out, shape)
    token_ids = torch.randint(3, vocab_size, (24,), generator=torch.Generator().manual_seed(6)).tolist()
    small = guessed_logits(head_dir, target_dir, token_ids, 20)
    large = guessed_logits(grown_head, grown_target, token_ids, 20)
    assert small.std() > 0.3, "flat guesses would agree with anything"
    assert torch.equal(small.argmax(-1), large.argmax(-1))
    torch.testing.assert_close(large, small, atol=1e-4, rtol=1e-4)


def test_a_grown_head_guesses_beside_the_grown_target_as_the_small_one(tmp_path: Path) -> None:
    training.publish(tiny_head(tiny_target(tmp_path / "target")), tmp_path / "head")
    assert_twins(tmp_path / "head", tmp_path / "target", tmp_path / "grown", TINY_GROWN, 64)
    assert feature_shape(tmp_path / "grown/head", tmp_path / "grown/target").layer_ids == LAYER_IDS


@shipped
def test_the_shipped_head_grows_with_its_target(tmp_path: Path) -> None:
    shape = Shape(1536, 9, 24, 4, 1280)  # as large as the default but for what only takes time
    assert_twins(HEAD, DEMO / "target", tmp_path, shape, 4096)


def test_growth_keeps_the_bits_of_the_small_head(tmp_path: Path) -> None:
    """Stored in bfloat16 are exactly the small head's weights, or these times a power of two."""
    training.publish(tiny_head(tiny_target(tmp_path / "target")), tmp_path / "head")
    grow_head(tmp_path / "head", tmp_path / "grown", TINY_GROWN)
    small, large = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "grown"))
    assert all(each.dtype == torch.bfloat16 for each in large.values())
    assert torch.equal(large["norm.weight"][:64].float() * 2, small["norm.weight"].float())
    assert torch.equal(large["fc.weight"][:64, 256:320], small["fc.weight"][:, 64:128])
    assert (large["fc.weight"][64:] == 0).all()
    assert torch.equal(large["midlayer.self_attn.k_proj.weight"][:32, 256:320],
                       small["midlayer.self_attn.k_proj.weight"][:32, 64:])  # fmt: skip


def test_heads_that_cannot_be_grown_are_refused(tmp_path: Path) -> None:
    training.publish(tiny_head(tiny_target(tmp_path / "target")), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    with pytest.raises(GrowthError, match="hidden_size must be at least 64"):
        grow_head(tmp_path / "head", tmp_path / "out", Shape(32, 4, 8, 2, 96))
    path.write_text(json.dumps({name: each for name, each in config.items() if name != grow_eagle3.IDS}))
    with pytest.raises(GrowthError, match="names no eagle_aux_hidden_state_layer_ids"):
        grow_head(tmp_path / "head", tmp_path / "out", TINY_GROWN)
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(64, 64)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(GrowthError, match=r"has lm_head\.weight, which cannot be grown"):
        grow_head(tmp_path / "head", tmp_path / "out", TINY_GROWN)
    assert not (tmp_path / "out").exists()
