"""Layers that replace transformers' own: every row's bits are independent of the batch (invariant I2)."""
