"""Response bodies of the OpenAI calls, as plain dictionaries. Pure: the time of creation is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.generation_request import GenerationSpec
from coordinator.request_session import Finished
from coordinator.text_output import VisibleOutput
from outrider.errors import InvalidRequest, NotFound, OutriderError
from protos.outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseWriter:
    """Writes one request's answer, whole or in chunks."""

    spec: GenerationSpec
    created_s: int  # Unix time
    is_chat: bool
    returns_token_ids: bool
    includes_usage: bool  # of a stream; an answer in one piece always carries it

    def whole(self, outputs: Sequence[VisibleOutput], finished: Finished) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        text = "".join(output.text for output in outputs) + finished.text
        choice: dict[str, Any] = {
            "index": 0,
            **({"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": finished.finish_reason,
            "stop_reason": self._stop_reason(finished),
        }
        body = self._frame([choice], is_chunk=False) | self._usage(finished)
        if self.returns_token_ids:
            choice["token_ids"] = [token_id for output in outputs for token_id in output.token_ids]
            self._place_prompt_token_ids(body, choice)
        if self.spec.request.speculation.detail:
            body["outrider"] = _detail(outputs)
        return body

    def opening(self) -> dict[str, Any] | None:
        """What a stream says before the first token: the role, in a chat."""
        if not self.is_chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, output: VisibleOutput, *, is_first: bool) -> dict[str, Any] | None:
        """One step's news; None when there is none, for all its text is held back."""
        is_detailed = self.spec.request.speculation.detail
        if not output.text and not (is_detailed or self.returns_token_ids):
            return None
        choice = self._text(output.text) | {"finish_reason": None}
        body = self._chunk(choice)
        if self.returns_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if is_first:
                self._place_prompt_token_ids(body, choice)
        if is_detailed:
            body["outrider"] = _detail([output])
        return body

    def closing(self, finished: Finished) -> list[dict[str, Any]]:
        """The last chunks: the rest of the text with the reason to end, then usage where asked for."""
        ending = {"finish_reason": finished.finish_reason, "stop_reason": self._stop_reason(finished)}
        chunks = [self._chunk(self._text(finished.text) | ending)]
        if self.includes_usage:
            chunks.append(self._frame([], is_chunk=True) | self._usage(finished))
        return chunks

    def _text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        choice.update(index=0, logprobs=None)
        body = self._frame([choice], is_chunk=True)
        return body | {"usage": None} if self.includes_usage else body

    def _frame(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = (
            ("chat.completion.chunk" if is_chunk else "chat.completion")
            if self.is_chat
            else "text_completion"
        )
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.spec.request.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.spec.model,
            "choices": choices,
        }

    def _place_prompt_token_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        # vLLM has them beside the choices of a chat and within those of a completion.
        (body if self.is_chat else choice)["prompt_token_ids"] = list(self.spec.prompt_token_ids)

    def _stop_reason(self, finished: Finished) -> str | int | None:
        """As vLLM has it: nothing for the model's own end of text, which nobody asked for."""
        reason = finished.stop_reason
        is_asked_for = isinstance(reason, str) or reason in self.spec.request.sampling.stop_token_ids
        return reason if is_asked_for else None

    def _usage(self, finished: Finished) -> dict[str, Any]:
        speculation = self.spec.request.speculation
        return {
            "usage": {
                "prompt_tokens": finished.num_prompt_tokens,
                "completion_tokens": finished.num_output_tokens,
                "total_tokens": finished.num_prompt_tokens + finished.num_output_tokens,
            },
            "metrics": {
                **finished.times.to_json(finished.num_output_tokens),
                "decoding_mode": _short_name(
                    common_pb2.DecodingMode, finished.decoding_mode, "DECODING_MODE_"
                ),
                "speculative_decoding": finished.counts.to_json(
                    num_speculative_tokens=speculation.num_speculative_tokens, is_detailed=speculation.detail
                ),
            },
        }


def error_body(error: OutriderError) -> dict[str, Any]:
    """OpenAI's error body. `param` names the parameter where the error is about one."""
    parameter = error.parameter if isinstance(error, InvalidRequest | NotFound) else None
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
