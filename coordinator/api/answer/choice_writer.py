"""Writes one choice of an OpenAI answer as JSON, whole or in pieces. Pure.

Invariant: the whole answer is the sum of the pieces that a stream would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.api.answer.token_text import TokenText
from coordinator.formats.answer_parts import ParsedText, ReasoningStart
from coordinator.intake.generation_request import GenerationSpec
from coordinator.output import logprobs as logprob_format
from coordinator.output.logprobs import TokenNames
from coordinator.output.sequence_output import OutputItem, SequenceFinished
from coordinator.output.text_output import PromptOutput, VisibleOutput
from outrider.text.detokenizer import IncrementalDetokenizer
from outrider.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The form of an answer that the client requested."""

    is_chat: bool
    returns_token_ids: bool = False
    as_token_ids: bool = False  # names tokens of log probabilities "token_id:123"
    includes_usage: bool = False  # in a stream; a whole answer always has it
    has_continuous_usage: bool = False  # each chunk of a stream has the usage so far
    calls_one_function: bool = False  # a call has OpenAI's former form, `function_call`
    names_function: bool = False  # the client named the function to call: it ends with "stop"


@dataclass(slots=True, kw_only=True)
class Piece:
    """A piece of one choice of an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # deltas
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChoiceWriter:
    """Writes one choice of an answer. `piece` takes its items of output in order."""

    def __init__(
        self, spec: GenerationSpec, form: AnswerFormat, tokenizer: Tokenizer, new_call_id: Callable[[], str]
    ) -> None:
        self._spec = spec
        self._form = form
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, form.as_token_ids)
        self._new_call_id = new_call_id
        self._text_offset = 0  # characters so far
        self._parser = None if spec.plan is None else spec.plan.new_parser()
        self._reasons = spec.plan is not None and spec.plan.rules.reasoning is not ReasoningStart.ABSENT
        self._token_text = TokenText()
        self.num_reasoning_tokens = 0
        """Tokens of reasoning so far, shown or not."""
        self._num_hidden_tokens = 0  # since something was parsed

    def piece(self, item: OutputItem) -> Piece:
        """Converts an item of output to the parts of a JSON choice."""
        match item:
            case PromptOutput():
                return self._prompt(item)
            case VisibleOutput():
                piece = self._parsed(self._parse(item), item.text)
                piece.token_ids = list(item.token_ids)
                if self._spec.shows_logprobs:
                    piece.logprobs = self._logprobs(item)
                return piece
            case SequenceFinished():
                return self._end(item)

    def _prompt(self, output: PromptOutput) -> Piece:
        piece, sampling = Piece(text=output.text), self._spec.request.sampling
        if sampling.num_prompt_logprobs is not None:
            piece.prompt_logprobs = logprob_format.for_prompt(
                self._names, self._spec.prompt_token_ids, output.logprobs, sampling.num_prompt_logprobs
            )
        has_scores = self._spec.prompt_text is not None and not self._form.is_chat
        if has_scores and sampling.num_logprobs is not None:
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

    def _end(self, finished: SequenceFinished) -> Piece:
        finish_reason = finished.finish_reason
        if self._parser is None:
            piece = Piece(text=finished.text)
        else:
            parts = [self._parse_part(text, num) for text, num in self._token_text.split(finished.text, ())]
            piece = self._parsed(ParsedText.joined([*parts, self._parser.finish()]), "")
            if finish_reason == "stop" and self._parser.num_complete_calls:
                finish_reason = "tool_calls"
        piece.finish_reason = finish_reason
        # As in vLLM, the model's own end token is no stop reason.
        reason = finished.stop_reason
        if isinstance(reason, str) or reason in self._spec.request.sampling.stop_token_ids:
            piece.stop_reason = reason
        return piece

    def _parse(self, output: VisibleOutput) -> ParsedText | None:
        if self._parser is None:
            return None
        if not self._reasons:
            return self._parser.push(output.text)
        # Token by token: how many of them one output has is the load's doing.
        parts = self._token_text.split(output.text, output.pieces)
        return ParsedText.joined([self._parse_part(text, num_tokens) for text, num_tokens in parts])

    def _parse_part(self, text: str, num_tokens: int) -> ParsedText:
        """Parses the next text and counts its tokens if it is reasoning, with those before it that are of no part."""
        assert self._parser is not None
        parsed = self._parser.push(text)
        self._num_hidden_tokens += num_tokens
        if parsed.reasoning or parsed.content or parsed.calls:
            if parsed.reasoning:
                self.num_reasoning_tokens += self._num_hidden_tokens
            self._num_hidden_tokens = 0
        return parsed

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
        reasoning = parsed.reasoning if self._spec.request.includes_reasoning else ""
        return Piece(text=parsed.content, reasoning=reasoning, tool_calls=deltas)


def merged(pieces: Sequence[Piece]) -> Piece:
    """Merges all pieces of a choice; calls are complete instead of deltas."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.reasoning += piece.reasoning
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
