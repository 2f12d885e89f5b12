"""`python -m tests.engines.sampled_draws MODEL NUM_DRAWS hinted|plain FILE`, in vLLM's environment.

Draws tokens from vLLM with or without hints, then asks vLLM without hints for the probability of each token at each
place of what was drawn. Writes both to FILE (npz): per way of sampling, tokens [sequences, LENGTH] and log
probabilities [sequences, LENGTH, vocabulary]; and how many hints were verified and accepted.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

WAYS: Final[dict[str, dict[str, float]]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9},
}
SHARES: Final = {"temperature": 8, "top_k": 1, "top_p": 1, "all": 1}
"""Draws of each way, relative to each other; requests of all ways, and greedy ones, are in the same steps."""
LENGTH: Final = 50
PROMPT_LEN: Final = 6
SETTINGS: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 64,
    "max_logprobs": -1, "disable_log_stats": False, "enable_prefix_caching": False,
}  # fmt: skip
HINTS: Final[dict[str, Any]] = {
    "scheduler_cls": "tests.engines.forced_hints.ForcedHints",
    "async_scheduling": False,
    "speculative_config": {
        "method": "custom_class", "model": "outrider.engines.vllm.no_drafts.NoDrafts", "num_speculative_tokens": 7
    },
    "additional_config": {"outrider": {"draft_workers": ["127.0.0.1:1"], "may_pause": False}},
}  # fmt: skip


def prompts(vocab_size: int, num: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return random.integers(2, vocab_size, (num, PROMPT_LEN)).tolist()


def draw(model: str, num_draws: int, options: dict[str, Any], to: Any) -> None:
    """Sends tokens by way, and the numbers of hints that were verified and accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **SETTINGS, **options)
    vocab_size = llm.model_config.get_vocab_size()
    per_share = -(-num_draws // (SHARES["temperature"] * LENGTH))
    asked = [(way, SamplingParams(**WAYS[way], max_tokens=LENGTH, ignore_eos=True, detokenize=False))
             for _ in range(per_share) for way, share in SHARES.items() for _ in range(share)]  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    asked += [("greedy", greedy)] * (len(asked) // 16)
    order = np.random.default_rng(6).permutation(len(asked))
    asked = [asked[index] for index in order]
    starts = prompts(vocab_size, len(asked))
    inputs: Any = [{"prompt_token_ids": each} for each in starts]
    outputs = llm.generate(inputs, [params for _, params in asked], use_tqdm=False)
    found: dict[str, list[list[int]]] = {}
    for (way, _), start, output in zip(asked, starts, outputs, strict=True):
        found.setdefault(way, []).append([*start, *output.outputs[0].token_ids])
    counts = {each.name: getattr(each, "value", 0) for each in llm.get_metrics() if "spec_decode" in each.name}
    llm.llm_engine.engine_core.shutdown()
    to.send((found, counts))


def judge(model: str, texts: list[list[int]], to: Any) -> None:
    """Sends plain vLLM's log probabilities of all tokens, after each token from the prompt's last one."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **SETTINGS)
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    known = np.empty((len(texts), LENGTH, llm.model_config.get_vocab_size()), np.float32)
    inputs: Any = [{"prompt_token_ids": each} for each in texts]
    for row, output in zip(known, llm.generate(inputs, params, use_tqdm=False), strict=True):
        for place, each in zip(row, output.prompt_logprobs[PROMPT_LEN:], strict=True):
            place[list(each)] = [logprob.logprob for logprob in each.values()]
    llm.llm_engine.engine_core.shutdown()
    to.send(known)


def apart(target: Any, *args: Any) -> Any:
    """Runs a function in a process of its own, and returns what it sends: two engines do not share one."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join(60.0)
        process.kill()


def main(words: list[str]) -> None:
    model, num_draws, kind, file = words
    found, counts = apart(draw, model, int(num_draws), HINTS if kind == "hinted" else {})
    texts = [text for way in WAYS for text in found[way]]
    known = apart(judge, model, texts)
    arrays: dict[str, Any] = {}
    start = 0
    for way in WAYS:
        tokens = np.array(found[way], np.int32)
        arrays[f"{way}_tokens"], arrays[f"{way}_logprobs"] = tokens, known[start : start + len(tokens)]
        start += len(tokens)
    arrays["verified"] = counts.get("vllm:spec_decode_num_draft_tokens", 0)
    arrays["accepted"] = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    np.savez(Path(file), **arrays)


if __name__ == "__main__":
    main(sys.argv[1:])
