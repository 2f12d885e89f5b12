"""A thousand JSON texts from real workers, speculation on: every one is valid, and the grammar's own tokens are free.

Fifty schemas (`tests.schemas`), all three decoding modes, a trained pair and one with random weights, whose draft has
random weights of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from benchmarks.shared.worker_pair import Generation, WorkerPair, worker_pair
from outrider.sampling_params import (
    AcceptanceRule,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
    SpeculationSettings,
)
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import target_pb2
from tests import models
from tests.schemas.catalog import SCHEMAS
from tests.schemas.validity import check

DEMO = Path(__file__).parents[2] / "demo"
NUM_PER_SCHEMA = 10  # of each pair: 2 * 50 * 10 texts
AT_ONCE = 12
MAX_TOKENS = 440
PAIRS = ["demo", "random"]


def pair_dirs(name: str) -> tuple[Path, Path]:
    if name == "demo":
        return DEMO / "target", DEMO / "draft"
    return models.model_dir("llama", 0), models.model_dir("llama", 1)


def sampling(index: int, schema: object) -> SamplingParams:
    """Each mode in turn, at temperatures from mild to wild."""
    mode = ("greedy", "rejection", "coupled")[index % 3]
    return SamplingParams(
        temperature=0.0 if mode == "greedy" else (0.7, 1.0, 1.6)[index // 3 % 3],
        seed=index if mode == "coupled" else None,
        max_tokens=MAX_TOKENS,
        grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    )


async def generate_all(pair: WorkerPair, tokenizer: Tokenizer) -> list[tuple[str, Generation]]:
    """`NUM_PER_SCHEMA` texts of every schema, `AT_ONCE` at a time."""
    wanted = iter(list(itertools.product(SCHEMAS, range(NUM_PER_SCHEMA))))
    results: list[tuple[str, Generation]] = []

    async def work() -> None:
        for name, index in wanted:
            rule = AcceptanceRule.BLOCK if index % 2 else AcceptanceRule.TOKEN
            prompt = tokenizer.encode(f"# {name}, number {index}\nanswer = ")
            generation = await pair.generate(
                prompt, sampling(index, SCHEMAS[name]), speculation=SpeculationSettings(acceptance_rule=rule)
            )
            results.append((name, generation))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["demo", pytest.param("random", marks=pytest.mark.thorough)])
async def test_every_text_is_valid_json_of_its_schema(name: str) -> None:
    target_dir, draft_dir = pair_dirs(name)
    tokenizer = Tokenizer(target_dir)
    async with worker_pair(target_dir, draft_dir) as pair:
        results = await generate_all(pair, tokenizer)
    assert len(results) == len(SCHEMAS) * NUM_PER_SCHEMA
    for schema_name, generation in results:
        text = tokenizer.decode(generation.token_ids, skip_special_tokens=False)
        assert generation.finished.reason == target_pb2.FINISH_REASON_STOP, (schema_name, text)
        check(text, SCHEMAS[schema_name])
    stats = [generation.finished.stats for _, generation in results]
    num_tokens = sum(len(generation.token_ids) for _, generation in results)
    assert sum(each.num_accepted_draft_tokens for each in stats) > 0, "no hint of the draft was accepted"
    assert sum(each.num_forced_tokens for each in stats) > num_tokens / 20
    assert sum(each.num_steps for each in stats) < 0.9 * num_tokens
