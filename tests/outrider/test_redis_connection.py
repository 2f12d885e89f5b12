"""The ways to a Redis that a URL may name, each against a real server."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio.connection import RedisSSLContext
from redis.asyncio.sentinel import SentinelConnectionPool

from outrider.errors import ConfigurationError, RegistryUnavailable
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import find_redis_server
from outrider.registry.redis_connection import close_redis, open_redis, redis_url_from, without_password
from outrider.registry.redis_tls import SharedContext
from outrider.registry.registry import Registry
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, TlsFiles

PASSWORD = "s3cret"


@contextmanager
def redis_server(folder: Path, *arguments: str) -> Iterator[int]:
    """A server of its own, by its port; `arguments` as on its command line."""
    folder.mkdir()
    port = free_ports(1)[0]
    words = [str(find_redis_server()), *arguments, "--port", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1", "scheme"),
        ("redis://:s3/cret@127.0.0.1:6379/0", "%2F"),
        ("unix+sentinel://h:1/name", r"unix\+sentinel"),
        ("redis+sentinel://127.0.0.1:26379", "service"),
        ("redis+sentinel://127.0.0.1:x/name", "host:port"),
    ],
)
def test_what_is_no_url_of_a_redis_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        open_redis(url, 1.0)
    assert "s3" not in refused.value.message


@pytest.mark.parametrize(
    ("flag", "file_flag", "variable", "file_variable", "found"),
    [
        ("redis://flag", None, "redis://variable", "file-variable", "redis://flag"),
        (None, "file-flag", "redis://variable", "file-variable", "redis://file-flag"),
        (None, None, "redis://variable", "file-variable", "redis://variable"),
        (None, None, "", "file-variable", "redis://file-variable"),
        (None, None, None, None, None),
    ],
)
def test_flags_count_before_the_environment_and_there_a_url_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str | None, file_flag: str | None, variable: str | None,
    file_variable: str | None, found: str | None,
) -> None:  # fmt: skip
    for name in ("file-flag", "file-variable"):
        (tmp_path / name).write_text(f"redis://{name}\n")
    in_file = None if file_variable is None else str(tmp_path / file_variable)
    for name, value in (("OUTRIDER_REDIS_URL", variable), ("OUTRIDER_REDIS_URL_FILE", in_file)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert redis_url_from(flag, None if file_flag is None else tmp_path / file_flag) == found


def test_a_url_and_a_file_of_one_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        redis_url_from("redis://a", tmp_path / "url")


@pytest.mark.parametrize("text", ["", "not a url", "redis://a redis://b"])
def test_a_file_without_a_url_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "url"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="url holds no URL"):
        redis_url_from(None, path)


def test_no_password_is_shown() -> None:
    assert without_password("redis+sentinel://me:pw@a:1,b:2/name") == "redis+sentinel://a:1,b:2/name"


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("[fd00::1]:26380", [("fd00::1", 26380)]),
        ("[fd00::1]", [("fd00::1", 26379)]),
        ("a:1,[fd00::1]:2,b", [("a", 1), ("fd00::1", 2), ("b", 26379)]),
    ],
)
async def test_sentinels_may_have_ipv6_addresses(hosts: str, addresses: list[tuple[str, int]]) -> None:
    url = f"redis+sentinel://:{PASSWORD}@{hosts}/pool/0"
    pool = open_redis(url, 1.0).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    found = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in found] == addresses
    assert without_password(url) == f"redis+sentinel://{hosts}/pool/0"


async def test_a_redis_may_have_an_ipv6_address() -> None:
    found = open_redis(f"redis://:{PASSWORD}@[fd00::1]:6380/0", 1.0).connection_pool.connection_kwargs
    assert (found["host"], found["port"]) == ("fd00::1", 6380)


async def test_a_password_is_given_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", PASSWORD) as port:
        registry = Registry(f"redis://:{PASSWORD}@127.0.0.1:{port}/0")
        await registry.ping()
        await registry.close()
        wrong = Registry(f"redis://:other@127.0.0.1:{port}/0")
        with pytest.raises(RegistryUnavailable, match="password"):
            await wrong.ping()
        await wrong.close()


@contextmanager
def resetting_server() -> Iterator[int]:
    """Answers whatever it is told and resets the connection after each PING, by its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    is_over = False
                    while not is_over and (words := connection.recv(65536).split(b"\r\n")) != [b""]:
                        is_over = b"PING" in words
                        num_commands = sum(word.startswith(b"*") for word in words)
                        connection.sendall((b"+PONG\r\n" if is_over else b"+OK\r\n") * num_commands)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_that_was_reset_is_made_anew(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Workers live on uvloop, where writing to it is an error that redis-py does not know."""

    async def ping_again(port: int) -> None:
        registry = Registry(f"redis://127.0.0.1:{port}/0")
        try:
            for _ in range(3):
                await registry.ping()
                await asyncio.sleep(0.05)  # in which the reset arrives
        finally:
            await registry.close()

    with resetting_server() as port:
        run(ping_again(port))


@pytest.fixture
async def tls_port(tmp_path: Path) -> AsyncIterator[int]:
    """The port of a TLS proxy to a Redis, with a certificate in `tmp_path`. Not every Redis build supports TLS."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    with redis_server(tmp_path / "redis") as port:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, theirs[1]), pump(theirs[0], writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        yield server.sockets[0].getsockname()[1]
        server.close()


async def test_tls_is_spoken_and_the_certificate_checked(tmp_path: Path, tls_port: int) -> None:
    registry = Registry(f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={tmp_path}/cert.pem")
    await registry.ping()
    await registry.close()
    trusting_nobody = Registry(f"rediss://127.0.0.1:{tls_port}/0")
    with pytest.raises(RegistryUnavailable, match="certificate"):
        await trusting_nobody.ping()
    await trusting_nobody.close()


async def test_certificates_are_read_anew_for_every_connection(tmp_path: Path) -> None:
    """A process outlives its certificate, and an authority."""
    folders = {role: tmp_path / role.name for role in (Role.REDIS, Role.COORDINATOR)}

    def issue() -> None:
        authority, day = CertificateAuthority.make(), datetime.timedelta(days=1)
        for role, folder in folders.items():
            authority.issue(folder, role, names=("127.0.0.1",), valid_for=day)

    connections: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with suppress(OSError):
            while command := await reader.read(65536):
                writer.write(b"-ERR unknown\r\n" if b"HELLO" in command else b"+PONG\r\n" * command.count(b"*"))
        writer.close()

    issue()
    folder = folders[Role.COORDINATOR]
    files = f"ssl_certfile={folder}/tls.crt&ssl_keyfile={folder}/tls.key&ssl_ca_certs={folder}/ca.crt"
    (port,) = free_ports(1)
    client = open_redis(f"rediss://127.0.0.1:{port}/0?protocol=2&{files}", 5.0)
    for _ in range(3):
        context = TlsFiles(folders[Role.REDIS]).server_context()
        server = await asyncio.start_server(answer, "127.0.0.1", port, ssl=context)
        assert await client.ping()
        issue()
        server.close()
        for writer in connections:
            writer.transport.abort()
        connections.clear()
        await server.wait_closed()
    await close_redis(client)


def settings_of(folder: Path, **other: Any) -> RedisSSLContext:
    files = {"certfile": "tls.crt", "keyfile": "tls.key", "ca_certs": "ca.crt"}
    paths = {name: str(folder / file) for name, file in files.items()}
    return RedisSSLContext(cert_reqs="required", check_hostname=True, **{**paths, **other})


def test_connections_share_a_context_until_a_file_is_another(tmp_path: Path) -> None:
    """Making one takes milliseconds of the event loop, and a burst of requests makes dozens of connections."""
    authority, day = CertificateAuthority.make(), datetime.timedelta(days=1)
    authority.issue(tmp_path, Role.COORDINATOR, valid_for=day)
    shared = SharedContext()
    first = shared.get(settings_of(tmp_path))
    assert shared.get(settings_of(tmp_path)) is first
    authority.issue(tmp_path, Role.COORDINATOR, valid_for=day)
    second = shared.get(settings_of(tmp_path))
    assert second is not first
    assert shared.get(settings_of(tmp_path)) is second


def test_a_rotation_that_is_half_done_leaves_the_context_from_before(tmp_path: Path) -> None:
    authority, day = CertificateAuthority.make(), datetime.timedelta(days=1)
    authority.issue(tmp_path, Role.COORDINATOR, valid_for=day)
    shared = SharedContext()
    first = shared.get(settings_of(tmp_path))
    other = tmp_path / "other"
    authority.issue(other, Role.COORDINATOR, valid_for=day)
    (other / "tls.key").replace(tmp_path / "tls.key")
    assert shared.get(settings_of(tmp_path)) is first
    (other / "tls.crt").replace(tmp_path / "tls.crt")
    assert shared.get(settings_of(tmp_path)) is not first
    with pytest.raises(OSError, match="No such file"):
        SharedContext().get(settings_of(tmp_path, ca_certs=str(tmp_path / "nowhere")))


def test_the_context_believes_nobody_but_whom_the_url_names(tmp_path: Path) -> None:
    CertificateAuthority.make().issue(tmp_path, Role.COORDINATOR, valid_for=datetime.timedelta(days=1))
    context = SharedContext().get(settings_of(tmp_path))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.cert_store_stats()["x509_ca"] == 1
    unnamed = SharedContext().get(settings_of(tmp_path, ca_certs=None))
    assert unnamed.cert_store_stats() == ssl.create_default_context().cert_store_stats()


async def test_sentinels_are_asked_for_the_master(tmp_path: Path) -> None:
    auth = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
    with redis_server(tmp_path / "master", *auth) as master:
        configuration = tmp_path / "sentinel.conf"
        configuration.write_text(
            f"sentinel monitor pool 127.0.0.1 {master} 1\nsentinel auth-pass pool {PASSWORD}\nrequirepass {PASSWORD}\n"
        )
        with redis_server(tmp_path / "sentinel", str(configuration), "--sentinel") as sentinel:
            hosts = f"127.0.0.1:{free_ports(1)[0]},127.0.0.1:{sentinel}"  # nobody is at the first
            registry = Registry(f"redis+sentinel://:{PASSWORD}@{hosts}/pool/0")
            assert await registry.reserve("target", ["a"], [1], "s0") == 0
            await registry.close()
            unknown = Registry(f"redis+sentinel://:{PASSWORD}@127.0.0.1:{sentinel}/other")
            with pytest.raises(RegistryUnavailable, match="other"):
                await unknown.ping()
            await unknown.close()
