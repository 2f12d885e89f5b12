"""The calls that generate: how each reads its body, and what writes its answer.

A new call is a function from a body to `Asked`, and an entry of `CALLS`.
"""

from __future__ import annotations

import secrets
import string
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from coordinator.api.answer.answer_writer import AnswerWriter
from coordinator.api.answer.choice_writer import AnswerFormat
from coordinator.api.answer.openai_response import ResponseWriter
from coordinator.api.anthropic.message_body import MessageBody
from coordinator.api.anthropic.message_writer import MessageWriter
from coordinator.api.responses.response_body import ResponseBody
from coordinator.api.responses.response_writer import ResponsesWriter
from coordinator.api.schema.generation_fields import StreamOptions
from coordinator.api.schema.openai_schema import TEMPLATE_WORDS, ChatBody, CompletionBody, parse_body
from coordinator.api.schema.translated_body import SharedFields, translated
from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.recovery.journal_entry import Kind
from coordinator.service.stored_responses import NOTHING_REMEMBERED, RESPONSE_BYTES_MAX, References, Remembered
from outrider.errors import InvalidRequest
from outrider.text.message_forms import SHORT_ID_LEN
from outrider.text.tokenizer import Tokenizer

_ID_CHARACTERS: Final = string.ascii_letters + string.digits

NewWriter = Callable[[Sequence[GenerationSpec], bool], AnswerWriter]
"""Makes the writer of an answer to requests that differ in the prompt alone; the last tells whether it is stored."""
TemplateWords = Mapping[str, Sequence[str]]
"""Parameters that only a chat template can honour, each with the template's variables that stand for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A generating call as its body asks for it."""

    inputs: Sequence[GenerationInput]  # one for each prompt, at least one
    request_id: str
    is_streaming: bool
    has_event_ids: bool  # each event has an id, so that the stream can be resumed
    ignored: tuple[str, ...]  # parameters that are not used, whatever the model
    template_words: TemplateWords  # those that were sent
    new_writer: NewWriter
    is_resumable: bool = True  # a stream can be resumed, by the id of an event that the client received
    names: Mapping[str, str] = field(default_factory=dict)  # parameters that have other names in the body
    before: Sequence[Mapping[str, Any]] | None = None  # set: the answer is kept, with this conversation before it

    def ignored_by(self, tokenizer: Tokenizer) -> list[str]:
        """The parameters that a model with this tokenizer does not use."""
        return [*self.ignored, *unread(self.template_words, tokenizer)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Referring:
    """A generating call that refers to stored responses, which have to be looked up to read it."""

    references: References
    complete: Callable[[Remembered], Asked]  # raises InvalidRequest


def unread(words: TemplateWords, tokenizer: Tokenizer) -> list[str]:
    """The parameters that the model's chat template does not read."""
    return [name for name, variables in words.items() if not any(map(tokenizer.template_reads, variables))]


def _call_ids(prefix: str, tokenizer: Tokenizer) -> Callable[[], str]:
    """Returns what draws ids of tool calls: those of the API, which begin with `prefix`, or, where the chat template
    would refuse them in the next turn, nine letters and digits."""
    if tokenizer.takes_only_short_call_ids:
        return lambda: "".join(secrets.choice(_ID_CHARACTERS) for _ in range(SHORT_ID_LEN))
    return lambda: f"{prefix}_{uuid.uuid4().hex}"


ReadCall = Callable[[bytes, str], Asked | Referring]
"""Reads a body; the string is the request's id if the body has none. Raises InvalidRequest."""


def _read_openai(kind: type[CompletionBody] | type[ChatBody], raw: bytes, request_id: str) -> Asked:
    body = parse_body(ChatBody, raw) if kind is ChatBody else parse_body(CompletionBody, raw)
    request_id = body.request_id or request_id
    inputs = body.to_inputs(request_id)
    options = body.stream_options or StreamOptions()
    if options.include_event_ids and len(inputs) > 1:
        raise InvalidRequest(
            "stream_options.include_event_ids",
            "include_event_ids: a stream of several prompts cannot be resumed; send them one by one",
        )
    words = TEMPLATE_WORDS if isinstance(body, ChatBody) else ()
    form = AnswerFormat(
        is_chat=kind is ChatBody,
        returns_token_ids=bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        includes_usage=options.include_usage,
        has_continuous_usage=options.include_usage and options.continuous_usage_stats,
        calls_one_function=isinstance(body, ChatBody) and body.calls_one_function,
        names_function=isinstance(body, ChatBody) and body.names_function,
    )

    def new_writer(specs: Sequence[GenerationSpec], is_kept: bool) -> AnswerWriter:
        return ResponseWriter(
            specs,
            form,
            specs[0].served.tokenizer,
            request_id=specs[0].request.request_id if len(specs) == 1 else request_id,
            created_s=int(time.time()),
            new_call_id=_call_ids("call", specs[0].served.tokenizer),
        )

    return Asked(
        inputs=inputs,
        request_id=request_id,
        is_streaming=bool(body.stream),
        has_event_ids=options.include_event_ids,
        ignored=body.ignored,
        template_words={name: (name,) for name in words if getattr(body, name) is not None},
        new_writer=new_writer,
    )


def _read_response(raw: bytes, request_id: str) -> Asked | Referring:
    body = parse_body(ResponseBody, raw)
    is_long = len(raw) > RESPONSE_BYTES_MAX
    complete = partial(_asked_response, body, request_id, is_long=is_long)
    references = body.references()
    return Referring(references=references, complete=complete) if references else complete(NOTHING_REMEMBERED)


def _asked_response(body: ResponseBody, request_id: str, remembered: Remembered, *, is_long: bool) -> Asked:
    is_kept = body.store is not False and not is_long

    def new_writer(specs: Sequence[GenerationSpec], is_kept: bool) -> AnswerWriter:
        return ResponsesWriter(
            specs[0],
            body,
            specs[0].served.tokenizer,
            created_s=int(time.time()),
            new_call_id=_call_ids("call", specs[0].served.tokenizer),
            is_kept=is_kept,
        )

    asked = translated(body, partial(body.translate, remembered), request_id)
    before = [each.model_dump(exclude_unset=True) for each in body.conversation(remembered)] if is_kept else None
    return _asked_once(body, asked, bool(body.stream), new_writer, before)


def _read_message(raw: bytes, request_id: str) -> Asked:
    body = parse_body(MessageBody, raw)

    def new_writer(specs: Sequence[GenerationSpec], is_kept: bool) -> AnswerWriter:
        tokenizer = specs[0].served.tokenizer
        return MessageWriter(specs[0], tokenizer, new_call_id=_call_ids("toolu", tokenizer))

    asked = translated(body, body.translate, request_id)
    return _asked_once(body, asked, bool(body.stream), new_writer)


def _asked_once(
    body: SharedFields,
    asked: GenerationInput,
    is_streaming: bool,
    new_writer: NewWriter,
    before: Sequence[Mapping[str, Any]] | None = None,
) -> Asked:
    return Asked(
        inputs=[asked],
        request_id=asked.request_id,
        is_streaming=is_streaming,
        has_event_ids=False,
        is_resumable=False,
        ignored=body.ignored,
        template_words=body.template_words(),
        names=body.names,
        before=before,
        new_writer=new_writer,
    )


CALLS: Final[Mapping[Kind, ReadCall]] = MappingProxyType(
    {
        "completions": partial(_read_openai, CompletionBody),
        "chat": partial(_read_openai, ChatBody),
        "responses": _read_response,
        "messages": _read_message,
    }
)
"""The calls by the name under which the journal of streams keeps them."""
