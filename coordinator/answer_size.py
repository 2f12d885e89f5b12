"""How much there is to write of an answer, which decides where that happens. Pure."""

from __future__ import annotations

from typing import Final

from coordinator.generation_request import GenerationSpec
from coordinator.request_session import News
from coordinator.text_output import PromptOutput, VisibleOutput

SMALL_ANSWER_VALUES: Final = 4096
"""So many tokens and log probabilities are written on the event loop, more by a thread."""


def num_values(spec: GenerationSpec, news: News) -> int:
    """Tokens and log probabilities that a piece of news makes an edge write, about."""
    if isinstance(news, VisibleOutput):
        return len(news.token_ids) * (1 + (spec.sampling.num_logprobs or 0))
    if isinstance(news, PromptOutput):
        return len(spec.prompt_token_ids) * (1 + (spec.sampling.num_prompt_logprobs or 0))
    return 0
