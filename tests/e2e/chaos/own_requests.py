"""Requests that a fault sends itself, each to a coordinator of its choice or to the balancer."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import grpc
import httpx

from tests.e2e.chaos.certificates import TENANTS
from tests.e2e.chaos.fleet import Fleet

TIMEOUT_S: Final = 90.0


@dataclass(frozen=True)
class Door:
    """An entry point for requests, and the credentials that a client has to show there."""

    http_url: str
    grpc_address: str
    key: str
    context: ssl.SSLContext
    credentials: grpc.ChannelCredentials

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            base_url=self.http_url, headers=headers, verify=self.context, timeout=TIMEOUT_S, trust_env=False
        ) as client:
            yield client


def doors(fleet: Fleet, rng: Random) -> list[Door]:
    """Entry points with the key of one tenant, drawn at random: one for each coordinator, then the balancer's."""
    key, trust = fleet.keys[rng.choice(TENANTS)], fleet.certificates
    addresses = [
        *((f"https://127.0.0.1:{each.http_port}", f"127.0.0.1:{each.grpc_port}") for each in fleet.backends),
        (fleet.balancer.url, fleet.balancer.address),
    ]
    return [Door(*address, key, trust.context(None), trust.credentials()) for address in addresses]


@dataclass
class Refusal(Exception):
    """The error that a server returned instead of an answer."""

    status: int  # 200 for an error in the stream
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


async def events(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Ids and contents of a streamed completion's events. Raises Refusal, and httpx.HTTPError for a stream that
    breaks."""
    body = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers or {}) as response:
        if response.status_code != httpx.codes.OK:
            raise refusal_of(response.status_code, await response.aread())
        event_id = ""
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                return
            elif line.startswith("data: "):
                content = json.loads(line.removeprefix("data: "))
                if "error" in content:
                    raise refusal_of(response.status_code, line.removeprefix("data: ").encode())
                yield event_id, content
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def refusal_of(status: int, content: bytes) -> Refusal:
    """The refusal that an error's body describes, or one with the beginning of a body that is not an error."""
    try:
        error = json.loads(content)["error"]
        return Refusal(status, str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return Refusal(status, "", content[:300].decode(errors="replace"))
