"""The ranks of a tensor-parallel group: rank 0 decides, the others repeat its calls.

Every rank holds its shard of the weights (`shards`) and of every sequence's KV, and all of them do the same in the same
order. Rank 0 alone schedules, serves and samples. Before each operation on its engine it broadcasts a message of a few
KiB to the others; nothing comes back but what the forward pass itself sums and gathers.

A rank that dies closes its connections, and the next operation with it fails. One that hangs is detected because no
message may take longer than `timeout_s`; while idle, rank 0 says so (`IDLE`). Ranks load at their own pace: before the
first operation with that bound, and before the first message, they `meet`. A rank that detects either ends: a group
is whole or gone, and what started it (torchrun) ends the others and may start all of them again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from outrider.engine.ranks.collectives import sum_over_ranks
from outrider.errors import ConfigurationError

LOADING_S: Final = 4 * 3600.0
"""Most time by which one rank may begin, or finish loading, before another: one may read from a slow disk for hours."""
_FIRST_NUMBERS: Final = 2048  # of a message's first broadcast; a longer one takes a second
_HEADER: Final = 2


class RankMessage(IntEnum):
    """The kinds of messages that rank 0 sends, and every rank's engine carries out."""

    FORWARD = 1
    MOVE_ENTRIES = 2
    IDLE = 3
    STOP = 4


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A tensor-parallel group, seen from one of its ranks."""

    rank: int
    size: int
    tensors: distributed.ProcessGroup  # for tensors on the device
    messages: distributed.ProcessGroup  # on CPUs

    def meet(self) -> None:
        """Waits until all ranks are here, as long as loading may take. Raises RuntimeError when one of them is gone."""
        distributed.all_reduce(torch.zeros(1))  # on CPUs, in the group of all, whose bound is LOADING_S

    def send(self, kind: RankMessage, numbers: Sequence[int] | npt.NDArray[np.int32] = ()) -> None:
        """Sends a message to all other ranks, which must be in `receive`. Raises RuntimeError when one of them is
        gone."""
        assert self.rank == 0, "only rank 0 sends messages"
        first = np.zeros(_FIRST_NUMBERS, dtype=np.int32)
        first[:_HEADER] = kind, len(numbers)
        num_fitting = min(len(numbers), _FIRST_NUMBERS - _HEADER)
        first[_HEADER : _HEADER + num_fitting] = numbers[:num_fitting]
        distributed.broadcast(torch.from_numpy(first), 0, self.messages)
        if num_fitting < len(numbers):
            rest = np.asarray(numbers[num_fitting:], dtype=np.int32)
            distributed.broadcast(torch.from_numpy(rest), 0, self.messages)

    def receive(self) -> tuple[RankMessage, npt.NDArray[np.int32]]:
        """The next message and its numbers. Raises RuntimeError when rank 0 is gone or silent for too long."""
        first = torch.zeros(_FIRST_NUMBERS, dtype=torch.int32)
        distributed.broadcast(first, 0, self.messages)
        found = first.numpy()
        kind, num_numbers = RankMessage(int(found[0])), int(found[1])
        numbers = found[_HEADER : _HEADER + num_numbers]
        if len(numbers) < num_numbers:
            rest = torch.zeros(num_numbers - len(numbers), dtype=torch.int32)
            distributed.broadcast(rest, 0, self.messages)
            numbers = np.concatenate([numbers, rest.numpy()])
        return kind, numbers

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's part, the same bits on all of them in any batch."""
        return sum_over_ranks(part, self.tensors)

    def least(self, *numbers: int) -> tuple[int, ...]:
        """The least of every rank's numbers, the same on all of them; for the time of loading. Raises RuntimeError when
        a rank is gone."""
        found = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)  # over all ranks, which may be late by `LOADING_S`
        return tuple(found.tolist())

    def gather(self, part: torch.Tensor, widths: Sequence[int], *, to_all: bool) -> torch.Tensor:
        """Every rank's part side by side, `widths` wide.  # [..., width of this rank] -> [..., sum of widths]

        Without `to_all` rank 0 has them, and the others get their own part back.
        """
        padded = torch.nn.functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if to_all or self.rank == 0 else None
        if to_all:
            distributed.all_gather(parts, padded, self.tensors)
        else:
            distributed.gather(padded, parts, 0, self.tensors)
        if parts is None:
            return part
        return torch.cat([each[..., :width] for each, width in zip(parts, widths, strict=True)], dim=-1)


def join_ranks(timeout_s: float, device: str | None = None) -> RankGroup | None:
    """Joins the group that torchrun's variables name; None without it, or with one rank. Waits for all ranks.

    timeout_s: the most that one operation may wait for the other ranks, once the model is loaded. device: where this
    rank's model runs, by torch's name; None: on its GPU, if there is one. Raises ConfigurationError.
    """
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigurationError(f"RANK and WORLD_SIZE must be numbers, as torchrun sets them: {error}") from error
    if size == 1:
        return None
    if device == "cpu" or not torch.cuda.is_available():
        backend = "gloo"
    else:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=LOADING_S))
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(f"rank {rank} cannot join the {size} ranks of its group: {error}") from error
    timeout = timedelta(seconds=timeout_s)
    tensors = distributed.new_group(backend=backend, timeout=timeout)
    messages = distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(tensors, distributed.ProcessGroup)
    assert isinstance(messages, distributed.ProcessGroup)
    return RankGroup(rank, size, tensors, messages)
