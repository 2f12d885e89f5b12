"""A plugin of SGLang for tests without a GPU: its plain torch attention learns to verify a tree of drafts.

SGLang's own attention for that on CPUs needs its compiled kernels.
"""

from __future__ import annotations

from typing import Any

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def verify(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
    """Attention of drafts to all of the context, and to their ancestors as the mask says."""
    import torch
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from torch.nn.functional import scaled_dot_product_attention

    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    width = batch.spec_info.draft_token_num
    masks = batch.spec_info.custom_mask.reshape(-1, width, width)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    queries = q.view(len(masks), width, layer.tp_q_head_num, layer.qk_head_dim)
    outputs = []
    for row, mask in enumerate(masks):
        num_context = int(batch.seq_lens[row])
        slots = backend.req_to_token_pool.req_to_token[batch.req_pool_indices[row], : num_context + width].long()
        seen = torch.cat([torch.ones(width, num_context, dtype=torch.bool), mask.bool()], dim=1)
        found = scaled_dot_product_attention(
            queries[row].movedim(0, 1)[None],
            keys[slots].movedim(0, 1)[None],
            values[slots].movedim(0, 1)[None],
            attn_mask=seen,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        outputs.append(found[0].movedim(0, 1).reshape(width, -1))
    return torch.cat(outputs)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def forward_extend(original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, **options: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            return verify(self, q, k, v, layer, batch)
        return original(self, q, k, v, layer, batch, **options)

    HookRegistry.register(f"{BACKEND}.forward_extend", forward_extend, HookType.AROUND)
