"""Response bodies of the OpenAI calls, as plain dictionaries. Pure: the time of creation is passed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring as json_string
from typing import Any, Final

from coordinator.answer_size import SMALL_ANSWER_VALUES, num_values, written_bytes
from coordinator.choice_writer import AnswerFormat, ChoiceWriter, Piece, merged
from coordinator.choices import ChoiceNews, RequestFinished
from coordinator.generation_request import GenerationSpec
from coordinator.json_text import to_json_text
from coordinator.resumption import ResumePoint
from coordinator.statistics import SpeculationCounts, times_to_json
from coordinator.text_output import PromptOutput, VisibleOutput
from outrider.errors import Conflict, InvalidRequest, NotFound, OutriderError
from outrider.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2

_PLACEHOLDER: Final = "\0"  # nothing that follows the text in a chunk contains it


class ResponseWriter:
    """Writes one request's answer, whole or in chunks."""

    def __init__(
        self,
        spec: GenerationSpec,
        form: AnswerFormat,
        tokenizer: Tokenizer,
        *,
        created_s: int,
        new_call_id: Callable[[], str],
    ) -> None:
        """`created_s` is Unix time; `new_call_id` names a tool call."""
        self._spec = spec
        self._form = form
        self._tokenizer = tokenizer
        self._created_s = created_s
        self._choices = [ChoiceWriter(spec, form, tokenizer, new_call_id) for _ in range(spec.num_choices)]
        self._has_shown_prompt_ids = [False] * spec.num_choices
        request = spec.request
        self._has_only_text = not (
            request.tools or request.is_detailed or spec.shows_logprobs or form.returns_token_ids
        )
        self._frames: list[tuple[str, str] | None] = [None] * spec.num_choices

    @property
    def request_id(self) -> str:
        return self._spec.request.request_id

    def whole(self, news: Sequence[ChoiceNews], finished: RequestFinished) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices: list[dict[str, Any]] = []
        body = self._frame(choices, is_chunk=False) | self._usage(finished)
        for index, writer in enumerate(self._choices):
            own = [each.news for each in news if each.index == index]
            piece = merged([writer.piece(each) for each in own])
            choice: dict[str, Any] = {
                "index": index,
                **self._content(piece),
                "logprobs": piece.logprobs,
                "finish_reason": piece.finish_reason,
                "stop_reason": piece.stop_reason,
            }
            choices.append(choice)
            self._place_prompt_logprobs(piece, body, choice)
            if self._form.returns_token_ids:
                choice["token_ids"] = piece.token_ids
                self._place_prompt_token_ids(body, choice)
            if self._spec.request.is_detailed:
                outputs = [each for each in own if isinstance(each, VisibleOutput)]
                (body if len(self._choices) == 1 else choice)["outrider"] = _detail(outputs)
        return body

    def size_of(self, item: ChoiceNews) -> int:
        """About how many bytes `whole` takes for it at its peak, beside the news."""
        return written_bytes(self._spec, item.news, self._tokenizer, is_chat=self._form.is_chat)

    def opening(self, points: Sequence[ResumePoint] | None = None) -> list[dict[str, Any]]:
        """What a stream says before the first token: the role, in a chat. Texts that have begun have said it."""
        if not self._form.is_chat:
            return []
        return [
            self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, None)
            for index in range(len(self._choices))
            if points is None or not points[index].has_begun
        ]

    def is_long(self, item: ChoiceNews) -> bool:
        """Whether `event` takes so long for it that a thread should do it."""
        num = num_values(self._spec, item.news)
        if self._form.returns_token_ids and not self._has_shown_prompt_ids[item.index]:
            num += len(self._spec.prompt_token_ids)
        return num > SMALL_ANSWER_VALUES

    def event(self, item: ChoiceNews) -> str | None:
        """`chunk` as a server-sent event."""
        news = item.news
        if self._has_only_text and isinstance(news, VisibleOutput):
            if not news.text:
                return None
            before, after = self._frames[item.index] or self._frame_of_text(item.index)
            return f"{before}{json_string(news.text)}{after}"
        is_long = isinstance(news, PromptOutput) or self.is_long(item)
        chunk = self.chunk(item)
        if is_long and chunk is not None:
            return f"data: {to_json_text(chunk)}\n\n"
        return None if chunk is None else sse(chunk)

    def _frame_of_text(self, index: int) -> tuple[str, str]:
        """What stands before and after the text of a chunk that carries nothing else, which is most of them."""
        chunk = self.chunk(ChoiceNews(index, VisibleOutput(_PLACEHOLDER, (), (), ())))
        assert chunk is not None
        before, _, after = sse(chunk).rpartition(json_string(_PLACEHOLDER))
        self._frames[index] = before, after
        return before, after

    def chunk(self, item: ChoiceNews) -> dict[str, Any] | None:
        """The news as a chunk of a stream; None when there is nothing to show, for all its text is held back."""
        piece = self._choices[item.index].piece(item.news)
        is_detailed = self._spec.request.is_detailed and isinstance(item.news, VisibleOutput)
        shows_token_ids = self._form.returns_token_ids and bool(piece.token_ids)
        if not (
            piece.text or piece.tool_calls or piece.logprobs or piece.prompt_logprobs or piece.finish_reason
            or is_detailed or shows_token_ids
        ):  # fmt: skip
            return None
        choice = self._delta(piece) | {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        body = self._chunk(item.index, choice, piece.logprobs)
        self._place_prompt_logprobs(piece, body, choice)
        if shows_token_ids:
            choice["token_ids"] = piece.token_ids
            if not self._has_shown_prompt_ids[item.index]:
                self._has_shown_prompt_ids[item.index] = True
                self._place_prompt_token_ids(body, choice)
        if is_detailed and isinstance(item.news, VisibleOutput):
            body["outrider"] = _detail([item.news])
        return body

    def closing(self, finished: RequestFinished) -> list[dict[str, Any]]:
        """The last chunk of a stream: usage, where asked for."""
        if not self._form.includes_usage:
            return []
        return [self._frame([], is_chunk=True) | self._usage(finished)]

    def _content(self, piece: Piece) -> dict[str, Any]:
        if not self._form.is_chat:
            return {"text": piece.text}
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.tool_calls:
            message |= {"content": piece.text or None, "tool_calls": piece.tool_calls}
        return {"message": message}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not self._form.is_chat:
            return {"text": piece.text}
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        return {"delta": delta | ({"tool_calls": piece.tool_calls} if piece.tool_calls else {})}

    def _chunk(self, index: int, choice: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice.update(index=index, logprobs=logprobs)
        body = self._frame([choice], is_chunk=True)
        return body | {"usage": None} if self._form.includes_usage else body

    def _frame(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        is_chat = self._form.is_chat
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if is_chat else "text_completion"
        return {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + self._spec.request.request_id,
            "object": kind,
            "created": self._created_s,
            "model": self._spec.model,
            "choices": choices,
        }

    # vLLM has what concerns the prompt beside the choices of a chat and within those of a completion.
    def _place_prompt_token_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        (body if self._form.is_chat else choice)["prompt_token_ids"] = list(self._spec.prompt_token_ids)

    def _place_prompt_logprobs(self, piece: Piece, body: dict[str, Any], choice: dict[str, Any]) -> None:
        if piece.prompt_logprobs is not None:
            (body if self._form.is_chat else choice)["prompt_logprobs"] = piece.prompt_logprobs

    def _usage(self, finished: RequestFinished) -> dict[str, Any]:
        request, candidates = self._spec.request, finished.candidates
        num_prompt, num_output = len(self._spec.prompt_token_ids), finished.num_output_tokens
        metrics: dict[str, Any] = {
            **times_to_json([(each.times, each.num_output_tokens) for each in candidates]),
            "decoding_mode": _short_name(
                common_pb2.DecodingMode, candidates[0].decoding_mode, "DECODING_MODE_"
            ),
            "speculative_decoding": SpeculationCounts.merged([each.counts for each in candidates]).to_json(
                num_speculative_tokens=request.speculation.num_speculative_tokens,
                is_detailed=request.is_detailed,
                num_output_tokens=num_output,
            ),
        }
        if self._spec.sampling.seed is not None:
            metrics["seed"] = self._spec.sampling.seed
        if self._spec.assignment is not None:
            metrics["canary_arm"] = self._spec.assignment.arm
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if (
            candidates[0].num_cached_tokens is not None
        ):  # of the first one; the others may share what it computed
            usage["prompt_tokens_details"] = {"cached_tokens": candidates[0].num_cached_tokens}
        return {"usage": usage, "metrics": metrics}


def sse(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_body(error: OutriderError) -> dict[str, Any]:
    """OpenAI's error body. `param` names the parameter where the error is about one."""
    parameter = error.parameter if isinstance(error, InvalidRequest | NotFound | Conflict) else None
    return {
        "error": {"message": error.message, "type": error.error_type, "param": parameter, "code": error.code}
    }


def _detail(outputs: Sequence[VisibleOutput]) -> dict[str, Any]:
    origins = [origin for output in outputs for origin in output.origins]
    return {
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "origins": [_short_name(common_pb2.TokenOrigin, origin, "TOKEN_ORIGIN_") for origin in origins],
        "pieces": [piece for output in outputs for piece in output.pieces],
    }


def _short_name(kind: Any, value: int, prefix: str) -> str:
    """TOKEN_ORIGIN_BONUS as "bonus"; "unspecified" for a value that a newer worker may send."""
    name = kind.Name(value) if value in kind.values() else prefix + "UNSPECIFIED"
    return str(name).removeprefix(prefix).lower()
