"""Everything of vLLM that the scheduler relies on, by name and parameters. Imports vLLM only when it is checked.

A release that moves any of it is refused at start, by name, instead of failing in the middle of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from outrider.engines import relied_on

TESTED_VERSIONS: Final = ("0.32",)
"""Releases, without the last number, that the tests ran with."""

SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
METHODS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    SCHEDULER: {
        "__init__": ("self", "vllm_config"),
        "schedule": ("self",),
        "update_from_output": ("self", "scheduler_output", "model_runner_output"),
        "update_draft_token_ids": ("self", "draft_token_ids"),
        "add_request": ("self", "request"),
        "_free_request": ("self", "request"),
        "shutdown": ("self",),
    },
    "vllm.v1.structured_output.StructuredOutputManager": {"validate_tokens": ("self", "request", "spec_tokens")},
    "vllm.v1.core.kv_cache_manager.KVCacheManager": {"usage": ()},
    "vllm.v1.request.Request": {
        "num_tokens": (), "num_output_tokens": (), "use_structured_output": (),
    },
    "vllm.config.VllmConfig": {"max_concurrent_batches": (), "num_speculative_tokens": (), "use_v2_model_runner": ()},
    "vllm.sampling_params.SamplingParams": {"all_stop_token_ids": ()},
    "vllm.engine.arg_utils.EngineArgs": {"create_engine_config": ("self",)},
    "vllm.triton_utils.dispatcher.register_kernels": {},
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens": {},
    "vllm.v1.sample.rejection_sampler.apply_top_k_top_p": {},
}  # fmt: skip
"""Methods and properties by class, or by function without any: their first parameters; () for what is no method or may
be set on the instance."""
SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    SCHEDULER: (
        "self.running", "self.requests", "self.max_model_len", "self.max_num_scheduled_tokens", "self.num_spec_tokens",
        "self.structured_output_manager", "self.kv_cache_manager", "request.spec_token_ids",
        "scheduled_spec_decode_tokens", "num_scheduled_tokens", "self._free_request(request",
    ),
    "vllm.v1.request.Request": (
        "self.spec_token_ids", "self.num_computed_tokens", "self.num_output_placeholders", "self.num_in_flight_tokens",
        "self._all_token_ids", "self.resumable", "self.mm_features", "self.prompt_embeds", "self.max_tokens",
        "self.all_token_ids",
    ),
    "vllm.engine.arg_utils.EngineArgs": (
        "speculative_config:", "scheduler_cls:", "async_scheduling:", "additional_config:", "load_general_plugins()",
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ('"custom_class"', "create_custom_proposer"),
}  # fmt: skip
"""Parts of a class' source that must be there: attributes of its instances, and how it uses them."""


SESSION_METHODS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    SCHEDULER: {name: METHODS[SCHEDULER][name] for name in ("schedule", "update_from_output", "add_request")},
    "vllm.v1.engine.async_llm.AsyncLLM": {
        "generate": ("self", "prompt", "sampling_params", "request_id"), "is_paused": ("self",),
        "from_vllm_config": (),
    },
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": {"__post_init__": ("self",)},
}  # fmt: skip
"""The same, of a target worker."""
SESSION_SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.v1.request.Request": ("self.num_prompt_tokens", "self._output_token_ids", "self.prefill_stats"),
    "vllm.v1.engine.EngineCoreOutput": ("ec_transfer_params",),
    "vllm.v1.engine.output_processor.OutputProcessor": ("ec_transfer_params",),
    "vllm.v1.structured_output.StructuredOutputManager": ("self.executor.submit",),
    "vllm.v1.structured_output.request.StructuredOutputRequest": ("_grammar",),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": ("prompt_token_ids", "output_token_ids", "sampling_params"),
    "vllm.sampling_params.SamplingParams": ("_bad_words_token_ids", "extra_args"),
}


def missing(
    methods: Mapping[str, Mapping[str, tuple[str, ...]]] = METHODS,
    sources: Mapping[str, tuple[str, ...]] = SOURCES,
) -> Iterator[str]:
    """Yields by name what the installed vLLM lacks of what is relied on; nothing where all is there."""
    return relied_on.missing(methods, sources)
