"""The servers under test: names, addresses and models."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from command_line.client import listed_models, look_for, server_address
from command_line.load.requests import Server
from outrider.errors import InvalidRequest


def parse_servers(given: Sequence[str]) -> tuple[Server, ...]:
    """Servers from `http://host:port` or `name=http://host:port`, with or without /v1. Raises InvalidRequest."""
    servers: list[Server] = []
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        try:
            url = server_address(url)
        except InvalidRequest:
            raise InvalidRequest(
                "url", f"{text!r} is not an address like http://host:port or name=http://host:port"
            ) from None
        name = name or httpx.URL(url).netloc.decode()
        if name in [server.name for server in servers]:
            raise InvalidRequest("url", f"two servers are called {name!r}; tell them apart with name=http://...")
        servers.append(Server(name, url))
    return tuple(servers)


async def find_model(client: httpx.AsyncClient, server: Server, wanted: str | None) -> Server:
    """`server` with the model to request: `wanted`, else the first that it serves.

    Raises ConfigurationError with the address and a remedy for a server that does not answer.
    """
    response = await look_for(client, server.url, "OPENAI_API_KEY")
    if wanted is not None:
        return Server(server.name, server.url, wanted)  # the list of models is not needed, and some servers have none
    return Server(server.name, server.url, listed_models(response, server.url)[0]["id"])
