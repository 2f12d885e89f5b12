"""HTTP client of the commands: finds a server, streams one answer and times it on the client's side."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.errors import ConfigurationError, InvalidRequest, OutriderError

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
CONNECT_TIMEOUT_S = 10.0
# Queueing in front of a slow model is no error. A server that is silent for this long is one.
READ_TIMEOUT_S = 120.0


def server_address(text: str) -> str:
    """The address of a server as `http://host:port`, from one with or without /v1, a final slash or the scheme.

    Servers print their address with /v1, and paths of requests begin with it. Raises InvalidRequest.
    """
    given = text.strip()
    try:
        url = httpx.URL(given if "://" in given else f"http://{given}")
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise InvalidRequest("url", f"{text!r} is not an address like http://host:port")
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


class ApiError(OutriderError):
    """The server refused the request or broke off. The message is the server's own."""


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
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
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


def bearer(api_key: str | None) -> dict[str, str]:
    """The headers that carry a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def new_client(url: str, api_key: str | None = None, timeout_s: float = READ_TIMEOUT_S) -> httpx.AsyncClient:
    """A client for the server at `url`, a `server_address`, with as many connections as requests. It ignores proxies
    in the environment, since the server is usually local."""
    return httpx.AsyncClient(
        base_url=url,
        headers=bearer(api_key),
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s)),
        limits=httpx.Limits(),
        trust_env=False,
    )


async def look_for(client: httpx.AsyncClient, url: str, key_variable: str) -> httpx.Response:
    """The answer of the server at `url` to GET /v1/models, whatever its status.

    Raises ConfigurationError with the address and a remedy for a server that is missing or wants a key, which
    `key_variable` could have named.
    """
    where = f"--url {url}"
    try:
        # A busy server may take its time; a missing one refuses at once.
        response = await client.get(f"{url}{MODELS}", timeout=CONNECT_TIMEOUT_S)
    except httpx.TimeoutException as error:
        raise ConfigurationError(
            f"{where}: no answer to GET {MODELS} within {CONNECT_TIMEOUT_S:g} s; is this the right address, and has "
            "the server finished loading?"
        ) from error
    except httpx.HTTPError as error:
        cause = "connection refused: nothing listens at this address" if is_refused(error) else None
        raise ConfigurationError(
            f"{where} cannot be reached: {cause or str(error) or type(error).__name__}. Start the server, for one "
            "with `outrider serve`, or give the address of a running one with --url"
        ) from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ConfigurationError(
            f"{where} refuses the request with {response.status_code}; give its key with --api-key or {key_variable}"
        )
    return response


def listed_models(response: httpx.Response, url: str) -> list[dict[str, Any]]:
    """The models in an answer to GET /v1/models, at least one. Raises ConfigurationError."""
    if response.status_code != httpx.codes.OK:
        raise ConfigurationError(
            f"--url {url}: GET {MODELS} answers {response.status_code}: {error_text(response.content)}; if this is an "
            "OpenAI-compatible server, name the model with --model"
        )
    try:
        models = [{**entry, "id": str(entry["id"])} for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        models = []
    if not models:
        raise ConfigurationError(
            f"--url {url}: GET {MODELS} lists no model; is this an OpenAI-compatible server? If so, name the model "
            "with --model"
        )
    return models


def is_refused(error: BaseException | None) -> bool:
    """Whether a refused connection is the cause below what httpx, httpcore and anyio raised."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_refused, error.exceptions))
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return is_refused(error.__cause__ or error.__context__)


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], on_pieces: Callable[[list[Piece]], None]
) -> Answer:
    """POSTs `body` with streaming on and returns the whole answer; `on_pieces` gets each chunk's tokens.

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
    answer.finish_reason = choices[0].get("finish_reason") or answer.finish_reason
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
        answer.usage = event["usage"]
        answer.num_tokens = int(answer.usage.get("completion_tokens", 0))
    answer.metrics.update(event.get("metrics") or {})
    return pieces


def error_text(body: bytes) -> str:
    """The message of an OpenAI error body; without one, the first 300 bytes of the body."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
    return str(message)
