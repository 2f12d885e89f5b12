"""One choice of an OpenAI answer: news of a text in, its JSON out, whole or in pieces. Pure.

Invariant: the whole answer is the sum of the pieces that a stream would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator import logprobs as logprob_format
from coordinator.generation_request import GenerationSpec
from coordinator.logprobs import TokenNames
from coordinator.request_session import Finished, News
from coordinator.text_output import PromptOutput, VisibleOutput
from coordinator.tool_calls import ParsedText, ToolCallParser
from outrider.detokenizer import IncrementalDetokenizer
from outrider.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the client wants to see."""

    is_chat: bool
    returns_token_ids: bool = False
    as_token_ids: bool = False  # tokens beside log probabilities as "token_id:123"
    includes_usage: bool = False  # of a stream; an answer in one piece always carries it


@dataclass(slots=True, kw_only=True)
class Piece:
    """News of one choice."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # deltas
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChoiceWriter:
    """Of one choice. `piece` takes its news in order."""

    def __init__(
        self, spec: GenerationSpec, form: AnswerFormat, tokenizer: Tokenizer, new_call_id: Callable[[], str]
    ) -> None:
        self._spec = spec
        self._form = form
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, form.as_token_ids)
        self._new_call_id = new_call_id
        self._text_offset = 0  # characters so far
        tools = spec.request.tools
        self._parser = None if tools is None else ToolCallParser([name for name, _ in tools.functions])

    def piece(self, news: News) -> Piece:
        """The news as JSON's parts."""
        match news:
            case PromptOutput():
                return self._prompt(news)
            case VisibleOutput():
                piece = self._parsed(
                    None if self._parser is None else self._parser.push(news.text), news.text
                )
                piece.token_ids = list(news.token_ids)
                if self._spec.shows_logprobs:
                    piece.logprobs = self._logprobs(news)
                return piece
            case Finished():
                return self._end(news)

    def _prompt(self, output: PromptOutput) -> Piece:
        piece, sampling = Piece(text=output.text), self._spec.request.sampling
        if sampling.num_prompt_logprobs is not None:
            piece.prompt_logprobs = logprob_format.for_prompt(
                self._names, self._spec.prompt_token_ids, output.logprobs, sampling.num_prompt_logprobs
            )
        if self._spec.prompt_text is not None and sampling.num_logprobs is not None:
            token_ids = self._spec.prompt_token_ids
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, skip_special_tokens=not self._spec.shows_special_tokens
            )
            starts, _ = logprob_format.offsets(map(detokenizer.push, token_ids), 0)
            piece.logprobs = logprob_format.for_completion(
                self._names, token_ids, [None, *output.logprobs], starts, sampling.num_logprobs
            )
        self._text_offset = len(output.text)
        return piece

    def _logprobs(self, output: VisibleOutput) -> dict[str, Any]:
        num_top = self._spec.request.sampling.num_logprobs or 0
        if self._form.is_chat:
            return logprob_format.for_chat(self._names, output.token_ids, output.logprobs, num_top)
        starts, self._text_offset = logprob_format.offsets(output.pieces, self._text_offset)
        return logprob_format.for_completion(self._names, output.token_ids, output.logprobs, starts, num_top)

    def _end(self, finished: Finished) -> Piece:
        finish_reason = finished.finish_reason
        if self._parser is None:
            piece = Piece(text=finished.text)
        else:
            first, last = self._parser.push(finished.text), self._parser.finish()
            piece = self._parsed(ParsedText(first.content + last.content, first.calls + last.calls), "")
            if finish_reason == "stop" and self._parser.num_complete_calls:
                finish_reason = "tool_calls"
        piece.finish_reason = finish_reason
        # As vLLM has it: nothing for the model's own end of text, which nobody asked for.
        reason = finished.stop_reason
        if isinstance(reason, str) or reason in self._spec.request.sampling.stop_token_ids:
            piece.stop_reason = reason
        return piece

    def _parsed(self, parsed: ParsedText | None, text: str) -> Piece:
        if parsed is None:
            return Piece(text=text)
        deltas = []
        for call in parsed.calls:
            delta: dict[str, Any] = {"index": call.index}
            if call.name is not None:
                delta |= {"id": self._new_call_id(), "type": "function"}
            function = {} if call.name is None else {"name": call.name}
            deltas.append({**delta, "function": {**function, "arguments": call.arguments}})
        return Piece(text=parsed.content, tool_calls=deltas)


def merged(pieces: Sequence[Piece]) -> Piece:
    """All news of a choice as one; calls are complete instead of deltas."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.prompt_logprobs = piece.prompt_logprobs or whole.prompt_logprobs
        whole.finish_reason = piece.finish_reason or whole.finish_reason
        whole.stop_reason = piece.stop_reason if piece.stop_reason is not None else whole.stop_reason
        if piece.logprobs is not None:
            whole.logprobs = {} if whole.logprobs is None else whole.logprobs
            for name, values in piece.logprobs.items():
                whole.logprobs.setdefault(name, []).extend(values)
        for delta in piece.tool_calls:
            if "id" in delta:
                call = {name: value for name, value in delta.items() if name != "index"}
                whole.tool_calls.append(call | {"function": dict(delta["function"])})
            else:
                whole.tool_calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return whole
