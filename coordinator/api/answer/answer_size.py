"""Estimates the number of values in an answer and the memory needed to write it. Pure."""

from __future__ import annotations

from typing import Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.output.logprobs import TokenBytes
from coordinator.output.sequence_output import OutputItem
from coordinator.output.text_output import PromptOutput, VisibleOutput

SMALL_ANSWER_VALUES: Final = 4096
"""Most tokens and log probabilities written on the event loop; more are written in a thread."""

# Peak memory of writing an answer, besides its input: measured with tracemalloc on CPython 3.11 and rounded up. A token
# with 20 log probabilities takes in a chat 11,055 bytes if tokens have 5 bytes and 55,167 if they have 128, in a
# completion 3,504 and 11,995. One character beyond Latin-1 makes all text take 4 bytes per character: then 15,741 and
# 91,956, and 5,408 and 23,127. These are counted, because such a character is common.
_PIECE_BYTES: Final = 320  # per item of output
_DETAILED_PIECE_BYTES: Final = 1280  # per item with log probabilities or tool calls
_TOKEN_BYTES: Final = 192
_CHARACTER_BYTES: Final = 24  # per character of text
_CHAT_VALUE_BYTES: Final = (640, 30)  # per log probability, and per byte of its token
_COMPLETION_VALUE_BYTES: Final = (256, 9)


def num_values(spec: GenerationSpec, item: OutputItem) -> int:
    """Estimates the tokens and log probabilities that an API writes for an item of output."""
    if isinstance(item, VisibleOutput):
        return len(item.token_ids) * (1 + (spec.sampling.num_logprobs or 0))
    if isinstance(item, PromptOutput):
        return len(spec.prompt_token_ids) * (1 + (spec.sampling.num_prompt_logprobs or 0))
    return 0


def written_bytes(spec: GenerationSpec, item: OutputItem, tokens: TokenBytes, *, is_chat: bool) -> int:
    """Estimates, rather high, the peak bytes to write an item of output into a whole answer, besides the item itself.

    Data of a prompt is not counted, because the number of its log probabilities is bounded.
    """
    if not isinstance(item, VisibleOutput):
        return _PIECE_BYTES + _CHARACTER_BYTES * len(item.text)
    is_plain = not (spec.shows_logprobs or spec.request.tools)
    size = _PIECE_BYTES if is_plain else _DETAILED_PIECE_BYTES
    size += _TOKEN_BYTES * len(item.token_ids) + _CHARACTER_BYTES * len(item.text)
    if spec.shows_logprobs:
        ids = [*item.token_ids, *(other for each in item.logprobs for other in each.top_token_ids)]
        value_bytes, byte_bytes = _CHAT_VALUE_BYTES if is_chat else _COMPLETION_VALUE_BYTES
        size += value_bytes * len(ids) + byte_bytes * sum(len(tokens.token_bytes(each)) for each in ids)
    return size
