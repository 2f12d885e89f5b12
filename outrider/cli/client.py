"""A client of the HTTP API as `demo` and `chat` need it: one streamed answer, timed where the user sits."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.errors import OutriderError

# A queue in front of a slow model is no error; a server that is silent for this long is.
READ_TIMEOUT_S = 120.0


class ApiError(OutriderError):
    """The server refused, or broke off. The message is the server's own."""


@dataclass(frozen=True)
class Piece:
    """The text of one token and how the token came to be: accepted, recovered, bonus or plain."""

    text: str
    origin: str


@dataclass
class Answer:
    """One finished completion. Times are the client's, from sending the request to its first and last token."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def speculation(self) -> dict[str, Any]:
        """The request's speculation statistics; empty when the server gave none."""
        statistics = self.metrics.get("speculative_decoding")
        return statistics if isinstance(statistics, dict) else {}


def new_client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client for the server at `url`. Proxies in the environment are not for a server next door."""
    timeout = httpx.Timeout(10.0, read=READ_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=False)


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], on_pieces: Callable[[list[Piece]], None]
) -> Answer:
    """POSTs `body` with streaming on and returns the whole answer; `on_pieces` sees each chunk's tokens.

    Raises ApiError for a refusal, an error inside the stream, or a server that cannot be reached.
    """
    answer = Answer()
    sent_s = time.perf_counter()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=request) as response:
            if response.status_code != httpx.codes.OK:
                raise ApiError(f"{response.status_code}: {error_text(await response.aread())}")
            async for event in _events(response):
                pieces = absorb(answer, event, time.perf_counter() - sent_s)
                if pieces:
                    on_pieces(pieces)
    except httpx.HTTPError as error:
        raise ApiError(f"{client.base_url}: {error or type(error).__name__}") from error
    answer.num_tokens = answer.num_tokens or len(answer.token_ids)
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
    raise ApiError("the server ended the stream before it was complete")


def absorb(answer: Answer, event: dict[str, Any], since_sent_s: float) -> list[Piece]:
    """Adds one chunk to `answer` and returns the tokens it brought."""
    if "error" in event:
        raise ApiError(error_text(json.dumps(event).encode()))
    choices = event.get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or ""
    detail = choices[0].get("outrider") or event.get("outrider") or {}
    token_ids = detail.get("token_ids") or []
    if text or token_ids:
        answer.ttft_s = answer.ttft_s or since_sent_s
        answer.e2e_s = since_sent_s
    answer.text += text
    answer.token_ids += token_ids
    pieces = [
        Piece(piece, origin)
        for piece, origin in zip(detail.get("pieces") or [], detail.get("origins") or [], strict=False)
    ]
    if text and not pieces:
        pieces = [Piece(text, "plain")]
    answer.pieces += pieces
    if event.get("usage"):
        answer.num_tokens = int(event["usage"].get("completion_tokens", 0))
    answer.metrics.update(event.get("metrics") or {})
    return pieces


def error_text(body: bytes) -> str:
    """The message in an OpenAI error body, else the body itself, cut."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
    return str(message)
