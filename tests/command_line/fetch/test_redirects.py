"""Whoever answers for the Hub sends `outrider fetch` to public addresses alone, and is read up to a bound."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from command_line.fetch import hub as hub_module
from command_line.fetch import transfer
from command_line.fetch.hub import HubSource
from outrider.addresses import is_public
from outrider.errors import ConfigurationError, Unavailable
from tests.command_line.fetch.checkpoints import SHARDS, small_model
from tests.command_line.fetch.conftest import REPOSITORY, Fetcher
from tests.command_line.fetch.content_server import ContentServer, answer
from tests.command_line.fetch.hub_server import HubServer, Repository

ADDRESS = f"hf://{REPOSITORY}@main"


class Inside(ContentServer):
    """A service of a private network, which answers nobody who is not sent to it."""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        answer(handler, 200, b'{"secret": true}')


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TRIES_MAX", 1)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def inside() -> Iterator[Inside]:
    server = Inside(("127.0.0.2", 0))
    with server.running():
        yield server


@pytest.fixture
def redirected(repository: Repository, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the Hub answer every request for its API, or for a file, with a redirect."""

    def to(location: str) -> None:
        def respond(handler: BaseHTTPRequestHandler) -> None:
            answer(handler, 302, b"", {"Location": location})

        monkeypatch.setattr(hub, "respond", respond)

    return to


def look_up(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Any]) -> None:
    """Names of examples have the addresses that `found` returns."""
    getaddrinfo = socket.getaddrinfo

    def look(host: Any, *given: Any, **named: Any) -> Any:
        return found() if str(host).endswith(".example") else getaddrinfo(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look)


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:PORT/",
        "https://127.0.0.2:PORT/",
        "https://[::ffff:127.0.0.2]:PORT/",
        "https://2130706434:PORT/",
        "https://[::1]:PORT/",
        "https://169.254.169.254/latest/meta-data/",
        "https://10.0.0.1/",
        "https://[fd00::1]/",
        "https://[64:ff9b::a00:1]/",
        "http://example.com/",
        "ftp://127.0.0.2:PORT/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
    ],
)
def test_a_redirect_leads_to_nothing_of_a_private_network(
    redirected: Callable[[str], None], inside: Inside, fetch: Fetcher, tmp_path: Path, location: str
) -> None:
    redirected(location.replace("PORT", str(urlsplit(inside.url).port)))
    with pytest.raises(ConfigurationError, match=r"redirects to .*, (which is not https|and .* is no public address)"):
        fetch(ADDRESS, tmp_path / "model")
    assert not inside.requests


def test_a_file_is_not_read_there_either(
    repository: Repository, hub: HubServer, inside: Inside, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.host.url = inside.url
    with pytest.raises(ConfigurationError, match=r"redirects to http://127\.0\.0\.2"):
        fetch(ADDRESS, tmp_path / "model")
    assert not inside.requests


def test_a_name_that_has_another_address_when_it_is_looked_up_again_is_refused(
    redirected: Callable[[str], None], fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: public for the check, private for the connection. The connection itself tells."""
    redirected("https://rebound.example/")
    look_up(monkeypatch, lambda: [(2, 1, 6, "", ("93.184.216.34", 443))])
    sent = httpx.Client.send

    class Stream:
        def get_extra_info(self, name: str) -> Any:
            return ("10.0.0.1", 443) if name == "server_addr" else None

    def send(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        if request.url.host != "rebound.example":
            return sent(client, request, **options)
        return httpx.Response(200, request=request, content=b"{}", extensions={"network_stream": Stream()})

    monkeypatch.setattr(httpx.Client, "send", send)
    with pytest.raises(ConfigurationError, match=r"rebound\.example, and 10\.0\.0\.1 is no public address"):
        fetch(ADDRESS, tmp_path / "model")


def test_a_host_that_cannot_be_found_may_be_there_later(
    redirected: Callable[[str], None], fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirected("https://nowhere.example/")

    def fail() -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    look_up(monkeypatch, fail)
    with pytest.raises(Unavailable, match=r"nowhere\.example, to which 127\.0\.0\.1 redirects, cannot be found"):
        fetch(ADDRESS, tmp_path / "model")


def test_a_host_whose_name_cannot_be_encoded_is_one_that_cannot_be_found(
    redirected: Callable[[str], None], fetch: Fetcher, tmp_path: Path
) -> None:
    redirected(f"https://{'a' * 64}.example.com/")
    with pytest.raises(Unavailable, match="cannot be found"):
        fetch(ADDRESS, tmp_path / "model")


def test_behind_a_proxy_names_are_the_proxys_to_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of a company may know no name of the internet, and its proxy has a private address."""
    looked_up: list[str] = []

    def look(host: str, *_: Any, **__: Any) -> Any:
        looked_up.append(host)
        return [(2, 1, 6, "", ("10.0.0.1", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setenv("HTTPS_PROXY", "http://10.0.0.2:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    source = HubSource(ADDRESS)
    source._check_public(httpx.URL("https://cdn.example/file"))
    assert not looked_up
    for url in ("https://10.0.0.1/file", "https://inside.example/file", "https://a.inside.example/file"):
        with pytest.raises(ConfigurationError, match="no public address"):
            source._check_public(httpx.URL(url))
    assert looked_up == ["inside.example", "a.inside.example"]


def test_an_endpoint_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:port")
    with pytest.raises(ConfigurationError, match=r"HF_ENDPOINT=https://mirror\.example:port is no URL"):
        HubSource(ADDRESS)


def test_redirects_end(redirected: Callable[[str], None], hub: HubServer, fetch: Fetcher, tmp_path: Path) -> None:
    redirected(f"{hub.url}/api/models/{REPOSITORY}/again")
    with pytest.raises(ConfigurationError, match="redirects more than 5 times"):
        fetch(ADDRESS, tmp_path / "model")


def test_the_token_goes_to_the_hub_alone(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.readers = frozenset({"hf_secret"})
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(ADDRESS, tmp_path / "model")
    assert {each.headers.get("authorization") for each in hub.asked} == {"Bearer hf_secret"}
    assert {each.path for each in hub.host.asked} == set(SHARDS)
    assert {each.headers.get("authorization") for each in hub.host.asked} == {None}


def test_with_a_hub_that_has_tls_no_redirect_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to the same host: whoever is on the way could answer."""
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    source = HubSource(ADDRESS)

    def send(client: httpx.Client, request: httpx.Request, **_: Any) -> httpx.Response:
        assert request.url.scheme == "https"
        response = httpx.Response(302, request=request, headers={"Location": "http://hub.example/x"})
        response.next_request = httpx.Request("GET", "http://hub.example/x")
        return response

    monkeypatch.setattr(httpx.Client, "send", send)
    with pytest.raises(ConfigurationError, match=r"redirects to http://hub\.example, which is not https"):
        source.list_files()


@pytest.mark.parametrize("way", ["compressed", "long", "endless", "nested"])
def test_a_description_has_bounds(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(hub_module, "LISTING_BYTES_MAX", 1 << 20)
    sent = 0

    def describe(handler: BaseHTTPRequestHandler, *_: Any) -> None:
        nonlocal sent
        if way == "compressed":  # 64 MiB
            answer(handler, 200, gzip.compress(b"[" * (64 << 20)), {"Content-Encoding": "gzip"})
        elif way == "nested":
            answer(handler, 200, b"[" * 100_000)
        else:
            handler.send_response(200)
            if way == "long":
                handler.send_header("Content-Length", str(1 << 40))
            handler.end_headers()
            handler.close_connection = True
            while True:
                handler.wfile.write(b" " * (64 << 10))
                sent += 64 << 10

    monkeypatch.setattr(hub, "_describe", describe)
    said = {"compressed": "compresses its answer", "nested": "is a proxy between"}
    with pytest.raises(ConfigurationError, match=said.get(way, r"in more than 1048576 bytes")):
        fetch(ADDRESS, tmp_path / "model")
    assert sent < 16 << 20, "no more than buffers hold"


def test_what_a_refusal_says_is_not_read(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub, "_resolve", lambda handler, *_: answer(handler, 404, gzip.compress(b"x"), {"Content-Length": str(1 << 40)})
    )
    with pytest.raises(ConfigurationError, match="knows no such model"):
        fetch(ADDRESS, tmp_path / "model")


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil.safetensors", "a/../../evil.safetensors", "..", ""])
def test_a_model_cannot_place_files_elsewhere(hub: HubServer, fetch: Fetcher, tmp_path: Path, name: str) -> None:
    files = small_model()
    config = json.loads(files["config.json"])
    for changed in (
        {"config.json": json.dumps(config | {"transformers_weights": name or "./"}).encode()},
        {
            "config.json": json.dumps(config | {"transformers_weights": "x.safetensors.index.json"}).encode(),
            "x.safetensors.index.json": json.dumps({"weight_map": {"a": name}}).encode(),
        },
    ):
        hub.add(REPOSITORY, files | changed | {name: b"x"})
        with pytest.raises(ConfigurationError, match=r"which is no file (beside|inside of) it"):
            fetch(ADDRESS, tmp_path / "below" / "model")
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *(
            (each, True)
            for each in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822")
        ),
        *((each, False) for each in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "100.64.0.1", "0.0.0.0")),
        *(
            (each, False)
            for each in ("169.254.169.254", "fe80::1%eth0", "fd00::1", "::1", "::", "224.0.0.1", "ff02::1")
        ),
        *((each, False) for each in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "[::1]")),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected
