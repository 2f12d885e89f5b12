"""`python -m coordinator`: serves until SIGTERM or SIGINT, on Ray Serve or as a plain process; leaves nothing.

Prints one line of JSON to standard output when requests can come in; everything else goes to standard error.
Exit status: 0 after a signal, 1 when it cannot start, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from coordinator.access.authentication import Authentication
from coordinator.api.http.batch_service import open_store
from coordinator.models.models_file import open_models
from coordinator.settings import CoordinatorSettings, Hosting, Listen
from outrider.addresses import bound_socket, is_unspecified, join_address
from outrider.errors import ConfigurationError, OutriderError
from outrider.registry.redis_connection import redis_url_from
from outrider.registry.registry import check_redis
from outrider.security.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.settings import from_flags, from_mapping, make_parser, settings_of
from outrider.visible_text import visible

SETTINGS: Final = (CoordinatorSettings, Listen)
# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store" below the folder, and Linux's limit of
# 107.
_RAY_TEMP_DIR_BYTES_MAX: Final = 107 - 64 - len("/r")


_ONLY_IN_FILES: Final = frozenset(name for name, each in settings_of(CoordinatorSettings).items() if each.flag is None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the coordinator; returns the exit status."""
    settings, listen = parse(arguments)
    if listen.host not in LOOPBACK_HOSTS and not listen.has_public_tls and settings.knows_callers:
        way_out = "" if listen.hosting is Hosting.PLAIN else "give --tls-dir, or "
        print(
            f"coordinator: keys and texts come to {listen.host} in the clear; {way_out}let only a load balancer with "
            "TLS reach that network",
            file=sys.stderr,
        )
    try:
        _check_before_start(settings, listen)
    except OutriderError as error:
        print(visible(f"coordinator: {error.message}"), file=sys.stderr)
        return 1
    announce = partial(_announce, settings, listen)
    if listen.hosting is Hosting.PLAIN:
        from coordinator.hosting import plain_process

        return plain_process.run(settings, listen, announce)
    from coordinator.hosting import ray_serve

    return ray_serve.run(settings, listen, announce)


def _announce(settings: CoordinatorSettings, listen: Listen, **facts: Any) -> None:
    """Prints the ready line; `facts` are what the hosting knows better."""
    known: dict[str, Any] = {
        "port": listen.port,
        "grpc_port": listen.grpc_port,
        "metrics_port": settings.metrics_port,
        "proxy": None,
    }
    known |= facts
    host = "127.0.0.1" if is_unspecified(listen.host) else listen.host
    line = {
        "event": "ready",
        "http": f"{'https' if listen.has_public_tls else 'http'}://{join_address(host, known['port'])}",
        "grpc": join_address(host, known["grpc_port"]),
        "metrics_port": known["metrics_port"],  # of the first replica
        "hosting": listen.hosting,
        "proxy": known["proxy"],
        "num_replicas": listen.num_replicas,
        "served_model_names": list(settings.served_model_names),
        "pid": os.getpid(),
    }
    print(json.dumps(line), flush=True)


def _check_before_start(settings: CoordinatorSettings, listen: Listen) -> None:
    """Finds in milliseconds what would otherwise come out of a replica's log seconds later.

    Raises ConfigurationError or RegistryUnavailable.
    """
    if listen.hosting is not Hosting.PLAIN:  # which reads them itself in a moment
        open_models(settings)
    if settings.tls_dir is not None:
        check_role(TlsFiles(Path(settings.tls_dir)).current(), Role.COORDINATOR)
    Authentication.of(settings)
    if settings.batch_files is not None:
        open_store(settings.batch_files)
    asyncio.run(check_redis(settings.redis_url, listen.redis_wait_s))
    for name, port in (("--port", listen.port), ("--grpc-port", listen.grpc_port)):
        try:
            bound_socket(listen.host, port).close()
        except OSError as error:
            raise ConfigurationError(f"{name} {port} on {listen.host} is not free: {error.strerror}") from error
    if listen.ray_temp_dir is not None and len(os.fsencode(listen.ray_temp_dir)) > _RAY_TEMP_DIR_BYTES_MAX:
        raise ConfigurationError(
            f"--ray-temp-dir {listen.ray_temp_dir} is longer than {_RAY_TEMP_DIR_BYTES_MAX} bytes; Ray's sockets "
            "below it would not fit the system's limit"
        )


def parse(arguments: Sequence[str] | None) -> tuple[CoordinatorSettings, Listen]:
    """Reads the command line. Ends the process with status 2 for a wrong one."""
    parser = make_parser("python -m coordinator", __doc__, *SETTINGS)
    parser.add_argument(
        "--settings",
        metavar="FILE",
        type=Path,
        help="JSON object of settings of replicas, as in Ray Serve's configuration; flags count before it",
    )
    given = parser.parse_args(arguments)
    in_file = _settings_of_file(parser, given.settings)
    if in_file:  # once more, so that flags count before it
        given = parser.parse_args(arguments, argparse.Namespace(**in_file))
    try:
        url = redis_url_from(given.redis_url or None, given.redis_url_file)
    except ConfigurationError as error:
        parser.error(error.message)
    if not url:
        parser.error("--redis-url, --redis-url-file or OUTRIDER_REDIS_URL is required")
    is_open = given.api_keys_file is None and given.oidc_issuer is None
    if given.host not in LOOPBACK_HOSTS and is_open and not given.is_insecure:
        parser.error(
            f"--host {given.host} without --api-keys lets whoever reaches it in; give --api-keys or --oidc-issuer, or "
            "--insecure where the network itself keeps strangers out"
        )
    for flag, is_given in (
        ("--require-client-certificates", given.needs_client_certificates),
        ("--require-worker-ids", given.require_worker_ids),
    ):
        if is_given and given.tls_dir is None:
            parser.error(f"{flag} needs --tls-dir")
    try:
        others = {
            "log_path": _log_path(given.hosting),
            "metrics_host": given.host,
            "is_local": given.host in LOOPBACK_HOSTS and is_open and not given.is_insecure,
            "is_metrics_insecure": given.is_insecure or vars(given).get("is_metrics_insecure", False),
        } | {name: value for name, value in in_file.items() if name in _ONLY_IN_FILES}
        settings = from_flags(CoordinatorSettings, given, **(others | {"redis_url": url}))
        tls_dir = None if settings.tls_dir is None else Path(settings.tls_dir)
        return settings, from_flags(Listen, given, tls_dir=tls_dir)
    except ValueError as error:
        parser.error(str(error))


def _settings_of_file(parser: argparse.ArgumentParser, path: Path | None) -> dict[str, Any]:
    """Settings by name of a file, if there is one. Ends the process if they are not good."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        return from_mapping(CoordinatorSettings, found, "settings")
    except OSError as error:
        parser.error(f"--settings {path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--settings {path}: {error}")


def _log_path(hosting: Hosting) -> str | None:
    """The file of replicas' logs: this process's standard error, where theirs goes to Ray's files."""
    return f"/proc/{os.getpid()}/fd/2" if hosting is Hosting.RAY_SERVE and sys.platform == "linux" else None


if __name__ == "__main__":
    sys.exit(main())
