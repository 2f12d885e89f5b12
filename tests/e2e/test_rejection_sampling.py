"""I2 for sampling: through real workers, the output *distribution* is the target's, by rejection sampling and by
coupled decoding over random seeds.

Error rate: each chi-square test fails by chance once in 10,000 runs (p < 1e-4); there are two of each decoding mode.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from benchmarks.shared.worker_pair import WorkerPair, worker_pair
from outrider.sampling_params import DecodingMode, SamplingParams
from tests.models import write_tokenizer

VOCAB_SIZE = 5
NUM_TOKENS = 5
NUM_SAMPLES = 8_000
AT_ONCE = 8
PROMPT = [1, 4, 2, 3]


def write_model(directory: Path, seed: int) -> Any:
    """A tiny Llama over five tokens, float32, saved where a worker can load it."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


@torch.inference_mode()
def exact_probabilities(model: Any) -> dict[tuple[int, ...], float]:
    """The target's own probability of every continuation of NUM_TOKENS tokens."""
    continuations = list(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS))
    token_ids = torch.tensor([[*PROMPT, *continuation] for continuation in continuations])
    log_probs = torch.log_softmax(model(token_ids).logits.double(), dim=-1)[:, len(PROMPT) - 1 : -1]
    chosen = log_probs.gather(2, token_ids[:, len(PROMPT) :, None]).sum(dim=(1, 2))
    return dict(zip(continuations, chosen.exp().tolist(), strict=True))


async def draw(
    pair: WorkerPair, num_samples: int, mode: DecodingMode
) -> tuple[collections.Counter[tuple[int, ...]], int, int]:
    """Continuations by how often they came, and how many hints were accepted and rejected for them."""
    chance = random.Random(1)
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    drafted = accepted = 0

    async def draw_some(num: int) -> None:
        nonlocal drafted, accepted
        for _ in range(num):
            seed = chance.getrandbits(53) if mode is DecodingMode.COUPLED else None
            params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
            result = await pair.generate(PROMPT, params, attach_first=True)
            counts[tuple(result.token_ids)] += 1
            drafted += result.finished.stats.num_draft_tokens
            accepted += result.finished.stats.num_accepted_draft_tokens

    await asyncio.gather(*(draw_some(num_samples // AT_ONCE) for _ in range(AT_ONCE)))
    return counts, accepted, drafted - accepted


def chi_square_p(counts: collections.Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of the counts under the expected distribution; rare outcomes are pooled until 10 are expected."""
    total = sum(counts.values())
    observed_bins, expected_bins = [0.0], [0.0]
    for outcome, probability in sorted(expected.items(), key=lambda item: item[1]):
        if expected_bins[-1] >= 10:
            observed_bins.append(0.0)
            expected_bins.append(0.0)
        observed_bins[-1] += counts[outcome]
        expected_bins[-1] += probability * total
    scale = total / sum(expected_bins)
    return float(stats.chisquare(observed_bins, [value * scale for value in expected_bins]).pvalue)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", [DecodingMode.REJECTION, DecodingMode.COUPLED])
async def test_samples_follow_the_target_whatever_the_draft_says(tmp_path: Path, mode: DecodingMode) -> None:
    model = write_model(tmp_path / "target", seed=1)
    write_model(tmp_path / "draft", seed=2)
    expected = exact_probabilities(model)
    arguments = ["--dtype", "float32"]
    waits = ["--wait-for-num-hints", "2", "--hint-wait-ms", "50", "--always-listen"]
    async with worker_pair(
        tmp_path / "target",
        tmp_path / "draft",
        target_arguments=[*arguments, *waits],
        draft_arguments=arguments,
    ) as pair:
        counts, num_accepted, num_rejected = await draw(pair, NUM_SAMPLES, mode)
    assert sum(counts.values()) == NUM_SAMPLES
    assert num_accepted > NUM_SAMPLES / 4
    assert num_rejected > NUM_SAMPLES / 20
    assert chi_square_p(counts, expected) > 1e-4
    wrong = exact_probabilities(sharpened(model))
    assert chi_square_p(counts, wrong) < 1e-4, "the test would not notice another distribution"


def sharpened(model: Any) -> Any:
    """The same model with somewhat sharper logits: what a bias would look like."""
    sharper = type(model)(model.config).eval()
    sharper.load_state_dict(model.state_dict())
    with torch.no_grad():
        sharper.lm_head.weight.mul_(1.3)
    return sharper
