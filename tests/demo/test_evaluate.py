"""Walking a text counts steps, hints and acceptances as speculative decoding does."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo.evaluate import Texts, Walk, matches, walk


def bools(text: str) -> list[bool]:
    return [character == "1" for character in text]


def test_walk_counts_a_hand_made_text() -> None:
    # Blocks of 3: [1 1 0] accepts 2, then token 3 is next: [0 . .] accepts 0, [1 1 1] accepts 3 and takes
    # the token after them from the target.
    total = walk(bools("110" + "0" + "1110" + "000"), num_tokens=8, num_hints=3)
    assert total == Walk(num_steps=3, num_hints=9, num_accepted=5)
    assert total.acceptance_rate == pytest.approx(5 / 9)
    assert total.mean_acceptance_length == pytest.approx(1 + 5 / 3)


def test_perfect_draft_gains_every_hint() -> None:
    total = walk([True] * 17, num_tokens=12, num_hints=5)
    assert total == Walk(num_steps=2, num_hints=10, num_accepted=10)
    assert total.mean_acceptance_length == 6


def test_useless_draft_costs_one_step_per_token() -> None:
    assert walk([False] * 15, num_tokens=10, num_hints=5) == Walk(10, 50, 0)


def test_walk_refuses_a_text_without_room_for_its_last_block() -> None:
    with pytest.raises(ValueError, match="cannot be walked"):
        walk([True] * 12, num_tokens=10, num_hints=5)


def test_empty_walk_has_neutral_rates() -> None:
    assert (Walk().acceptance_rate, Walk().mean_acceptance_length) == (0.0, 1.0)


@torch.inference_mode()
def test_matches_equal_step_by_step_drafting() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        initializer_range=0.5,
    )
    draft = LlamaForCausalLM(config).eval()
    prompts = [[1, 2, 3, 4, 5], [6, 2]]
    answers = torch.randint(7, (2, 12))
    token_ids = torch.cat([torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]]), answers], dim=1)
    mask = torch.ones_like(token_ids)
    mask[1, :3] = 0
    matched = matches(draft, Texts(token_ids, mask, prompt_len=5))
    for row, prompt in enumerate(prompts):
        text = prompt + answers[row].tolist()
        for index in range(12):
            prefix = torch.tensor([text[: len(prompt) + index]])
            said = int(draft(prefix).logits[0, -1].argmax())
            assert bool(matched[row, index]) == (said == text[len(prompt) + index])
