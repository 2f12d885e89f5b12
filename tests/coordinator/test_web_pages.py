"""Without keys a coordinator does not work for web pages of others; programs are served as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from coordinator.__main__ import parse
from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.http.web_pages import WebPages
from outrider.errors import Forbidden
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.held import routes

BODY: dict[str, Any] = {"prompt": "import", "temperature": 0, "max_tokens": 4}
FOREIGN_PAGES: list[dict[str, str]] = [
    {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Origin": "https://elsewhere.example"},  # of a browser, or to an address, that says no more
    {"Origin": "null", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # a frame in a sandbox
    {"Origin": "null"},
    {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a form
    {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    {"Origin": "http://localhost:3000"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},  # an image
]
PROGRAMS_AND_PEOPLE: list[dict[str, str]] = [
    {},  # curl, the openai package
    {"Sec-Fetch-Mode": "cors"},  # Node's fetch
    {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},  # typed
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link that a person follows
    {"Sec-Fetch-Site": "same-origin", "Origin": "https://chat.example"},  # through a proxy that changes Host
    {"Origin": "http://localhost:8000"},
    {"Origin": "app://obsidian.md", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
    {"Origin": "tauri://localhost"},
]


def is_refused(pages: WebPages, **headers: str) -> bool:
    try:
        pages.check(Headers(headers))
    except Forbidden:
        return True
    return False


class TestPages:
    @pytest.mark.parametrize("page", FOREIGN_PAGES, ids=str)
    def test_a_page_of_another_site_is_refused(self, page: dict[str, str]) -> None:
        pages = WebPages((), is_local=False)
        assert is_refused(pages, Host="localhost:8000", **page)

    @pytest.mark.parametrize("sender", PROGRAMS_AND_PEOPLE, ids=str)
    def test_programs_and_people_are_served(self, sender: dict[str, str]) -> None:
        assert not is_refused(WebPages((), is_local=True), Host="localhost:8000", **sender)

    def test_a_page_that_may_call_is_served(self) -> None:
        page = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
        assert not is_refused(WebPages(("https://chat.example",), is_local=True), Host="localhost", **page)
        assert not is_refused(WebPages(("*",), is_local=True), Host="localhost", **page)
        for other in ("https://chat.example.elsewhere", "http://chat.example", "https://chat.example:444", "null"):
            assert is_refused(WebPages(("https://chat.example",), is_local=True), Host="localhost", Origin=other)


class TestHosts:
    @pytest.mark.parametrize(
        "host",
        [
            "localhost", "localhost:8000", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000",
            "[::1]", "127.8.9.10", "10.0.0.1:80", "outrider.localhost:8000", "host.docker.internal:8000",
        ],
    )  # fmt: skip
    def test_names_that_nobody_else_can_have_are_served(self, host: str) -> None:
        assert not is_refused(WebPages(("*",), is_local=True), Host=host)

    @pytest.mark.parametrize(
        "host",
        [
            "elsewhere.example", "elsewhere.example:8000", "localhost.elsewhere.example", "127.0.0.1.nip.io",
            "notlocalhost", "internal.example", "", ":8000", "[elsewhere.example]",
            "127.0.0.1@elsewhere.example", "xn--e1a.example", "1.elsewhere", "127.1",
        ],
    )  # fmt: skip
    def test_any_other_name_is_refused_whatever_origins_may_call(self, host: str) -> None:
        assert is_refused(WebPages(("*",), is_local=True), Host=host)
        assert not is_refused(WebPages(("*",), is_local=False), Host=host)

    def test_each_of_several_hosts_counts_and_a_client_without_one_is_no_browser(self) -> None:
        pages = WebPages((), is_local=True)
        with pytest.raises(Forbidden):
            pages.check(Headers(raw=[(b"host", b"localhost"), (b"host", b"elsewhere.example")]))
        pages.check(Headers(raw=[]))


OPEN_PATHS = {"/health", "/livez", "/ping", "/version"}


class TestOverHttp:
    async def test_every_route_refuses_a_page_and_does_no_work(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with clusters.open([target], settings={"is_local": True}) as cluster:
            for method, path in sorted(routes(cluster)):
                for headers in (FOREIGN_PAGES[0] | {"Host": "localhost"}, {"Host": "elsewhere.example:8000"}):
                    answer = await cluster.client.request(
                        method, path, content=json.dumps(BODY), headers={"Content-Type": "text/plain", **headers}
                    )
                    if path in OPEN_PATHS:  # a load balancer asks under any name, and is told no worker's
                        assert answer.status_code == 200
                        assert "target" not in answer.text
                        continue
                    assert answer.status_code == 403, (path, answer.text)
                    self.check(answer, path)
        assert not target.requests

    def check(self, answer: httpx.Response, path: str) -> None:
        error = answer.json()["error"]
        assert error["type"] == "permission_error"
        assert ("code" in error) != path.startswith("/v1/messages")
        assert "access-control-allow-origin" not in answer.headers

    @pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
    async def test_a_program_may_leave_out_what_its_body_is(self, clusters: ClusterFactory, kind: str) -> None:
        """`curl -d` says that it is a form."""
        async with clusters.open([clusters.target()], settings={"is_local": True}) as cluster:
            headers = {"Host": "127.0.0.1:8000", "Content-Type": kind}
            answer = await cluster.client.post("/v1/completions", content=json.dumps(BODY), headers=headers)
        assert answer.status_code == 200, answer.text

    async def test_a_page_that_may_call_reads_its_answer(self, clusters: ClusterFactory) -> None:
        page = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        settings = {"is_local": True, "cors_origins": ("https://chat.example",)}
        async with clusters.open([clusters.target()], settings=settings) as cluster:
            cluster.client.base_url = httpx.URL("http://localhost:8000")
            asked = await cluster.client.options("/v1/completions", headers=page | asks)
            answer = await cluster.client.post("/v1/completions", json=BODY, headers=page)
        assert (asked.status_code, answer.status_code) == (200, 200)
        for each in (asked, answer):
            assert each.headers["access-control-allow-origin"] == "https://chat.example"

    async def test_with_keys_a_key_decides_and_nothing_else(self, clusters: ClusterFactory, tmp_path: Path) -> None:
        key, path = new_key(), tmp_path / "keys.toml"
        path.write_text(entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
        page = FOREIGN_PAGES[0] | {"Host": "llm.example"}
        settings = {"is_local": True, "api_keys_file": str(path)}
        async with clusters.open([clusters.target()], settings=settings) as cluster:
            with_key = await self.ask(cluster, page | {"Authorization": f"Bearer {key}"})
            without = await self.ask(cluster, page)
        assert (with_key.status_code, without.status_code) == (200, 401)

    async def ask(self, cluster: Cluster, headers: dict[str, str]) -> httpx.Response:
        return await cluster.client.post("/v1/completions", json=BODY, headers=headers)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("flags", "is_local"),
        [
            ([], True),
            (["--host", "::1"], True),
            (["--host", "localhost"], True),
            (["--insecure"], False),
            (["--host", "0.0.0.0", "--insecure"], False),
            (["--api-keys", "keys.toml"], False),
            (["--hosting", "plain"], True),
        ],
        ids=str,
    )
    def test_the_loopback_without_keys_is_for_this_machine(self, flags: list[str], is_local: bool) -> None:
        settings, _ = parse(["--redis-url", "redis://x", "--tokenizer", "x", *flags])
        assert settings.is_local is is_local
