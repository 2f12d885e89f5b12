"""I2 across tensor-parallel ranks: a row's sum over the ranks does not depend on how many rows are summed with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import start_processes

from outrider.engine.ranks.collectives import sum_over_ranks
from tests.engine import forks  # noqa: F401  # tells them what to import first

ROW_COUNTS = (2, 3, 8, 17, 64, 200)


def _rows_that_differ(total: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> list[int]:
    alone = torch.cat([total(rows[i : i + 1]) for i in range(16)])
    return [count for count in ROW_COUNTS if not torch.equal(total(rows[:count])[:16], alone[: min(count, 16)])]


def _all_reduce(part: torch.Tensor) -> torch.Tensor:
    total = part.clone()
    distributed.all_reduce(total)
    return total


def _rank(rank: int, num_ranks: int, meeting_point: str, dtype: torch.dtype, results: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # whatever the host is called
    distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=num_ranks)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(200, 96, generator=generator).to(dtype)
    found = {
        "ours": _rows_that_differ(sum_over_ranks, rows),
        "all-reduce": _rows_that_differ(_all_reduce, rows),
        "total": sum_over_ranks(rows),
    }
    torch.save(found, f"{results}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rows_sum_does_not_depend_on_its_company(tmp_path: Path, num_ranks: int, dtype: torch.dtype) -> None:
    arguments = (num_ranks, f"file://{tmp_path}/meeting-point", dtype, str(tmp_path))
    start_processes(_rank, arguments, nprocs=num_ranks, start_method="forkserver")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    assert [each["ours"] for each in found] == [[]] * num_ranks
    assert all(torch.equal(each["total"], found[0]["total"]) for each in found)
    parts = [torch.randn(200, 96, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(num_ranks)]
    exact = torch.stack(parts).double().sum(dim=0)
    torch.testing.assert_close(found[0]["total"].double(), exact, rtol=1e-2, atol=1e-2)
    if num_ranks > 2:
        assert found[0]["all-reduce"], "a plain all-reduce would do here"
