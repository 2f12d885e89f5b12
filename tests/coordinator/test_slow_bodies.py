"""Bodies that do not come keep nobody out but their own sender, and are given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.http import http_transport
from coordinator.api.http.application import create_app
from coordinator.api.http.http_transport import paced
from coordinator.intake import request_limit
from coordinator.intake.request_limit import RequestLimit, TenantShares
from outrider.errors import BodyTooSlow, Overloaded
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually

BODY = {"prompt": "import", "temperature": 0, "max_tokens": 4}
WITHIN_S = 30.0


def fill(shares: TenantShares, tenant: str | None, stack: ExitStack) -> int:
    """Takes all that the tenant gets; returns how much that is."""
    num = 0
    while True:
        try:
            stack.enter_context(shares.taken(tenant, 1))
        except Overloaded:
            return num
        num += 1


class TestTenantShares:
    def test_one_that_is_alone_has_most_and_each_who_comes_finds_some(self) -> None:
        shares = TenantShares(640, "requests")
        with ExitStack() as stack:
            taken = [fill(shares, name, stack) for name in ("a", "b", "c", "d")]
            assert taken[0] == 512
            assert taken == sorted(taken, reverse=True)
            assert all(taken)
            assert shares.num == sum(taken) <= 640
        assert shares.num == 0

    def test_who_holds_less_than_others_is_let_in_first(self) -> None:
        shares = TenantShares(10, "requests", per_free=1)
        with ExitStack() as greedy, ExitStack() as modest:
            assert fill(shares, "greedy", greedy) == 5
            assert fill(shares, "modest", modest) == 3
            modest.pop_all().close()
            assert fill(shares, "greedy", greedy) == 0
            assert fill(shares, "modest", modest) == 3

    def test_what_does_not_fit_whole_takes_nothing(self) -> None:
        shares = TenantShares(10, "bytes")
        with shares.taken("a") as take:
            take(7)
            with pytest.raises(Overloaded, match="tenant a has as many bytes"):
                take(4)
            assert shares.num == 7
        assert shares.num == 0


class TestRequestLimit:
    def test_a_body_on_its_way_has_no_place_among_those_that_are_served(self) -> None:
        limit = RequestLimit(1)
        with limit.entered("a") as arriving, arriving(), limit.entered("b"):
            assert limit.num == 2
        assert limit.num == 0

    def test_whose_body_comes_when_all_places_are_taken_is_refused(self) -> None:
        limit = RequestLimit(1)
        with limit.entered("a") as arriving:
            other = ExitStack()
            with pytest.raises(Overloaded), arriving():
                other.enter_context(limit.entered("b"))
            other.close()
            assert limit.num == 0, "its place is another's"
        assert limit.num == 0

    def test_no_tenant_has_all_places_however_it_keeps_them(self) -> None:
        limit = RequestLimit(640)
        with ExitStack() as stack:
            for _ in range(640):
                stack.enter_context(limit.entered("greedy"))
            with pytest.raises(Overloaded, match="tenant greedy"):
                stack.enter_context(limit.entered("greedy"))
            for _ in range(100):
                stack.enter_context(limit.entered("modest"))

    def test_bodies_of_all_requests_of_a_tenant_may_come_at_once(self) -> None:
        limit = RequestLimit(640)
        with ExitStack() as stack:
            for _ in range(640):
                stack.enter_context(stack.enter_context(limit.entered())())
            assert limit.num == 640
            with pytest.raises(Overloaded, match="bodies are on their way"):
                stack.enter_context(stack.enter_context(limit.entered())())
        assert limit.num == 0

    def test_bytes_on_their_way_are_bounded_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_limit, "BODY_BYTES_MAX", 100)
        limit = RequestLimit(9)
        with limit.entered("a") as arriving, arriving() as take:
            take(81)
            with limit.entered("a") as again, pytest.raises(Overloaded, match="bytes of bodies"), again() as other:
                other(1)
            with limit.entered("b") as others, others() as another:
                another(10)
        assert limit.num == 0


class TestPace:
    async def parts(self, *parts: bytes, then: Callable[[], object] = lambda: None) -> AsyncGenerator[bytes]:
        for part in parts:
            yield part
        then()
        await asyncio.Event().wait()

    async def test_a_body_that_comes_in_time_is_passed_on_whole(self) -> None:
        async def all_of_it() -> AsyncGenerator[bytes]:
            for part in (b"a", b"", b"bc"):
                yield part

        assert [part async for part in paced(all_of_it(), 60)] == [b"a", b"", b"bc"]

    async def test_one_that_stops_is_given_up_however_long_the_whole_may_take(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_transport, "BODY_GRACE_S", 0.05)
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(BodyTooSlow, match="3 bytes did"):
                async for _ in paced(self.parts(b"abc"), 1e6):
                    pass

    async def test_the_whole_has_a_bound_however_fast_it_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def without_end() -> AsyncGenerator[bytes]:
            while True:
                await asyncio.sleep(0.01)
                yield b"x" * 100_000

        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(BodyTooSlow):
                async for _ in paced(without_end(), 0.1):
                    pass

    async def test_time_in_which_a_part_is_used_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_transport, "BODY_GRACE_S", 0.05)

        async def at_once() -> AsyncGenerator[bytes]:
            yield b"a"
            yield b"b"

        seen = []
        async for part in paced(at_once(), 60):
            await asyncio.sleep(0.1)
            seen.append(part)
        assert seen == [b"a", b"b"]


@asynccontextmanager
async def two_tenants(
    clusters: ClusterFactory, folder: Path, limit: RequestLimit
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of two tenants at one coordinator."""
    keys = {name: new_key() for name in ("greedy", "modest")}
    path = folder / "keys.toml"
    path.write_text("".join(entry(key, name, frozenset({Scope.GENERATE}), None, "") for name, key in keys.items()))
    async with clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster:
        transport = httpx.ASGITransport(create_app(cluster.service, limit=limit))

        def client(name: str) -> httpx.AsyncClient:
            headers = {"Authorization": f"Bearer {keys[name]}"}
            return httpx.AsyncClient(transport=transport, base_url="http://coordinator", headers=headers, timeout=30)

        async with client("greedy") as greedy, client("modest") as modest:
            yield greedy, modest


async def never(begun: Callable[[], object] = lambda: None) -> AsyncGenerator[bytes]:
    """A body of which the beginning comes."""
    yield b'{"prompt":'
    begun()
    await asyncio.Event().wait()


class TestOverHttp:
    @pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/messages", "/v1/messages/count_tokens"])
    async def test_bodies_that_do_not_come_leave_room_for_another_tenant(
        self, clusters: ClusterFactory, tmp_path: Path, path: str
    ) -> None:
        limit, num = RequestLimit(10), 0

        def count() -> None:
            nonlocal num
            num += 1

        async with two_tenants(clusters, tmp_path, limit) as (greedy, modest):
            asking = [asyncio.create_task(greedy.post(path, content=never(count))) for _ in range(30)]
            try:
                await eventually(lambda: sum(task.done() for task in asking) >= 20, "the others are refused")
                refused = [task.result() for task in asking if task.done()]
                assert {answer.status_code for answer in refused} == {429}
                assert {"error"} <= refused[0].json().keys()
                assert int(refused[0].headers["Retry-After"]) >= 1
                assert limit.num == len(asking) - len(refused) == 10
                for _ in range(3):
                    assert (await modest.post("/v1/completions", json=BODY)).status_code == 200
                assert (await greedy.get("/v1/models")).status_code == 200
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
    async def test_a_body_that_stops_is_answered_in_the_words_of_its_api(
        self, clusters: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        monkeypatch.setattr(http_transport, "BODY_GRACE_S", 0.05)
        async with two_tenants(clusters, tmp_path, RequestLimit(10)) as (greedy, _):
            answer = await greedy.post(path, content=never())
        assert answer.status_code == 408
        error = json.loads(answer.content)["error"]
        assert error["type"] == "timeout_error"
        assert "10 bytes did" in error["message"]
