"""A coordinator that stays open while a test without an event loop of its own tries one request after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from coordinator.api.http.application import create_app
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.hostile import WAIT_S


@dataclass
class HeldCluster:
    """Its event loop runs for as long as a request takes."""

    cluster: Cluster
    runner: asyncio.Runner
    right_text: str = ""

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """An answer. What the application raises is raised here, and so is TimeoutError."""

        async def answer() -> httpx.Response:
            async with asyncio.timeout(WAIT_S):
                return await self.cluster.client.request(method, path, **request)

        return self.runner.run(answer())

    def check_service(self) -> None:
        """A good request still has the answer it had at first, and nothing is left over of others."""
        answer = self.send("POST", "/v1/completions", json={"prompt": "import", "temperature": 0})
        assert answer.status_code == 200, answer.text
        self.right_text = self.right_text or answer.json()["choices"][0]["text"]
        assert answer.json()["choices"][0]["text"] == self.right_text


@contextmanager
def held(clusters: ClusterFactory, target: FakeTarget | None = None, **options: Any) -> Iterator[HeldCluster]:
    """A cluster of one fake target, see `ClusterFactory.open`."""
    target = target or clusters.target(tokens_per_step=5)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        cluster = runner.run(stack.enter_async_context(clusters.open([target], **options)))
        try:
            opened = HeldCluster(cluster, runner)
            opened.check_service()
            yield opened
            opened.check_service()
        finally:
            runner.run(stack.aclose())


def routes(cluster: Cluster) -> set[tuple[str, str]]:
    """(method, path) of everything that the application answers."""
    return {
        (method, route.path.replace(":path}", "}"))  # type: ignore[attr-defined]
        for route in create_app(cluster.service).routes
        for method in route.methods  # type: ignore[attr-defined]
    }
