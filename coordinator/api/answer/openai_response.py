"""Response bodies of the OpenAI calls, as plain dictionaries. Pure: the time of creation is passed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring as json_string
from typing import Any, Final

from coordinator.api.answer.answer_size import SMALL_ANSWER_VALUES, num_values, written_bytes
from coordinator.api.answer.choice_writer import AnswerFormat, ChoiceWriter, Piece, merged
from coordinator.api.answer.json_text import to_json_text
from coordinator.intake.generation_request import GenerationSpec
from coordinator.observability.statistics import slo_to_json
from coordinator.output.text_output import PromptOutput, VisibleOutput
from coordinator.recovery.resumption import ResumePoint
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.errors import Conflict, InvalidRequest, NotFound, OutriderError
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2

_PLACEHOLDER: Final = "\0"  # not contained in what follows the text in a chunk


class ResponseWriter:
    """Writes the answer to one request, whole or in chunks."""

    end = "data: [DONE]\n\n"
    answer = None  # nothing refers to it

    def __init__(
        self,
        specs: Sequence[GenerationSpec],
        form: AnswerFormat,
        tokenizer: Tokenizer,
        *,
        request_id: str,
        created_s: int,
        new_call_id: Callable[[], str],
    ) -> None:
        """`specs`: one for each prompt, which differ in the prompt alone; each has as many choices. `created_s` is Unix
        time; `new_call_id` draws the id of a tool call."""
        self._specs = specs
        self._spec = spec = specs[0]
        self._form = form
        self._tokenizer = tokenizer
        self.request_id = request_id
        self._created_s = created_s
        self._choices = [
            ChoiceWriter(each, form, tokenizer, new_call_id) for each in specs for _ in range(each.num_choices)
        ]
        self._num_prompt_tokens = sum(len(each.prompt_token_ids) for each in specs)
        self._num_output_tokens = 0  # so far
        self._has_shown_prompt_ids = [False] * len(self._choices)
        request = spec.request
        self._has_only_text = not (
            spec.plan
            or request.is_detailed
            or spec.shows_logprobs
            or form.returns_token_ids
            or form.has_continuous_usage
        )
        self._frames: list[tuple[str, str] | None] = [None] * len(self._choices)

    def whole(self, collected: Sequence[ChoiceOutput], finished: RequestFinished) -> dict[str, Any]:
        """Builds the answer to a request that does not stream."""
        choices: list[dict[str, Any]] = []
        items = [[each.item for each in collected if each.index == index] for index in range(len(self._choices))]
        pieces = [merged(list(map(writer.piece, own))) for writer, own in zip(self._choices, items, strict=True)]
        body = self._frame(choices, is_chunk=False) | self._usage(finished)
        for index, (piece, own) in enumerate(zip(pieces, items, strict=True)):
            choice: dict[str, Any] = {
                "index": index,
                **self._content(piece),
                "logprobs": piece.logprobs,
                "finish_reason": self._finish_reason(piece),
                "stop_reason": piece.stop_reason,
            }
            choices.append(choice)
            self._of_prompt(body, choice)["prompt_logprobs"] = piece.prompt_logprobs
            if self._form.returns_token_ids:
                choice["token_ids"] = piece.token_ids
                self._place_prompt_token_ids(index, body, choice)
            if self._spec.request.is_detailed:
                outputs = [each for each in own if isinstance(each, VisibleOutput)]
                (body if len(self._choices) == 1 else choice)["outrider"] = _detail(outputs)
        return body

    def num_values(self, item: ChoiceOutput) -> int:
        """Estimates the tokens and log probabilities that are written for an item."""
        return num_values(self._spec_of(item.index), item.item)

    def size_of(self, item: ChoiceOutput) -> int:
        """Estimates the peak bytes that `whole` takes for an item, besides the item itself."""
        return written_bytes(self._spec, item.item, self._tokenizer, is_chat=self._form.is_chat)

    def opening(self, points: Sequence[ResumePoint] | None = None) -> list[str]:
        """Writes the chunks before the first token: the role, for each sequence of a chat that has not begun."""
        if not self._form.is_chat:
            return []
        return [
            sse(self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, None))
            for index in range(len(self._choices))
            if points is None or not points[index].has_begun
        ]

    def is_long(self, item: ChoiceOutput) -> bool:
        """Whether writing an item takes long enough to do it in a thread."""
        num = self.num_values(item)
        if self._form.returns_token_ids and not self._has_shown_prompt_ids[item.index]:
            num += len(self._spec_of(item.index).prompt_token_ids)
        return num > SMALL_ANSWER_VALUES

    def event(self, item: ChoiceOutput) -> str | None:
        """Writes an item as a server-sent event; None if there is nothing to show."""
        output = item.item
        if self._has_only_text and isinstance(output, VisibleOutput):
            if not output.text:
                return None
            before, after = self._frames[item.index] or self._frame_of_text(item.index)
            return f"{before}{json_string(output.text)}{after}"
        is_long = isinstance(output, PromptOutput) or self.is_long(item)
        chunk = self.chunk(item)
        if is_long and chunk is not None:
            return f"data: {to_json_text(chunk)}\n\n"
        return None if chunk is None else sse(chunk)

    def _frame_of_text(self, index: int) -> tuple[str, str]:
        """Returns the JSON before and after the text of a chunk that has only text, as most have."""
        chunk = self.chunk(ChoiceOutput(index, VisibleOutput(_PLACEHOLDER, (), (), ())))
        assert chunk is not None
        before, _, after = sse(chunk).rpartition(json_string(_PLACEHOLDER))
        self._frames[index] = before, after
        return before, after

    def chunk(self, item: ChoiceOutput) -> dict[str, Any] | None:
        """Builds a chunk of a stream; None if there is nothing to show, because all text is held back."""
        piece = self._choices[item.index].piece(item.item)
        self._num_output_tokens += len(piece.token_ids)
        is_detailed = self._spec.request.is_detailed and isinstance(item.item, VisibleOutput)
        shows_token_ids = self._form.returns_token_ids and bool(piece.token_ids)
        if not (
            piece.text or piece.reasoning or piece.tool_calls or piece.logprobs or piece.prompt_logprobs
            or piece.finish_reason or is_detailed or shows_token_ids
        ):  # fmt: skip
            return None
        choice = self._delta(piece) | {"finish_reason": self._finish_reason(piece)}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        body = self._chunk(item.index, choice, piece.logprobs)
        if piece.prompt_logprobs is not None:
            self._of_prompt(body, choice)["prompt_logprobs"] = piece.prompt_logprobs
        if shows_token_ids:
            choice["token_ids"] = piece.token_ids
            if not self._has_shown_prompt_ids[item.index]:
                self._has_shown_prompt_ids[item.index] = True
                self._place_prompt_token_ids(item.index, body, choice)
        if is_detailed and isinstance(item.item, VisibleOutput):
            body["outrider"] = _detail([item.item])
        return body

    def closing(self, finished: RequestFinished) -> list[str]:
        """Writes the last chunk of a stream: usage, if requested."""
        if not self._form.includes_usage:
            return []
        return [sse(self._frame([], is_chunk=True) | self._usage(finished))]

    def failure(self, error: OutriderError) -> str:
        return sse(error_body(error))

    def _spec_of(self, index: int) -> GenerationSpec:
        """The request of the prompt that a choice belongs to."""
        return self._specs[index // self._spec.num_choices]

    def _finish_reason(self, piece: Piece) -> str | None:
        if self._form.names_function and piece.finish_reason == "tool_calls":
            return "stop"  # as at OpenAI and vLLM
        if self._form.calls_one_function and piece.finish_reason == "tool_calls":
            return "function_call"
        return piece.finish_reason

    def _content(self, piece: Piece) -> dict[str, Any]:
        if not self._form.is_chat:
            return {"text": piece.text}
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None, **_reasoning(piece)}
        if piece.reasoning or piece.tool_calls:
            message["content"] = piece.text or None
        if piece.tool_calls:
            message |= self._calls(piece)
        return {"message": message}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not self._form.is_chat:
            return {"text": piece.text}
        delta = _reasoning(piece) | ({"content": piece.text} if piece.text else {})
        return {"delta": delta | (self._calls(piece) if piece.tool_calls else {})}

    def _calls(self, piece: Piece) -> dict[str, Any]:
        if self._form.calls_one_function:
            return {"function_call": piece.tool_calls[0]["function"]}
        return {"tool_calls": piece.tool_calls}

    def _chunk(self, index: int, choice: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice.update(index=index, logprobs=logprobs)
        body = self._frame([choice], is_chunk=True)
        if not self._form.includes_usage:
            return body
        usage = self._counts(self._num_output_tokens) if self._form.has_continuous_usage else None
        return body | {"usage": usage}

    def _frame(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        is_chat = self._form.is_chat
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
        return {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + self.request_id,
            "object": kind,
            "created": self._created_s,
            "model": self._spec.model,
            "choices": choices,
        }

    def _of_prompt(self, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        """The object that the prompt's data belongs to: as in vLLM, the body of a chat, the choice of a completion."""
        return body if self._form.is_chat else choice

    def _place_prompt_token_ids(self, index: int, body: dict[str, Any], choice: dict[str, Any]) -> None:
        self._of_prompt(body, choice)["prompt_token_ids"] = list(self._spec_of(index).prompt_token_ids)

    def _counts(self, num_output_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
        }

    def _usage(self, finished: RequestFinished) -> dict[str, Any]:
        candidates = finished.candidates
        # The first sequence of each prompt only, because the others may share what it computed.
        firsts = candidates[:: self._spec.num_candidates]
        cached = {"cached_tokens": sum(each.num_cached_tokens or 0 for each in firsts)}
        usage = self._counts(finished.num_generated_tokens) | {"prompt_tokens_details": cached}
        details = {}
        if self._form.is_chat:
            details["reasoning_tokens"] = sum(each.num_reasoning_tokens for each in self._choices)
        if self._spec.request.prediction is not None:
            details |= _prediction_usage(finished)
        if details:
            usage["completion_tokens_details"] = details
        return {"usage": usage, "metrics": metrics_json(self._spec, finished)}


def _prediction_usage(finished: RequestFinished) -> dict[str, int]:
    counts = finished.counts
    return {
        "accepted_prediction_tokens": counts.num_accepted_prediction_tokens,
        "rejected_prediction_tokens": counts.num_rejected_prediction_tokens,
    }


def metrics_json(spec: GenerationSpec, finished: RequestFinished) -> dict[str, Any]:
    """Builds the `metrics` of an answer: times, and how it was decoded."""
    request = spec.request
    metrics: dict[str, Any] = {
        **finished.times_json,
        "decoding_mode": _short_name(common_pb2.DecodingMode, finished.candidates[0].decoding_mode, "DECODING_MODE_"),
        "exactness": _short_name(common_pb2.Exactness, finished.candidates[0].exactness, "EXACTNESS_"),
        "speculative_decoding": finished.counts.to_json(
            num_speculative_tokens=spec.num_speculative_tokens,
            is_detailed=request.is_detailed,
            num_output_tokens=finished.num_output_tokens,
        ),
    }
    if outcome := finished.outcome(spec.objective):
        metrics["slo"] = slo_to_json(spec.objective, outcome)
    if spec.sampling.seed is not None:
        metrics["seed"] = spec.sampling.seed
    if spec.assignment is not None:
        metrics["canary_arm"] = spec.assignment.arm
    return metrics


def _reasoning(piece: Piece) -> dict[str, Any]:
    """Writes the reasoning under both of its names: clients read one or the other, and none adds them up."""
    return {"reasoning": piece.reasoning, "reasoning_content": piece.reasoning} if piece.reasoning else {}


def sse(content: dict[str, Any]) -> str:
    """Writes a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_body(error: OutriderError) -> dict[str, Any]:
    """Builds OpenAI's error body. `param` names the parameter if the error is about one."""
    parameter = error.parameter if isinstance(error, InvalidRequest | NotFound | Conflict) else None
    return {"error": {"message": error.told, "type": error.error_type, "param": parameter, "code": error.code}}


def _detail(outputs: Sequence[VisibleOutput]) -> dict[str, Any]:
    origins = [origin for output in outputs for origin in output.origins]
    return {
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "origins": [_short_name(common_pb2.TokenOrigin, origin, "TOKEN_ORIGIN_") for origin in origins],
        "pieces": [piece for output in outputs for piece in output.pieces],
    }


def _short_name(kind: Any, value: int, prefix: str) -> str:
    """Shortens an enum's name: TOKEN_ORIGIN_BONUS to "bonus", a value of a newer worker to "unspecified"."""
    name = kind.Name(value) if value in kind.values() else prefix + "UNSPECIFIED"
    return str(name).removeprefix(prefix).lower()
