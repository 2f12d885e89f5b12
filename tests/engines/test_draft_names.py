"""Names of draft workers stand for all that they resolve to, now and later."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from outrider.engines.hint_server import draft_names
from outrider.engines.hint_server.draft_names import DraftNames, is_literal, resolve


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_names, "REFRESH_S", 0.0)


class Names:
    """A name service with one name."""

    def __init__(self, *answers: list[str] | Exception) -> None:
        self.answers = list(answers)
        self.told: list[list[str]] = []
        self.is_over = asyncio.Event()

    async def resolve(self, name: str) -> list[str]:
        assert name == "drafts:7001"
        if not self.answers:
            self.is_over.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def follow(self, *addresses: str) -> list[list[str]]:
        looking = asyncio.create_task(DraftNames(addresses, self.told.append, self.resolve).keep_looking())
        await self.is_over.wait()
        looking.cancel()
        return self.told


async def test_a_name_stands_for_all_its_addresses_as_they_change() -> None:
    told = await Names(["10.0.0.1:7001"], ["10.0.0.1:7001", "10.0.0.2:7001"]).follow("10.9.0.1:7001", "drafts:7001")
    assert told == [
        ["10.9.0.1:7001"],  # at once, without a look-up
        ["10.9.0.1:7001", "10.0.0.1:7001"],
        ["10.9.0.1:7001", "10.0.0.1:7001", "10.0.0.2:7001"],
    ]


async def test_addresses_stay_while_the_name_service_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    away = socket.gaierror("no such name")
    told = await Names(["10.0.0.1:7001"], away, TimeoutError(), ["10.0.0.2:7001"]).follow("drafts:7001")
    assert told == [[], *[["10.0.0.1:7001"]] * 3, ["10.0.0.2:7001"]]
    assert [record.message for record in caplog.records] == [
        "the draft workers at drafts:7001 are not found: no such name",
        "the draft workers at drafts:7001 are found again",
    ]


async def test_without_names_nothing_is_looked_up() -> None:
    names = Names()
    made = DraftNames(["127.0.0.1:1", "[::1]:1"], names.told.append, names.resolve)
    assert not made.has_names
    assert names.told == [["127.0.0.1:1", "[::1]:1"]]
    assert DraftNames(["127.0.0.1:1", "drafts:1"], names.told.append).has_names


async def test_what_no_host_can_be_called_ends_nothing() -> None:
    told = await Names(UnicodeError("label too long"), ["10.0.0.1:7001"]).follow("drafts:7001")
    assert told == [[], [], ["10.0.0.1:7001"]]


async def test_a_worker_of_both_families_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both: list[Any] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7001, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7001)),
    ]

    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return both

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    assert await resolve("drafts:7001") == ["10.0.0.1:7001"]
    del both[1:]
    assert await resolve("drafts:7001") == ["[fd00::1]:7001"]


@pytest.mark.parametrize(("address", "literal"), [("10.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", False)])
def test_a_literal_address_is_told_from_a_name(address: str, literal: bool) -> None:
    assert is_literal(address) is literal
