"""One inference engine for both kinds of worker: transformers' model code over a paged KV cache.

kv          ownership of KV blocks; prefix sharing. No tensors
sampling    from logits to tokens: parameters, randomness, verification of hints
compiled    our C++ kernels, products compiled by oneDNN, and the numerics line of an engine
ranks       the ranks of a tensor-parallel group
layers      attention and linear layers whose rows have the same bits in any batch
model       runs a step
loading     reads checkpoints, plans memory, builds the engine
heads       draft heads that others published: EAGLE-3, Medusa, layers for multi-token prediction
"""
