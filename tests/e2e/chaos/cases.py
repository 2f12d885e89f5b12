"""Requests of the chaos suite's clients, whose correct output is a function of the request alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from demo.corpus import held_out_prompts
from protos.outrider.v1 import common_pb2, generation_pb2

MAX_MODEL_LEN = 1024  # of the workers, tokens; as much as the demo pair has


@dataclass(frozen=True)
class Case:
    """One request. It is greedy, or sampled with a seed."""

    name: str
    prompt: str
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)  # fields that HTTP and gRPC call the same
    stop: tuple[str, ...] = ()
    n: int = 1  # texts
    schema: dict[str, Any] | None = None  # of the JSON that the text has to be
    regex: str = ""  # that the text has to match

    def body(self, speculation: str = "on") -> dict[str, Any]:
        """The body of a request for a streamed completion with token ids. `speculation` is on, always or off."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **self.sampling,
            **({"stop": list(self.stop)} if self.stop else {}),
            **({"n": self.n} if self.n > 1 else {}),
            **({"structured_outputs": {"json": self.schema}} if self.schema else {}),
            **({"structured_outputs": {"regex": self.regex}} if self.regex else {}),
            "speculation": {"enabled": speculation != "off", "always": speculation == "always"},
            "stream": True,
            "return_token_ids": True,
        }

    def message(self, speculation: str = "on") -> generation_pb2.GenerationRequest:
        """The same request as a message for gRPC."""
        return generation_pb2.GenerationRequest(
            prompt=self.prompt,
            sampling=self.sampling_message(),
            stop=self.stop,
            n=self.n,
            speculation=common_pb2.SpeculationParams(enabled=speculation != "off", always=speculation == "always"),
        )

    def sampling_message(self) -> common_pb2.SamplingParams:
        fields = {"temperature": 0.0, "top_p": 1.0, "max_tokens": self.max_tokens} | self.sampling
        message = common_pb2.SamplingParams(**fields)
        if self.schema:
            message.grammar.json_schema = json.dumps(self.schema)
        elif self.regex:
            message.grammar.regex = self.regex
        return message


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "sizes", "is_open"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z_]{3,20}\([a-z]{1,8}(, [a-z]{1,8}){0,4}\):\n    return [a-z]{1,9}( [-+*] [a-z]{1,9}){0,9}\n"
STOPS = (")\n", "return ", ":\n", "self.")


def make_cases(num_cases: int, rng: random.Random, *, are_greedy: bool = False) -> list[Case]:
    """Greedy and seeded ones, short and long ones, some with parameters that look back, with stop strings, of several
    texts, or bound to a grammar. are_greedy: none is sampled, for an engine whose seeds do not determine a text."""
    prompts = held_out_prompts(num_cases, seed=rng.randrange(1 << 30), chars_max=400)
    return [_make_case(index, prompt, rng, are_greedy=are_greedy) for index, prompt in enumerate(prompts)]


def _make_case(index: int, prompt: str, rng: random.Random, *, are_greedy: bool) -> Case:
    sampling: dict[str, Any] = {}
    words = []
    if index % 2 and not are_greedy:
        sampling |= {"temperature": rng.choice((0.6, 0.9, 1.2)), "seed": rng.randrange(1 << 40)}
        words.append("seeded")
    else:
        words.append("greedy")
    if index % 5 == 3:
        sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
        words.append("penalties")
    if index % 7 == 2:
        sampling |= {"top_p": 0.8}
        words.append("top-p")
    if index % 6 == 5:
        is_json = index % 12 == 5
        words.append("json" if is_json else "regex")
        grammar: dict[str, Any] = {"schema": SCHEMA} if is_json else {"regex": REGEX}
        return Case(f"{index}-{'-'.join(words)}", prompt, 150, sampling, **grammar)
    n = rng.choice((2, 3)) if index % 8 == 1 else 1
    has_stop = index % 4 == 2
    max_tokens = rng.choice((8, 60, 150, 300, 500)) if n == 1 else rng.choice((8, 60, 150))
    if max_tokens > 100 and not has_stop:
        sampling |= {"ignore_eos": True}
    if index == 0:  # a short one for lines of batches that have many sequences
        max_tokens, n = 8, 1
        sampling.pop("ignore_eos", None)
    words += [str(max_tokens), *([f"n{n}"] if n > 1 else []), *(["stop"] if has_stop else [])]
    stop = (rng.choice(STOPS),) if has_stop else ()
    return Case(f"{index}-{'-'.join(words)}", prompt, max_tokens, sampling, stop, n)
