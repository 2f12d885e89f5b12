"""One inference engine for both worker kinds: transformers model code over a paged KV cache.

`kv_cache` owns blocks, `attention` reads and writes them inside the model, `linear` keeps every row's bits free
of its batch, `model` runs a step, `sampling` and `verification` turn logits into tokens.
"""
