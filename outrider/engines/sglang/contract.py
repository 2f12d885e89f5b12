"""Everything of SGLang that the worker relies on, by name and parameters. Imports SGLang only when it is checked.

A release that moves any of it is refused at start, by name, instead of failing in the middle of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from outrider.engines import relied_on

TESTED_VERSIONS: Final = ("0.5.23",)
"""Releases that the tests ran with."""

WORKER: Final = "sglang.srt.speculative.ngram_worker.NGRAMWorker"
METHODS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    WORKER: {
        "__init__": ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "forward_batch_generation": ("self", "batch", "on_publish", "pp_proxy_tensors"),
        "_prepare_draft_tokens": ("self", "batch"),
        "_update_ngram_corpus": ("self", "batch"),
        "note_request_finished": ("self", "rid", "natural_stop"),
    },
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm": {
        "register": ("cls", "name", "supports_overlap", "validate_server_args", "spec_class"),
        "create_future_map": ("self", "device", "req_to_token_pool"),
    },
    "sglang.srt.speculative.spec_info.CustomSpecAlgo": {
        "is_ngram": ("self",),
        "has_draft_kv": ("self",),
        "handle_server_args": ("self", "server_args"),
        "create_worker": ("self", "server_args"),
    },
    "sglang.srt.managers.schedule_batch.ScheduleBatch": {"grammar_needs_sync": ("self",)},
    "sglang.srt.managers.schedule_batch.Req": {"finished": ("self",)},
    "sglang.srt.model_executor.forward_batch_info.ForwardMode": {"is_extend": ("self",)},
}  # fmt: skip
"""Methods by class: their first parameters."""
SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    WORKER: (
        "self.draft_token_num", "self.enable_overlap", "self.model_runner", "self._prepare_draft_tokens(batch)",
        "self._update_ngram_corpus(batch)", "torch.from_numpy(req_drafts)", "torch.from_numpy(mask)",
        "mask.reshape(bs, self.draft_token_num, self.draft_token_num)", "batch.spec_info.accept_tokens",
        "batch.spec_info.accept_lens", "use_prev_tokens = self.enable_overlap and not batch.grammar_needs_sync()",
        "accept_lens includes the bonus token",
    ),
    "sglang.srt.managers.schedule_batch.Req": (
        "self.rid", "self.origin_input_ids_unpadded", "self.output_ids", "self.multimodal_inputs", "self.input_embeds",
        "self.session", "self.eos_token_ids", "self.tokenizer", "self.cache_salt", "self.extra_key",
    ),
    "sglang.srt.sampling.sampling_params.SamplingParams": (
        "max_new_tokens:", "min_new_tokens:", "stop_token_ids:", "ignore_eos:", "temperature:", "top_k:", "beam_width:",
        "presence_penalty:", "frequency_penalty:", "repetition_penalty:", "custom_params:",
    ),
    "sglang.srt.managers.scheduler_components.batch_result_processor": ("self.draft_worker.note_request_finished(",),
    "sglang.srt.distributed.parallel_state.GroupCoordinator": (
        "self.ranks", "self.world_size", "self.rank_in_group", "self.cpu_group",
    ),
    "sglang.srt.runtime_context": ("tp_group", "dp_rank", "def get_serving", "def get_parallel"),
    "sglang.srt.arg_groups.speculative_hook": ("algo.validate_server_args", "algo.handle_server_args"),
    "sglang.srt.arg_groups.field_order": (
        '"pp_size"', '"enable_dp_attention"', '"disaggregation_mode"', '"enable_two_batch_overlap"', '"enable_pdmux"',
        '"device"', '"speculative_num_draft_tokens"', '"speculative_num_steps"', '"speculative_eagle_topk"',
        '"speculative_accept_threshold_single"', '"speculative_accept_threshold_acc"',
        '"speculative_use_rejection_sampling"', '"speculative_adaptive"', '"speculative_draft_model_path"',
        '"speculative_ngram_external_corpus_path"', '"enable_mixed_chunk"', '"max_running_requests"',
        '"disable_overlap_schedule"', '"tokenizer_path"', '"served_model_name"',
    ),
}  # fmt: skip
"""Parts of the source of a class or module that must be there: attributes, and how SGLang uses them."""


def missing() -> Iterator[str]:
    """Yields by name what the installed SGLang lacks of what is relied on; nothing where all is there."""
    return relied_on.missing(METHODS, SOURCES)
