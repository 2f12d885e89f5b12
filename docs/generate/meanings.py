"""Meanings of the request parameters, and the tests which show that speculation does not change them. Data, by hand.

A test compares the names with the fields of the API and the evidence with the cases that exist.
"""

from __future__ import annotations

from typing import Final

OUTPUT: Final[dict[tuple[str, ...], tuple[str, str]]] = {
    ("temperature",): (
        "Divides the logits. 0 is greedy decoding.", "`temperature-0.5`, `temperature-1.7`"),
    ("top_p",): (
        "Keeps the most probable tokens up to this mass. 0 is greedy decoding, whatever the temperature.",
        "`top-p`, `top-p-0`"),
    ("top_k",): ("Keeps so many of the most probable tokens.", "`top-k`"),
    ("min_p",): ("Keeps tokens with at least this share of the most probable token's probability.", "`min-p`"),
    ("typical_p",): (
        "Keeps locally typical tokens up to this mass ([2202.00666](https://arxiv.org/abs/2202.00666)).",
        "`typical-p`"),
    ("presence_penalty",): ("Subtracted once from tokens that the output contains.", "`presence-penalty`"),
    ("frequency_penalty",): (
        "Subtracted from tokens of the output for each occurrence.", "`frequency-penalty`"),
    ("repetition_penalty",): (
        "Divides positive and multiplies negative logits of tokens of prompt and output "
        "([1909.05858](https://arxiv.org/abs/1909.05858)).",
        "`repetition-penalty-1.8`, `repetition-penalty-0.6`"),
    ("logit_bias",): ("Added to the logits of the tokens it names by id.", "`logit-bias`"),
    ("bad_words",): (
        "Strings that are never completed, with or without a space before; in tokens, at most 64 each.",
        "`bad-words`, `bad-words-begun-in-prompt`"),
    ("allowed_token_ids",): ("Nothing else is generated.", "`allowed-token-ids`"),
    ("min_tokens",): (
        "Before so many tokens neither end of sequence nor `stop_token_ids` is generated; at most `max_tokens`.",
        "`min-tokens`"),
    ("stop_token_ids",): ("End the output and are not shown.", "`stop-token-ids`"),
    ("ignore_eos",): ("Go on after the model's end-of-sequence tokens.", "`ignore-eos`"),
    ("max_tokens",): (
        "Longest output, at most what the context leaves; 0 with `echo` or `prompt_logprobs`. Default: 16 for a "
        "completion, what the context leaves for a chat.",
        "`max-tokens-1`"),
    ("response_format", "structured_outputs", "tools", "tool_choice"): (
        "Constrain the output by a grammar: [Structured output](../guides/structured-output.md), "
        "[Tool calls and reasoning](../guides/tool-calls.md). With both, an answer that is no call has the format.",
        "`grammar`, `grammar-and-others`; 1,000 valid outputs of 50 schemas: `tests/e2e/test_structured_output.py`"),
    ("seed",): (
        "Chooses coupled decoding: the output is a function of it, modulo 2^64.", "coupled mode of every case"),
    ("n", "best_of"): (
        "Sequences returned, and sequences generated of which the likeliest `n` are returned. Sequence i is that of "
        "`seed` + i.",
        "`tests/coordinator/test_choices.py`, `tests/exactness/test_batch_composition.py`"),
    ("stop", "include_stop_str_in_output"): (
        "Strings that end the output, and whether they are shown. The output is cut where its text says so, "
        "however its tokens came in steps.",
        "`tests/outrider/test_tokenizer.py`, `tests/e2e/test_system.py`"),
    ("logprobs", "top_logprobs", "prompt_logprobs", "logprobs_mode"): (
        "Log probabilities of output and prompt, of the model's own distribution (raw) or of the one that was drawn "
        "from (processed). A chat has `logprobs` true and a number as `top_logprobs`.",
        "within 1e-4 of a forward pass over the finished text: `tests/exactness/test_logprobs.py`"),
    ("echo",): (
        "The prompt's text comes first; of a chat the last message, if it is the assistant's.",
        "`tests/coordinator/test_logprobs.py`"),
    ("speculation",): (
        "Whether and how hints are verified; `acceptance_rule` in rejection mode only.", "both rules in every case"),
}  # fmt: skip
"""Parameters that belong together -> what they mean, and what shows it."""

TOGETHER: Final = "`everything`, `nothing-is-left`"

DELIVERY: Final = {
    "model": "Name of a served model. It may be left out while only one is served.",
    "prompt": "A text or token ids, or a list of either: each prompt of a list has `n` choices of its own.",
    "truncate_prompt_tokens": "Only the last tokens of the prompt are used; -1: as many as the context has room for.",
    "add_special_tokens": "Whether the tokenizer adds its special tokens: by default to a text, not to a chat.",
    "messages": "The conversation, rendered by the model's chat template.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`.",
    "chat_template_kwargs": "Passed to the chat template.",
    "reasoning_effort": "Passed to a chat template that knows it; ignored by others.",
    "verbosity": "Passed to a chat template that knows it; ignored by others.",
    "add_generation_prompt": "Whether the chat template begins the answer.",
    "continue_final_message": "The output continues the last message; `add_generation_prompt` must be false.",
    "functions": "OpenAI's former name of `tools`; the answer has `function_call`.",
    "function_call": "OpenAI's former name of `tool_choice`.",
    "parallel_tool_calls": "Whether an answer may hold more than one call.",
    "include_reasoning": "Whether the answer shows the model's [reasoning](../guides/tool-calls.md#reasoning).",
    "prediction": "The output that the client expects: [Predicted outputs](../guides/predicted-outputs.md).",
    "stream": "Send chunks as server-sent events.",
    "stream_options": "`include_usage` adds a last chunk with the usage, with `continuous_usage_stats` each chunk has "
    "it; `include_event_ids` makes the stream resumable: [Resume a stream](../guides/resuming.md).",
    "user": "The tenant of the request, for [fair shares](../concepts/scheduling.md). Keys and tokens decide it.",
    "prompt_cache_key": "Chooses the arm of a [canary](../operations/canary.md).",
    "cache_salt": "The prompt shares its KV only with requests of the same tenant and salt.",
    "priority": "Lower goes first where requests wait; 0 is usual.",
    "deadline_ms": "Milliseconds for the whole answer, from its arrival.",
    "slo": "Times that the request [aims at](../guides/objectives.md): `ttft_ms`, `tpot_ms`.",
    "request_id": "Id of the request in place of the header `X-Request-Id`.",
    "return_token_ids": "Send token ids in addition to the text.",
    "return_tokens_as_token_ids": "Name tokens in log probabilities by their ids.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}
