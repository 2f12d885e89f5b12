"""A key opens what the route that has its request is for, however the path is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, WebSocket

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.http.application import create_app
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.held import routes

# As they are on the wire; a server decodes a path once.
METRICS = [
    "/metrics", "/metrics%0A", "/metrics%0D%0A", "/metrics%0a%0a", "/metrics%00", "/metrics%20", "/metrics%09",
    "/metrics/", "//metrics", "/./metrics", "/v1/../metrics", "/v1/%2e%2e/metrics", "/%6detrics", "/metrics%250A",
    "/METRICS", "/Metrics", "/metrics;x=1", "/metrics;", "/metrics%3Bx", "/metrics%3F", "/metrics%23", "/metrics%2F",
    "%2Fmetrics", "/metrics\\", "/metrics%5C", "/metrics%C2%A0", "/metrics%E2%80%A8", "/metrics%1F", "/metrics.",
]  # fmt: skip


class Application:
    """An application with keys, called as a server calls it."""

    def __init__(self, app: FastAPI, keys: dict[str, str]) -> None:
        self.app, self.keys = app, keys

    async def ask(self, method: str, path: str, key: str | None = None, host: bytes = b"x") -> tuple[int, Any, Any]:
        """Status, headers and body of the answer to a path as it is on the wire."""
        sent: list[Any] = []

        body = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            return next(body, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", host)]
        if key is not None:
            headers.append((b"authorization", f"Bearer {self.keys[key]}".encode()))
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": method, "path": unquote(path), "raw_path": path.encode(),
            "query_string": b"", "headers": headers, "scheme": "http", "server": ("test", 80),
        }  # fmt: skip
        async with asyncio.timeout(30):
            await self.app(scope, receive, send)
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), answer


@asynccontextmanager
async def with_keys(clusters: ClusterFactory, folder: Path) -> AsyncIterator[Application]:
    keys = {scope.value: new_key() for scope in Scope}
    path = folder / "keys.toml"
    path.write_text("".join(entry(key, name, frozenset({Scope(name)}), None, "") for name, key in keys.items()))
    async with clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster:
        yield Application(create_app(cluster.service), keys)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
async def test_metrics_are_for_their_scope_under_every_spelling(
    clusters: ClusterFactory, tmp_path: Path, method: str
) -> None:
    """Found: `$` matches before a last newline, so /metrics%0A had the route of metrics and the scope of others."""
    async with with_keys(clusters, tmp_path) as application:
        for path in METRICS:
            status, _, body = await application.ask(method, path, "generate")
            assert b"outrider_" not in body, path
            assert status in (403, 404, 405), (path, status)
            status, _, _ = await application.ask(method, path)
            assert status == 401, path
        assert (await application.ask("GET", "/metrics", "metrics"))[0] == 200


async def test_no_route_is_open_but_health(clusters: ClusterFactory, tmp_path: Path) -> None:
    async with with_keys(clusters, tmp_path) as application, clusters.open([clusters.target()]) as cluster:
        opened = set()
        for method, path in sorted(routes(cluster)):
            for spelled in (path, f"{path}%0A"):
                status, _, _ = await application.ask(method, spelled)
                if status != 401:
                    opened.add(path)
        assert opened == {"/health", "/livez", "/ping", "/version"}


async def test_a_route_or_an_application_that_is_added_later_is_closed(
    clusters: ClusterFactory, tmp_path: Path
) -> None:
    async with with_keys(clusters, tmp_path) as application:

        def something() -> dict[str, str]:
            return {}

        application.app.add_api_route("/new", something, methods=["GET"])
        other = FastAPI()
        other.add_api_route("/health", something, methods=["GET"])
        application.app.mount("/other", other)
        for path in ("/new", "/other/health", "/other/metrics"):
            assert (await application.ask("GET", path))[0] == 401, path
            assert (await application.ask("GET", path, "metrics"))[0] == 403, path
        assert (await application.ask("GET", "/new", "generate"))[0] == 200


async def test_a_websocket_is_refused_with_any_key(clusters: ClusterFactory, tmp_path: Path) -> None:
    """Found: what was no HTTP request passed by the keys."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with with_keys(clusters, tmp_path) as application:

        @application.app.websocket("/chat")
        async def chat(websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.close()

        scope = {"type": "websocket", "path": "/chat", "raw_path": b"/chat", "query_string": b"", "headers": []}
        await application.app(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


class TestNoAnswerLeadsElsewhere:
    async def test_no_answer_has_an_address_of_the_hosts_choice(self, clusters: ClusterFactory, tmp_path: Path) -> None:
        """Found: with a slash more or less at its end a path was redirected to http:// and what Host said."""
        async with with_keys(clusters, tmp_path) as application, clusters.open([clusters.target()]) as cluster:
            for method, path in sorted(routes(cluster)):
                for spelled in (path, f"{path}/", f"{path}//", f"/{path}", f"/{path}/"):
                    for key in (None, *application.keys):
                        status, headers, body = await application.ask(method, spelled, key, b"elsewhere.example")
                        assert not 300 <= status < 400, spelled
                        assert b"location" not in headers, spelled
                        assert b"elsewhere" not in body, spelled

    @pytest.mark.parametrize("host", [b"[", b"x/v1/messages?", b"\xff", b"a:b:c", b"", b"]:[", b"%"])
    async def test_an_error_does_not_depend_on_what_host_says(
        self, clusters: ClusterFactory, tmp_path: Path, host: bytes
    ) -> None:
        async with with_keys(clusters, tmp_path) as application:
            for path, is_anthropic in (("/no/such/path", False), ("/v1/messages", True)):
                status, _, body = await application.ask("GET", path, "generate", host)
                assert status == (405 if is_anthropic else 404)
                assert ("type" in json.loads(body)) == is_anthropic
