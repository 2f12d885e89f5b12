"""Measures how often the first layers of a model agree with all of them.

    python -m demo.early_exit.evaluate [--models DIR ...] [--layers N ...]

Each model continues held-out prompts greedily, and its first layers guess, as the engine runs them with
`--early-exit-layer`. A guess is accepted if it and all before it are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from demo import corpus
from demo.early_exit.__main__ import EXITS, build_parser
from demo.evaluate import DEMO, draft_acceptance, greedy_texts, table_line
from demo.pretrain import held_out_loss
from demo.train import token_stream
from outrider.engine.loading.early_exit import exit_early

NUM_HINTS = 5


def first_layers(folder: Path, num_layers: int | None, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A model, cut down to its first layers where `num_layers` is given."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    exit_early(config, num_layers)
    return LlamaForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True).eval()


def main() -> None:
    """Print a table per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained: Path = build_parser().get_default("out")
    parser.add_argument("--models", type=Path, nargs="+", default=[DEMO / "target", trained])
    parser.add_argument("--layers", type=int, nargs="+", default=list(EXITS))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100, help="greedy tokens per prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()  # a report of the layers that are left out would hide the table
    prompts = corpus.held_out_prompts(options.prompts)
    for folder in options.models:
        whole = first_layers(folder, None)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        held_out = token_stream(PreTrainedTokenizerFast.from_pretrained(folder), corpus.held_out_files())
        print(f"{folder}: held-out loss {held_out_loss(whole, held_out):.3f}", flush=True)
        texts = greedy_texts(whole, tokenizer, prompts, options.tokens + NUM_HINTS)
        for num_layers in options.layers:
            guesses = draft_acceptance(first_layers(folder, num_layers), texts, NUM_HINTS)
            print(table_line(f"first {num_layers} layers", guesses), flush=True)


if __name__ == "__main__":
    main()
