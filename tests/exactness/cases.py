"""Every sampling parameter, alone and together, as arguments of `SamplingParams`.

Written for a vocabulary of 96 (`LARGE`) and one of 8 (`SMALL`); prompts stand beside them, since some words to be
avoided begin there. The grammars of the cases named after them are in `finite_language`.
"""

from __future__ import annotations

from typing import Any

from outrider.sampling_params import SamplingParams

Arguments = dict[str, Any]

LARGE_PROMPTS = ((5, 17, 80, 3), (90, 2, 33, 61, 7, 12, 50), tuple(range(20, 60)))
"""The last one is longer than one KV block, and all have different lengths."""
SMALL_PROMPT = (1, 4, 2, 7)

WARPERS: dict[str, Arguments] = {
    "temperature-0.5": {"temperature": 0.5},
    "temperature-1.7": {"temperature": 1.7},
    "top-p": {"top_p": 0.7},
    "top-p-0": {"top_p": 0.0, "temperature": 1.7},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.2},
    "typical-p": {"typical_p": 0.6},
}
"""They change nothing where the likeliest token is said."""

LARGE_CASES: dict[str, Arguments] = {
    "none": {},
    **WARPERS,
    "presence-penalty": {"presence_penalty": 1.5},
    "frequency-penalty": {"frequency_penalty": -1.0},
    "repetition-penalty-1.8": {"repetition_penalty": 1.8},
    "repetition-penalty-0.6": {"repetition_penalty": 0.6},
    "logit-bias": {"logit_bias": ((3, 1.5), (17, -100.0), (55, 2.0))},
    "bad-words": {"bad_words": ((5,), (17,), (80, 33), (12, 61), (3, 90), (50, 2), (59, 44))},
    "bad-words-begun-in-prompt": {
        "bad_words": tuple(
            (*prompt[-length:], token_id)
            for prompt in LARGE_PROMPTS
            for length in (1, 3)
            for token_id in range(0, 96, 2)
        )[:256]
    },
    "allowed-token-ids": {"allowed_token_ids": frozenset(range(0, 96, 2)) | {41}},
    "min-tokens": {"min_tokens": 25, "stop_token_ids": frozenset(range(0, 96, 4))},
    "stop-token-ids": {"stop_token_ids": frozenset({3, 19, 62, 88})},
    "ignore-eos": {"ignore_eos": True},
    "max-tokens-1": {"max_tokens": 1},
    "everything": {
        "logit_bias": ((3, 1.0), (40, -2.0), (7, 2.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bad_words": ((5,), (12, 61), (59, 44)),
        "min_tokens": 30,
        "stop_token_ids": frozenset({19, 62}),
        "allowed_token_ids": frozenset(range(96)) - {1, 13},
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
    "grammar": {},
    "grammar-and-others": {"repetition_penalty": 1.4, "top_p": 0.9, "bad_words": ((60, 60), (62, 60))},
}

SMALL_CASES: dict[str, Arguments] = {
    "none": {},
    **WARPERS,
    "presence-penalty": {"presence_penalty": 1.5},
    "frequency-penalty": {"frequency_penalty": -1.0},
    "repetition-penalty-1.8": {"repetition_penalty": 1.8},
    "repetition-penalty-0.6": {"repetition_penalty": 0.6},
    "logit-bias": {"logit_bias": ((0, 1.5), (3, -100.0), (5, -1.0))},
    "bad-words": {"bad_words": ((3,), (0, 1), (5, 5), (2, 4), (4, 2, 0))},
    "bad-words-begun-in-prompt": {"bad_words": ((7, 5), (2, 7, 0), (4, 2, 7, 1), (7, 2, 2))},
    "allowed-token-ids": {"allowed_token_ids": frozenset({0, 2, 5, 6})},
    "min-tokens": {"min_tokens": 2, "stop_token_ids": frozenset({3})},
    "stop-token-ids": {"stop_token_ids": frozenset({0, 3})},
    "ignore-eos": {"ignore_eos": True},
    "max-tokens-1": {"max_tokens": 1},
    "everything": {
        "logit_bias": ((0, 1.0), (5, -0.5)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bad_words": ((3,), (7, 5), (1, 1)),
        "min_tokens": 1,
        "stop_token_ids": frozenset({4}),
        "allowed_token_ids": frozenset(range(8)) - {2},
        "temperature": 1.3,
        "top_k": 6,
        "top_p": 0.97,
        "min_p": 0.01,
        "typical_p": 0.95,
    },
    "grammar": {},
    "grammar-and-others": {"repetition_penalty": 1.4, "top_p": 0.95, "bad_words": ((2, 4),)},
    "nothing-is-left": {"allowed_token_ids": frozenset({0, 5}), "bad_words": ((0, 0), (0, 5))},
}

assert SMALL_CASES.keys() - {"nothing-is-left"} == LARGE_CASES.keys()


def large_params(case: str, mode: str) -> SamplingParams:
    """Up to 60 tokens, greedy or coupled."""
    arguments: Arguments = {"max_tokens": 60, "temperature": 1.0, "seed": 20_000 + len(case)}
    arguments |= LARGE_CASES[case]
    if mode == "greedy":
        arguments["temperature"] = 0.0
    return SamplingParams(**arguments)


def small_params(case: str) -> SamplingParams:
    """Up to four tokens, by rejection: the first step gives one, the second may verify a block of three hints."""
    arguments: Arguments = {"max_tokens": 4}
    return SamplingParams(**(arguments | SMALL_CASES[case]))
