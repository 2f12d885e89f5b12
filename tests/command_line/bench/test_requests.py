"""One streamed request against servers good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line.client import CHAT, COMPLETIONS
from command_line.load.prompts import Workload
from command_line.load.requests import Server, new_bench_client, observe
from command_line.load.servers import find_model, parse_servers
from command_line.load.summary import RequestResult
from outrider.errors import ConfigurationError, InvalidRequest
from tests.command_line.bench.fake_server import (
    DONE,
    END,
    SSE,
    FakeServer,
    Part,
    chunked,
    dead_url,
    reply,
    running,
    streamed,
    text_event,
    usage_event,
)
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.tiny_model import write_model_dir

GAP_S = 0.02


async def asked(url: str, timeout_s: float = 10.0, body: dict[str, Any] | None = None) -> RequestResult:
    async with new_bench_client(timeout_s, None) as client:
        return await observe(client, url + COMPLETIONS, body or {}, index=3, timeout_s=timeout_s)


async def answered(*parts: Part, timeout_s: float = 10.0) -> RequestResult:
    with running(FakeServer(answer=lambda body: parts)) as server:
        return await asked(server.url, timeout_s)


class TestGoodAnswers:
    async def test_times_come_in_their_order(self) -> None:
        result = await answered(
            SSE, GAP_S, chunked(text_event("a")), chunked(text_event("b")), GAP_S, chunked(text_event("c", "stop")),
            chunked(usage_event(7)), chunked(DONE), END,
        )  # fmt: skip
        assert result.is_ok, result
        assert result.index == 3
        assert result.num_output_tokens == 7
        assert result.is_counted_by_usage
        assert result.ttft_s is not None
        assert result.e2el_s is not None
        assert 0 < result.ttft_s <= result.e2el_s
        assert len(result.itl_s) == 2
        assert min(result.itl_s) >= 0
        assert result.e2el_s == pytest.approx(result.ttft_s + sum(result.itl_s))
        assert result.tpot_s == pytest.approx(sum(result.itl_s) / 6)
        assert result.ended_s == result.sent_s + result.e2el_s

    async def test_events_may_be_cut_anywhere(self) -> None:
        whole = text_event("a") + text_event("b", "stop") + usage_event(2) + DONE
        result = await answered(*streamed(*(whole[at : at + 5] for at in range(0, len(whole), 5))))
        assert result.is_ok, result
        assert (len(result.itl_s), result.num_output_tokens) == (1, 2)

    async def test_a_server_without_usage_has_its_chunks_counted(self) -> None:
        result = await answered(*streamed(text_event("a"), text_event("b", "stop"), DONE))
        assert (result.num_output_tokens, result.is_counted_by_usage) == (2, False)

    async def test_connections_are_used_again(self) -> None:
        with running(FakeServer()) as server:
            async with new_bench_client(10.0, "secret") as client:
                for index in range(3):
                    result = await observe(client, server.url, {"a": 1}, index=index, timeout_s=10.0)
                    assert result.is_ok, result
        assert server.num_connections == 1
        assert "authorization: bearer secret" in server.heads[0].lower()
        assert result.mean_acceptance_length == 1.5

    async def test_many_at_once_do_not_wait_for_connections(self) -> None:
        with running(FakeServer(num_awaited=150)) as server:
            async with new_bench_client(10.0, None) as client:
                asking = (observe(client, server.url, {}, index=i, timeout_s=10.0) for i in range(150))
                results = await asyncio.gather(*asking)
        assert all(result.is_ok for result in results)
        assert server.num_running_max == 150, "more than the usual limit of httpx"

    async def test_a_body_that_never_ends_is_whole_with_its_done(self) -> None:
        result = await answered(SSE, chunked(text_event("a", "stop") + DONE), 30.0, timeout_s=5.0)
        assert result.is_ok, result


class TestBadAnswers:
    @pytest.mark.parametrize(
        ("parts", "cause", "detail"),
        [
            (reply("429 Too Many", b'{"error": {"message": "all full"}}'), "HTTP 429", "all full"),
            (reply("500 Oh", b"plain words", "text/plain"), "HTTP 500", "plain words"),
            (reply("200 OK", b'{"choices": [{"text": "a"}]}'), "not an event stream", "application/json"),
            (reply("200 OK", b"<html>", "text/html"), "not an event stream", "text/html"),
            ([SSE, chunked(text_event("a")), None], "stream cut", ""),
            (streamed(text_event("a")), "stream cut", "without a finish reason"),
            (streamed(b"data: {oops\n\n"), "malformed stream", "oops"),
            (streamed(text_event("a"), b'data: {"error": {"message": "worker lost"}}\n\n'), "error in stream", "lost"),
            ([None], "connection lost", ""),
            ([b"HTTP/9 what\r\n\r\n", None], "connection lost", ""),
            ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None], "connection lost", ""),
        ],
    )  # fmt: skip
    async def test_failures_have_causes(self, parts: Sequence[Part], cause: str, detail: str) -> None:
        result = await answered(*parts)
        assert result.cause == cause, result
        assert detail in result.detail
        assert result.ended_s >= result.sent_s

    @pytest.mark.parametrize("parts", [[30.0], [SSE, 30.0], [SSE, chunked(text_event("a")), 30.0]])
    async def test_silence_is_a_timeout(self, parts: Sequence[Part]) -> None:
        result = await answered(*parts, timeout_s=0.2)
        assert (result.cause, result.detail) == ("timeout", "no complete answer within 0.2 s")

    async def test_a_trickle_is_a_timeout_of_the_whole(self) -> None:
        trickle = [part for _ in range(100) for part in (0.02, chunked(text_event("a")))]
        assert (await answered(SSE, *trickle, timeout_s=0.3)).cause == "timeout"

    async def test_nobody_there_is_a_refusal(self) -> None:
        assert (await asked(dead_url())).cause == "connection refused"


class TestAgainstTheCoordinator:
    """Tests that a benchmark request reads correctly the answers of Outrider's own HTTP API."""

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_its_answers_are_counted_by_its_usage(self, tmp_path: Path, path: str) -> None:
        clusters = ClusterFactory(write_model_dir(tmp_path))
        workload = Workload(path, ("import",), 8, 0.5, 3, True, {"speculation": {"enabled": False}})
        async with clusters.open([clusters.target()]) as cluster:
            server = await find_model(cluster.client, Server("it", "http://coordinator"), None)
            body = workload.body(server.model, 0)
            result = await observe(cluster.client, server.url + path, body, index=0, timeout_s=30.0)
        assert result.is_ok, result
        assert (result.num_output_tokens, result.is_counted_by_usage) == (8, True)
        assert result.mean_acceptance_length is None, "nothing was verified"


class TestServers:
    def test_names_and_addresses(self) -> None:
        given = ["http://a:1/", "x=https://b:2/v1", "http://c:3/k=v/v1/", "d:4", "y=d:4/v1"]
        assert [(server.name, server.url) for server in parse_servers(given)] == [
            ("a:1", "http://a:1"), ("x", "https://b:2"), ("c:3", "http://c:3/k=v"), ("d:4", "http://d:4"),
            ("y", "http://d:4"),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "given",
        [["x="], [""], ["ftp://a"], ["http://"], ["http://a:b"], ["http://a?k=v"], ["http://a", "a=http://b"]],
    )
    def test_what_is_no_address_is_refused(self, given: list[str]) -> None:
        with pytest.raises(InvalidRequest):
            parse_servers(given)

    async def found(self, server: FakeServer, wanted: str | None = None) -> Server:
        with running(server):
            async with new_bench_client(10.0, None) as client:
                return await find_model(client, Server("it", server.url), wanted)

    async def test_the_first_model_is_asked_for_unless_another_is_wanted(self) -> None:
        assert (await self.found(FakeServer())).model == "first"
        assert (await self.found(FakeServer(), "third")).model == "third"
        without_list = FakeServer(models=reply("404 Not Found", b"{}"))
        assert (await self.found(without_list, "third")).model == "third"

    @pytest.mark.parametrize(
        ("models", "way_out"),
        [
            (reply("401 Unauthorized", b"{}"), "--api-key or OPENAI_API_KEY"),
            (reply("404 Not Found", b"{}"), "--model"),
            (reply("200 OK", b"<html>"), "--model"),
            (reply("200 OK", b'{"data": []}'), "lists no model"),
            ([None], "cannot be reached"),
        ],
    )
    async def test_a_server_that_is_none_is_named_with_a_way_out(self, models: Sequence[Part], way_out: str) -> None:
        server = FakeServer(models=models)
        with pytest.raises(ConfigurationError, match=way_out) as raised:
            await self.found(server)
        assert f"--url {server.url}" in raised.value.message
