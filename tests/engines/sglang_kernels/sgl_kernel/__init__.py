"""Stands in for SGLang's compiled kernels on a machine without a GPU: what n-gram speculation on CPUs calls, in torch.

Any other kernel can be imported, and raises when it is called.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return kernel


def _ranges(start: Tensor, end: Tensor) -> list[tuple[int, int, int, int]]:
    """Row, its first and last column, and where it begins when all rows stand in a line."""
    found, at = [], 0
    for row, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        found.append((row, first, last, at))
        at += last - first
    return found


def assign_extend_cache_locs_cpu(
    pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, _: int
) -> None:
    for row, first, last, at in _ranges(start, end):
        out[at : at + last - first] = req_to_token[pool_indices[row], first:last]


def assign_req_to_token_pool_cpu(
    pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, locs: Tensor, _: int
) -> None:
    for row, first, last, at in _ranges(start, end):
        req_to_token[pool_indices[row], first:last] = locs[at : at + last - first].to(req_to_token.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accepted: Tensor) -> None:
    index = accept_index.flatten()
    index = index[index != -1].long()
    accepted[: len(index)] = out_cache_loc[index]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    moves = [(to, at) for to, at in zip(targets.tolist(), sources.tolist(), strict=True) if to != at]
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + at * stride, stride) for _, at in moves]
        for (to, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(pointer + to * stride, row, stride)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accepts the path of drafts that the target generates; `predicts` has its token after each accepted one."""
    for row in range(len(candidates)):
        node, num_accepted = 0, 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            wanted = int(target_predict[row, node])
            predicts[retrive_index[row, node]] = wanted
            child = int(retrive_next_token[row, node])
            while child != -1 and int(candidates[row, child]) != wanted:
                child = int(retrive_next_sibling[row, child])
            if child == -1:
                break
            node, num_accepted = child, num_accepted + 1
            accept_index[row, num_accepted] = retrive_index[row, node]
        accept_token_num[row] = num_accepted
