"""vLLM's offline engine as a peer process. Runs in vLLM's own environment: `python -m benchmarks.peers.vllm_engine`.

The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), which saves vLLM a hop between processes.
Between turns it waits on stdin and uses almost no CPU.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.answering import Batch, Generate, Replies, bind_to_cores, run


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    """Loads the engine. Raises ImportError if vLLM is not installed."""
    # Before the import, which starts OpenMP's threads: two of them on one core would spin while they wait for
    # each other.
    bind_to_cores(settings["cores"])
    import vllm

    speculation = {
        "method": "draft_model",
        "model": settings["draft"],
        "num_speculative_tokens": settings["num_speculative_tokens"],
    }
    engine = vllm.LLM(
        model=settings["target"],
        dtype=settings.get("dtype", "bfloat16"),
        enforce_eager=True,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=False,  # no system may profit from a known prompt
        disable_log_stats=False,  # for the times of first tokens
        **(settings.get("plugin") or {"speculative_config": speculation if settings["draft"] else None}),
    )

    def generate(batch: Batch, num_tokens: int) -> Replies:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": token_ids} for token_ids in batch]
        made: Replies = []
        for output in engine.generate(prompts, params, use_tqdm=False):
            token_ids, times = list(output.outputs[0].token_ids), output.metrics
            made.append((token_ids, len(token_ids) - 1, times.last_token_ts - times.first_token_ts))
        return made

    return {"vllm": vllm.__version__}, generate


if __name__ == "__main__":
    run(load)
