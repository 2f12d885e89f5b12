"""Memory that a target leaves for its draft head: what the head takes once it is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.heads.loading import head_memory
from outrider.engine.kv.kv_plan import Budget, ModelMemory, plan_kv
from outrider.engine.options import EngineOptions
from tests.engine.heads.checkpoints import HIDDEN
from tests.engine.heads.engines import CASES, folders, head_engine, medusa

NEEDS = ModelMemory(
    weights=1000, weights_read=1000, kv_per_token=100, step=0, process=0, longest=10**6
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if "medusa" not in name])
def test_a_head_takes_what_was_left_for_it(name: str) -> None:
    """In float32: the features that the target keeps, and beside it the head's weights, keys, values and features."""
    head, target = folders(name)
    remote = head_memory(head, target, "float32", is_local=False)
    local = head_memory(head, target, "float32", is_local=True)
    engine = head_engine(name)
    assert remote.per_token == 4 * HIDDEN
    assert local.per_token == remote.per_token + engine.kv_bytes_per_token
    assert local.fixed - remote.fixed == 4 * engine.num_parameters


def test_medusa_heads_have_no_kv() -> None:
    name = next(name for name in CASES if "medusa" in name)
    local = head_memory(*folders(name), "float32", is_local=True)
    assert local.per_token == 4 * HIDDEN
    assert local.fixed == 4 * sum(parameter.numel() for parameter in medusa(name).parameters())


def test_kv_gets_what_the_head_leaves() -> None:
    options = EngineOptions(model=Path("m"), max_num_seqs=1000, max_model_len=64, block_size=16)
    budget = Budget(usable=10**6, free=10**6, words="")
    alone = plan_kv(NEEDS, budget, options, "cpu")
    beside = plan_kv(NEEDS, budget, replace(options, beside_bytes=200_000, beside_bytes_per_token=60), "cpu")
    assert alone.num_tokens == pytest.approx((10**6 - 1000) / 100, abs=32)
    assert beside.num_tokens == pytest.approx((800_000 - 1000) / 160, abs=32)
