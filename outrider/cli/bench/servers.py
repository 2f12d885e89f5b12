"""The servers under test: their names, and whether they are there at all."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from outrider.cli.bench.requests import CONNECT_TIMEOUT_S, Server, transport_error
from outrider.cli.client import error_text
from outrider.errors import ConfigurationError, InvalidRequest


def parse_servers(given: Sequence[str]) -> tuple[Server, ...]:
    """Servers from `http://host:port` or `name=http://host:port`, with or without /v1. Raises InvalidRequest."""
    servers: list[Server] = []
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidRequest(
                "url", f"{text!r} is not an address like http://host:port or name=http://host:port"
            )
        name = name or parsed.netloc.decode()
        if name in [server.name for server in servers]:
            raise InvalidRequest(
                "url", f"two servers are called {name!r}; tell them apart with name=http://..."
            )
        servers.append(Server(name, url.rstrip("/").removesuffix("/v1")))
    return tuple(servers)


async def find_model(client: httpx.AsyncClient, server: Server, wanted: str | None) -> Server:
    """`server` with the model to ask for: `wanted`, else the first that it serves.

    Raises ConfigurationError, naming the address and a way out, for a server that does not answer.
    """
    where = f"--url {server.url}"
    try:
        # A server that is busy with others' requests may take its time; one that is not there says so at once.
        response = await client.get(f"{server.url}/v1/models", timeout=CONNECT_TIMEOUT_S)
    except httpx.TimeoutException as error:
        raise ConfigurationError(
            f"{where}: no answer to GET /v1/models within {CONNECT_TIMEOUT_S:g} s; is this the right address, and has "
            "the server finished loading?"
        ) from error
    except httpx.HTTPError as error:
        raise ConfigurationError(
            f"{where} cannot be reached: {transport_error(error)}. Start the server, for one with `outrider serve`, or "
            "give the address of a running one with --url"
        ) from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ConfigurationError(
            f"{where} refuses us with {response.status_code}; give its key with --api-key or OPENAI_API_KEY"
        )
    if wanted is not None:
        return Server(server.name, server.url, wanted)  # the list of models is not needed, and some have none
    if response.status_code != httpx.codes.OK:
        raise ConfigurationError(
            f"{where}: GET /v1/models says {response.status_code}: {error_text(response.content)}; if this is an "
            "OpenAI-compatible server, name the model with --model"
        )
    try:
        return Server(server.name, server.url, str(response.json()["data"][0]["id"]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(
            f"{where}: GET /v1/models lists no model; is this an OpenAI-compatible server? If so, name the model with "
            "--model"
        ) from error
