"""How much there is to write of an answer: values, which decide where that happens, and the memory it takes. Pure."""

from __future__ import annotations

from typing import Final

from coordinator.generation_request import GenerationSpec
from coordinator.logprobs import TokenBytes
from coordinator.request_session import News
from coordinator.text_output import PromptOutput, VisibleOutput

SMALL_ANSWER_VALUES: Final = 4096
"""So many tokens and log probabilities are written on the event loop, more by a thread."""

# What writing an answer takes at its peak beside the news that it is written from: measured with tracemalloc on CPython
# 3.11, and rounded up. A token of a chat with 20 log probabilities takes 11,055 bytes where tokens have 5 bytes and
# 55,167 where they have 128, a token of a completion 3,504 and 11,995. One character beyond Latin-1 makes all text take
# four bytes a character, then it is 15,741 and 91,956, and 5,408 and 23,127. That is counted: one is easily said.
_PIECE_BYTES: Final = 320  # of each piece of news
_DETAILED_PIECE_BYTES: Final = 1280  # of one with log probabilities or tool calls
_TOKEN_BYTES: Final = 192
_CHARACTER_BYTES: Final = 24  # of the text of all tokens
_CHAT_VALUE_BYTES: Final = (640, 30)  # of a log probability, and of each byte of its token
_COMPLETION_VALUE_BYTES: Final = (256, 9)


def num_values(spec: GenerationSpec, news: News) -> int:
    """Tokens and log probabilities that a piece of news makes an edge write, about."""
    if isinstance(news, VisibleOutput):
        return len(news.token_ids) * (1 + (spec.sampling.num_logprobs or 0))
    if isinstance(news, PromptOutput):
        return len(spec.prompt_token_ids) * (1 + (spec.sampling.num_prompt_logprobs or 0))
    return 0


def written_bytes(spec: GenerationSpec, news: News, tokens: TokenBytes, *, is_chat: bool) -> int:
    """About how many bytes it takes at its peak to write news as a part of a whole answer, beside the news themselves
    and rather more than fewer.

    What is said of a prompt is not counted: it is bounded by the number of its log probabilities.
    """
    if not isinstance(news, VisibleOutput):
        return _PIECE_BYTES + _CHARACTER_BYTES * len(news.text)
    is_plain = not (spec.shows_logprobs or spec.request.tools)
    size = _PIECE_BYTES if is_plain else _DETAILED_PIECE_BYTES
    size += _TOKEN_BYTES * len(news.token_ids) + _CHARACTER_BYTES * len(news.text)
    if spec.shows_logprobs:
        ids = [*news.token_ids, *(other for each in news.logprobs for other in each.top_token_ids)]
        value_bytes, byte_bytes = _CHAT_VALUE_BYTES if is_chat else _COMPLETION_VALUE_BYTES
        size += value_bytes * len(ids) + byte_bytes * sum(len(tokens.token_bytes(each)) for each in ids)
    return size
