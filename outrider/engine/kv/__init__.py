"""Ownership of KV blocks: allocation, reference counts, prefix sharing. Pure: block numbers, no tensors."""
