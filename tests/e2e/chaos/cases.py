"""What the clients of the chaos suite ask: requests whose right answer is a function of the request alone."""

from __future__ import annotations

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

    def body(self, speculation: str = "on") -> dict[str, Any]:
        """Of a streamed completion, with token ids. `speculation` is on, always or off."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **self.sampling,
            **({"stop": list(self.stop)} if self.stop else {}),
            "speculation": {"enabled": speculation != "off", "always": speculation == "always"},
            "stream": True,
            "return_token_ids": True,
        }

    def message(self, speculation: str = "on") -> generation_pb2.GenerationRequest:
        """The same over gRPC."""
        return generation_pb2.GenerationRequest(
            prompt=self.prompt,
            sampling=self.sampling_message(),
            stop=self.stop,
            speculation=common_pb2.SpeculationParams(
                enabled=speculation != "off", always=speculation == "always"
            ),
        )

    def sampling_message(self) -> common_pb2.SamplingParams:
        fields = {"temperature": 0.0, "top_p": 1.0, "max_tokens": self.max_tokens} | self.sampling
        return common_pb2.SamplingParams(**fields)


STOPS = (")\n", "return ", ":\n", "self.")


def make_cases(num_cases: int, rng: random.Random) -> list[Case]:
    """Greedy and seeded ones, short and long ones, some with parameters that look back, some with stop strings."""
    cases = []
    for index, prompt in enumerate(held_out_prompts(num_cases, seed=rng.randrange(1 << 30), chars_max=400)):
        sampling: dict[str, Any] = {}
        words = []
        if index % 2:
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
        has_stop = index % 4 == 2
        max_tokens = rng.choice((8, 60, 150, 300, 500))
        if max_tokens > 100 and not has_stop:
            sampling |= {"ignore_eos": True}
        words.append(str(max_tokens))
        stop = (rng.choice(STOPS),) if has_stop else ()
        cases.append(
            Case(f"{index}-{'-'.join(words)}{'-stop' if stop else ''}", prompt, max_tokens, sampling, stop)
        )
    return cases
