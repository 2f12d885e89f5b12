"""Tensor parallelism: the group of ranks and its deterministic sums."""
