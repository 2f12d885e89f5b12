"""Kinds of requests to `/v1/completions`."""

from __future__ import annotations

from typing import Any

from tests.clients.compare.kinds import OMITTED, PROMPT, Kind, completion

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_VALUES: dict[str, list[Any]] = {
    "max_tokens": [0, 1, 2, -1, 100000, "3", 2.0, 2.5, None, True],
    "temperature": [-1, 2, 2.5, "0", None, 1e-9],
    "top_p": [0, 1, 1.5, -0.1, "x", None],
    "top_k": [-1, 0, 1, -2, 5, 1.5, "x"],
    "min_p": [0, 1, 1.1, -0.1],
    "n": [0, 1, 2, -1, "2", None, 1000],
    "best_of": [1, 2],
    "logprobs": [0, 1, 5, 6, 21, -1, True, "1", None],
    "prompt_logprobs": [0, 2, -2],
    "stop": ["a", ["a", "e"], [], "", ["a", "b", "c", "d", "e"], 3, [3], None],
    "stop_token_ids": [[5], [], [-1], ["x"], [10**9]],
    "presence_penalty": [0.5, -2, 2, 3, -3, "x", None],
    "frequency_penalty": [0.5, -2, 2, 3, "x", None],
    "repetition_penalty": [1.2, 0, -1, 3],
    "seed": [0, 7, -1, "x", 2**63, None],
    "echo": [True, False, "x", None],
    "suffix": ["the end", "", None],
    "user": ["someone", 3, None],
    "logit_bias": [{"5": 10}, {"5": 101}, {"x": 1}, {"100000": 1}, {}, None],
    "stream": [True, False, "x", None],
    "ignore_eos": [True],
    "min_tokens": [2, 9, -1],
    "truncate_prompt_tokens": [3, 0, -1, -2, 100000],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "add_special_tokens": [False],
    "return_token_ids": [True],
    "priority": [0, 1],
    "request_id": ["a-name"],
    "bad_words": [["the"]],
    "allowed_token_ids": [[5, 6], [], [100000]],
    "response_format": [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "x"}],
    "structured_outputs": [
        {"choice": ["yes", "no"]},
        {"regex": "[0-9]{3}"},
        {"json": _SCHEMA},
        {"grammar": 'root ::= "yes" | "no"'},
        {"regex": "("},
        {"choice": []},
        {},
        {"choice": ["a"], "regex": "b"},
    ],
    "unknown_field": [1],
    "use_beam_search": [True],
    "cache_salt": ["salt", ""],
}
_PROMPTS: dict[str, Any] = {
    "strings": [PROMPT, "The sun"],
    "tokens": [5, 6, 7],
    "lists of tokens": [[5, 6, 7], [8, 9]],
    "empty": "",
    "empty list": [],
    "list of empty": [""],
    "empty tokens": [[]],
    "missing": OMITTED,
    "null": None,
    "number": 3,
    "mixed": ["a", 3],
    "negative token": [-1],
    "token out of vocabulary": [1000000],
    "too long": "a " * 3000,
    "object": {"text": "a"},
    "unicode": "Ünïcödé \N{GRINNING FACE} 漢字",
}


def completions() -> list[Kind]:
    """All of them."""
    kinds = [completion("plain")]
    kinds += [completion(f"prompt {name}", prompt=prompt) for name, prompt in _PROMPTS.items()]
    sampled = {"temperature": {2, 1e-9}}
    for field, values in _VALUES.items():
        for number, value in enumerate(values):
            is_random = isinstance(value, float | int) and value in sampled.get(field, ())
            kinds.append(completion(f"{field} {number}", **{field: value}, compares_text=not is_random))
    return [*kinds, *_combined(), *_streams()]


def _combined() -> list[Kind]:
    return [
        completion("echo of logprobs", echo=True, logprobs=1),
        completion("echo without output", echo=True, max_tokens=0),
        completion("echo without output with logprobs", echo=True, max_tokens=0, logprobs=1),
        completion("echo of tokens", echo=True, prompt=[5, 6, 7]),
        completion("echo of several", echo=True, prompt=["a", "b"]),
        completion("n of several prompts", n=2, prompt=["a", "b"]),
        completion("sampled n", n=2, temperature=1, seed=1, compares_text=False),
        completion("default max_tokens", max_tokens=OMITTED),
        completion("default temperature", temperature=OMITTED, compares_text=False),
        completion("stop with minimum", stop="e", min_tokens=4),
        # The byte E2, which begins a character of three.
        completion("cut character", logit_bias={"161": 100}, max_tokens=1),
        completion("no model", model=OMITTED),
        completion("null model", model=None),
        completion("unknown model", model="unknown"),
        completion("model of a number", model=3),
        completion("stream_options without stream", stream_options={"include_usage": True}),
    ]


def _streams() -> list[Kind]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "usage": {"stream_options": {"include_usage": True}},
        "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "no usage": {"stream_options": {"include_usage": False}},
        "null options": {"stream_options": None},
        "empty options": {"stream_options": {}},
        "unknown option": {"stream_options": {"x": 1}},
        "logprobs": {"logprobs": 1},
        "echo": {"echo": True},
        "n": {"n": 2},
        "several prompts": {"prompt": ["a", "b"]},
        "stop": {"stop": "e"},
        "one token": {"max_tokens": 1},
        "token ids": {"return_token_ids": True},
        "bad": {"temperature": -1},
    }
    return [completion(f"stream {name}", stream=True, **fields) for name, fields in options.items()]
