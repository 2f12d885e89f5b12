"""Stands in for SGLang's kernel of this name, after the description in its `reconstruct_tree.py`."""

from __future__ import annotations

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    width = draft_token_num
    masks = tree_mask.reshape(batch_size, width, width).tolist()
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for row, mask in enumerate(masks):
        last_child: dict[int, int] = {}
        for node in range(width):
            ancestors = [each for each in range(node) if mask[node][each]]
            positions[row * width + node] = int(verified_seq_len[row]) + len(ancestors)
            retrieve_index[row, node] = row * width + node
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last_child:
                retrieve_next_sibling[row, last_child[parent]] = node
            else:
                retrieve_next_token[row, parent] = node
            last_child[parent] = node
