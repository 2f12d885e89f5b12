"""Train the demo pair from the standard library's sources: tokenizer, target, draft, distillation.

    python -m demo.train --work DIR

Every stage leaves its result in the work folder and continues from there when run again. Nothing is downloaded. Where
cores are shared, small models train best in processes of one thread, so the target can generate its lessons in a
second process (`--lessons-only --threads 1`) while the first one distils those there are (`--lesson-minutes 0
--threads 1`). README.md lists the settings of the shipped pair.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo import checkpoints, corpus, vocabulary
from demo.distill import Library, distill
from demo.pretrain import Recipe, held_out_loss, pretrain
from demo.teacher import generate_lessons

DEMO = Path(__file__).parent
TARGET_RECIPE = Recipe("target", num_steps=1300, limit_s=1500.0, peak_rate=2e-3)
DRAFT_RECIPE = Recipe("draft", num_steps=600, limit_s=150.0, peak_rate=3e-3)
DISTILL_RECIPE = Recipe(
    "distill", num_steps=8000, limit_s=480.0, peak_rate=1.8e-3, batch_tokens=2048, weight_decay=0.02
)
LESSON_BATCHES_PER_ROUND = 80
LESSON_ROWS = 128
MAX_LESSON_FILES = 400
# Most of the loss is for the target's first choice, which greedy acceptance depends on.
ARGMAX_SHARE = 0.6


def tokenizer_stage(work: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, trained once."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = [file.text for file in corpus.training_files()]
        vocabulary.save_tokenizer(vocabulary.train_tokenizer(texts), folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def token_stream(tokenizer: PreTrainedTokenizerFast, files: list[corpus.SourceFile]) -> torch.Tensor:
    """All files in a fixed shuffled order, each between bos and eos: int64 [num_tokens]."""
    texts = [vocabulary.BOS_TOKEN + file.text + vocabulary.EOS_TOKEN for file in files]
    random.Random(0).shuffle(texts)
    return torch.tensor([token_id for ids in tokenizer(texts, verbose=False).input_ids for token_id in ids])


def target_stage(
    work: Path, train_tokens: torch.Tensor, held_out: torch.Tensor, device: str, recipe: Recipe
) -> LlamaForCausalLM:
    """The target, trained on the corpus."""
    model = checkpoints.new_model(checkpoints.target_config(), seed=1).to(device, torch.bfloat16)
    pretrain(model, train_tokens, recipe, work / "target.pt")
    print(f"target: held-out loss {held_out_loss(model, held_out):.3f}", flush=True)
    return model


def draft_stage(
    work: Path,
    train_tokens: torch.Tensor,
    held_out: torch.Tensor,
    target: LlamaForCausalLM,
    recipe: Recipe,
) -> LlamaForCausalLM:
    """The draft before distillation: the target's embeddings in fewer dimensions, then the corpus."""
    model = checkpoints.new_model(checkpoints.draft_config(), seed=2)
    checkpoints.project_embeddings(target, model)
    model = model.to(target.device, torch.bfloat16)
    pretrain(model, train_tokens, recipe, work / "draft.pt")
    print(f"draft: held-out loss {held_out_loss(model, held_out):.3f}", flush=True)
    return model


def write_round(options: argparse.Namespace, target: LlamaForCausalLM, tokens: torch.Tensor, number: int) -> None:
    """Lets the target generate the lessons of this round, and those that earlier rounds had no time for."""
    generate_lessons(
        target,
        tokens,
        options.work / "lessons",
        num_batches=LESSON_BATCHES_PER_ROUND * (number + 1),
        limit_s=60 * options.lesson_minutes,
        rows=LESSON_ROWS,
    )


def write_lessons(target: LlamaForCausalLM, model_dir: Path, folder: Path, minutes: float) -> None:
    """Lets the target write lessons on the training files, for so many minutes; none where it is 0.

    model_dir: of the target's tokenizer.
    """
    if minutes > 0:
        generate_lessons(
            target,
            token_stream(PreTrainedTokenizerFast.from_pretrained(model_dir), corpus.training_files()),
            folder,
            num_batches=MAX_LESSON_FILES,
            limit_s=60 * minutes,
            rows=LESSON_ROWS,
        )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "outrider-demo")
    parser.add_argument("--out", type=Path, default=DEMO, help="where the folders target and draft are written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of lessons and distillation")
    parser.add_argument("--target-minutes", type=float, default=25.0)
    parser.add_argument("--draft-minutes", type=float, default=2.5)
    parser.add_argument("--lesson-minutes", type=float, default=7.0, help="per round")
    parser.add_argument("--lessons-only", action="store_true", help="only write lessons, while another process distils")
    parser.add_argument("--distill-minutes", type=float, default=8.0, help="per round")
    return parser


def main() -> None:
    """Run the stages in order; the target is published when it is done, the draft after every round."""
    options = build_parser().parse_args()
    torch.set_num_threads(options.threads)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_stage(work)
    train_tokens = token_stream(tokenizer, corpus.training_files())
    held_out = token_stream(tokenizer, corpus.held_out_files())
    print(f"corpus: {len(train_tokens)} training tokens, {len(held_out)} held out", flush=True)
    names = "".join(f"{file.name}\n" for file in corpus.held_out_files())
    (options.out / "held_out.txt").write_text(names)

    recipe = replace(TARGET_RECIPE, limit_s=60 * options.target_minutes)
    target = target_stage(work, train_tokens, held_out, options.device, recipe)
    if options.lessons_only:
        write_round(options, target, train_tokens, options.rounds)
        return
    checkpoints.publish(target, tokenizer, options.out / "target")
    recipe = replace(DRAFT_RECIPE, limit_s=60 * options.draft_minutes)
    draft = draft_stage(work, train_tokens, held_out, target, recipe)
    if not (options.out / "draft" / "model.safetensors").exists():
        checkpoints.publish(draft, tokenizer, options.out / "draft")
    library = Library(work / "lessons")
    for number in range(options.rounds):
        write_round(options, target, train_tokens, number)
        recipe = replace(DISTILL_RECIPE, name=f"distill {number}", limit_s=60 * options.distill_minutes)
        distill(draft, library, recipe, work / f"distill-{number}.pt", argmax_share=ARGMAX_SHARE)
        checkpoints.publish(draft, tokenizer, options.out / "draft")
        print(f"draft: held-out loss {held_out_loss(draft, held_out):.3f}, published", flush=True)


if __name__ == "__main__":
    main()
