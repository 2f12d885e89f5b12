"""Edits conversations as Anthropic's `context_management` asks. Pure.

Thinking of older turns is cleared as asked. Results of tools are not cleared, and nothing is summarized: an edit that
does so is accepted while it has nothing to do, and refused by name once it would change the prompt. Agents send such
edits with every request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coordinator.api.anthropic.conversation import ContentBlock, InputMessage
from coordinator.api.schema.body_parts import LenientBody, Listed, described
from coordinator.intake.generation_request import PromptLimit
from outrider.errors import InvalidRequest
from outrider.sampling_params import UINT32_MAX, check_count

EDITS_MAX: Final = 16
_THINKING: Final = "clear_thinking_20251015"
_TOOL_USES: Final = "clear_tool_uses_20250919"
_COMPACTION: Final = "compact_20260112"
_TRIGGERS: Final = {_TOOL_USES: 100_000, _COMPACTION: 150_000}
"""Input tokens beyond which an edit does something, if the request does not say."""
_TURNS_KEPT: Final = 1
_TOOL_USES_KEPT: Final = 3
_THOUGHTS: Final = ("thinking", "redacted_thinking")


class Amount(LenientBody):
    type: str = Field(description="what is counted: `input_tokens`, `tool_uses` or `thinking_turns`")
    value: Annotated[int, Field(ge=0, le=UINT32_MAX)] = Field(description="how many of them")


class ContextEdit(LenientBody):
    """An edit of the conversation. Fields that say how something is cleared are not used: nothing but thinking is."""

    type: Annotated[str, described(enum=[_THINKING, _TOOL_USES, _COMPACTION])] = Field(
        description="what is edited: older thinking, results of tools, or all (a summary)"
    )
    keep: Literal["all"] | Amount | None = Field(
        default=None, description="the last turns with thinking, or uses of tools, that stay; by default 1, or 3"
    )
    trigger: Amount | None = Field(
        default=None,
        description=f"beyond this the edit is made: by default {_TRIGGERS[_TOOL_USES]} `input_tokens` for results of "
        f"tools, {_TRIGGERS[_COMPACTION]} for a summary",
    )
    exclude_tools: Listed[str] | None = Field(default=None, description="tools whose results stay")


class ContextManagement(LenientBody):
    """Clears older thinking. What would clear or summarize more is accepted while it has nothing to do."""

    edits: Annotated[Listed[ContextEdit], described(maxItems=EDITS_MAX)] | None = Field(
        default=None, description="edits of the conversation before it becomes a prompt"
    )

    def edited(self, messages: Sequence[InputMessage]) -> list[InputMessage]:
        """Returns the messages without the thinking of older turns. Raises InvalidRequest for too many edits."""
        check_count("context_management.edits", self.edits or (), EDITS_MAX)
        kept = [_kept(edit, _TURNS_KEPT) for edit in self.edits or () if edit.type == _THINKING]
        turns = list(_turns(messages))
        with_thinking = sorted({turn for turn, message in zip(turns, messages, strict=True) if _has_thinking(message)})
        num_cleared = max((len(with_thinking) - each for each in kept if each is not None), default=0)
        cleared = set(with_thinking[: max(num_cleared, 0)])
        return [
            _without_thinking(message) if turn in cleared else message
            for turn, message in zip(turns, messages, strict=True)
        ]

    def prompt_limit(self, messages: Sequence[InputMessage]) -> PromptLimit | None:
        """Returns the longest prompt that the edits leave as it is; None for any. Raises InvalidRequest for an edit
        that would change one of any length, or that is not known."""
        limits: list[PromptLimit] = []
        for index, edit in enumerate(self.edits or ()):
            where = f"context_management.edits[{index}]"
            if edit.type == _THINKING or (edit.type == _TOOL_USES and not _clears_tool_uses(edit, messages)):
                continue
            trigger = edit.trigger
            if edit.type not in _TRIGGERS:
                raise InvalidRequest(f"{where}.type", f"{where}: {edit.type!r} is not served; leave it out")
            if trigger is not None and trigger.type != "input_tokens":
                raise InvalidRequest(where, f"{where}: {edit.type} would clear results of tools, which is not served")
            limits.append(PromptLimit(where, _TRIGGERS[edit.type] if trigger is None else trigger.value))
        return min(limits, key=lambda limit: limit.num_tokens, default=None)


def _kept(edit: ContextEdit, default: int) -> int | None:
    """How many stay; None for all."""
    if edit.keep == "all":
        return None
    return default if edit.keep is None else edit.keep.value


def _blocks(message: InputMessage) -> list[ContentBlock]:
    return message.content if isinstance(message.content, list) else []


def _turns(messages: Sequence[InputMessage]) -> Iterator[int]:
    """Yields each message's turn: a turn ends where the user says something, and not where tools do."""
    turn = 0
    for message in messages:
        if message.role == "user" and not any(block.type == "tool_result" for block in _blocks(message)):
            turn += 1
        yield turn


def _has_thinking(message: InputMessage) -> bool:
    return message.role == "assistant" and any(block.type in _THOUGHTS for block in _blocks(message))


def _without_thinking(message: InputMessage) -> InputMessage:
    if not _has_thinking(message):
        return message
    update: dict[str, Any] = {"content": [block for block in _blocks(message) if block.type not in _THOUGHTS]}
    return message.model_copy(update=update)


def _clears_tool_uses(edit: ContextEdit, messages: Sequence[InputMessage]) -> bool:
    """Whether there is a result that the edit could clear, its trigger in input tokens aside."""
    names = [block.name for message in messages for block in _blocks(message) if block.type == "tool_use"]
    kept = _kept(edit, _TOOL_USES_KEPT)
    older = [] if kept is None else names[: max(len(names) - kept, 0)]
    if edit.trigger is not None and edit.trigger.type == "tool_uses" and len(names) <= edit.trigger.value:
        return False
    return any(name not in (edit.exclude_tools or ()) for name in older)
