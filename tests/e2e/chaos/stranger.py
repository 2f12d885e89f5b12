"""A stranger: the `openai` package as it comes, at its defaults, which knows nothing of what Outrider adds to its API.

It samples at temperature 1, sends no request id and no event id, and tries again twice by itself, as the package does
for connections that break before an answer and for refusals with 408, 409, 429 or 500 and above. It can notice that an
answer is not whole only by what the API itself says: the finish reason, the usage and the package's exceptions.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import openai

HUNG_S: Final = 240.0
"""Time limit for all tries of one request together. A request that has not ended by then counts as hung."""


class Ending(Enum):
    """The end of a request as its client sees it. Each is one column of the table."""

    COMPLETE = "complete"
    REFUSED = "refused"  # by a status, after the package's own tries
    UNANSWERED = "unanswered"  # no try brought as much as a status
    BROKEN_OFF = "broken off"  # an exception in the middle of an answer
    SILENTLY_SHORT = "silently short"  # no exception, and not all of it: nobody could know
    HUNG = "hung"


@dataclass
class Seen:
    """The outcome of one request. Times are in seconds on the client's monotonic clock."""

    asked_s: float
    num_chars: int = 0
    num_chunks: int = 0  # that brought something
    finish_reason: str | None = None
    num_tokens: int | None = None  # by the usage, which comes last
    statuses: list[int | None] = field(default_factory=list)  # of each HTTP try; None: no answer came
    longest_wait_s: float = 0.0  # for something to read, tries and pauses between them included
    ending: Ending = Ending.HUNG
    status: int | None = None  # of the refusal
    code: str | None = None  # of the refusal, or of the error in the stream
    is_told: bool = False  # where it broke off: an error in the stream said why
    detail: str = ""
    ended_s: float = 0.0

    @property
    def num_tries(self) -> int:
        """The number of HTTP requests that the package sent for the one."""
        return len(self.statuses)


_current: ContextVar[Seen] = ContextVar("seen")


class Stranger:
    """One client of the public address, for as long as the context is open. It may ask many things at once."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        http_client_verify: ssl.SSLContext,
        *,
        model: str = "target",
        hung_s: float = HUNG_S,
    ) -> None:
        """`base_url` without the `/v1`. What is not given here is the package's own choice."""
        self._model = model
        self._hung_s = hung_s
        self._client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1",
            api_key=api_key,
            http_client=openai.DefaultAsyncHttpxClient(
                verify=http_client_verify,
                trust_env=False,
                event_hooks={"request": [_count_try], "response": [_note_status]},
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def ask(
        self,
        prompt: str,
        max_tokens: int,
        is_streaming: bool,
        *,
        is_chat: bool = False,
        into: Seen | None = None,
    ) -> Seen:
        """Sends a request and returns its outcome, which `into` has already while the answer comes. Raises nothing that
        a server can cause."""
        seen = into or Seen(0.0)
        seen.asked_s = time.monotonic()
        reading = asyncio.create_task(self._read(prompt, max_tokens, is_streaming, is_chat, seen))
        try:
            async with asyncio.timeout(self._hung_s):
                await reading
        except TimeoutError:
            seen.ending, seen.detail = Ending.HUNG, f"no end within {self._hung_s:g} s"
        seen.ended_s = time.monotonic()
        return seen

    async def _read(self, prompt: str, max_tokens: int, is_streaming: bool, is_chat: bool, seen: Seen) -> None:
        _current.set(seen)
        clock = _WaitClock(seen)
        asked: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens}
        if is_streaming:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        calls: Any = self._client  # whose overloads know no variable `stream`
        try:
            if is_chat:
                messages = [{"role": "user", "content": prompt}]
                answer = await calls.chat.completions.create(messages=messages, **asked)
            else:
                answer = await calls.completions.create(prompt=prompt, **asked)
            if is_streaming:
                async for chunk in answer:
                    clock.tick()
                    _take(chunk, seen)
            else:
                _take(answer, seen)
            clock.tick()
            seen.ending, seen.detail = ending_without_exception(seen, max_tokens)
        except openai.APIError as error:
            clock.tick()
            _take_error(error, seen)
        except (
            httpx2.HTTPError,
            ValueError,
        ) as error:  # the package lets them through: a cut body, half an event
            clock.tick()
            seen.ending, seen.detail = Ending.BROKEN_OFF, f"{type(error).__name__}: {error}"


class _WaitClock:
    """Keeps the longest time between two things to read."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._before_s = seen.asked_s

    def tick(self) -> None:
        now_s = time.monotonic()
        self._seen.longest_wait_s = max(self._seen.longest_wait_s, now_s - self._before_s)
        self._before_s = now_s


async def _count_try(request: httpx2.Request) -> None:
    _current.get().statuses.append(None)


async def _note_status(response: httpx2.Response) -> None:
    _current.get().statuses[-1] = response.status_code


def _take(answer: Any, seen: Seen) -> None:
    """A chunk, or an answer in one piece; of a completion or of a chat."""
    for choice in answer.choices:
        part = getattr(choice, "delta", None) or getattr(choice, "message", None)
        text = choice.text if part is None else part.content
        if text:
            seen.num_chars += len(text)
            seen.num_chunks += 1
        if choice.finish_reason is not None:
            seen.finish_reason = choice.finish_reason
    if answer.usage is not None:
        seen.num_tokens = answer.usage.completion_tokens


def ending_without_exception(seen: Seen, max_tokens: int) -> tuple[Ending, str]:
    """Whether the answer was whole, by the API's own words, and what was missing. Pure."""
    short = Ending.SILENTLY_SHORT
    if seen.finish_reason is None:
        return short, f"no finish reason after {seen.num_chars} characters"
    if seen.num_tokens is None:
        return short, f"ended by {seen.finish_reason}, and no usage came"
    if seen.num_tokens > max_tokens or (seen.finish_reason == "length" and seen.num_tokens < max_tokens):
        return (
            short,
            f"ended by {seen.finish_reason} after {seen.num_tokens} tokens, and {max_tokens} were asked for",
        )
    # A chunk that brings text brings a token at the least.
    if seen.num_chunks > seen.num_tokens:
        return short, f"{seen.num_chunks} chunks, and by the usage {seen.num_tokens} tokens"
    return Ending.COMPLETE, ""


def _take_error(error: openai.APIError, seen: Seen) -> None:
    seen.detail = f"{type(error).__name__}: {error.message}"
    seen.code = error.code
    if isinstance(error, openai.APIStatusError):
        seen.ending, seen.status = Ending.REFUSED, error.status_code
    elif seen.statuses and seen.statuses[-1] is not None:
        # The package names what came as an error event by its base class alone.
        seen.ending, seen.is_told = Ending.BROKEN_OFF, type(error) is openai.APIError
    else:
        seen.ending = Ending.UNANSWERED
