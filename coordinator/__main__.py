"""`python -m coordinator`: serves until SIGTERM or SIGINT, on Ray Serve or as a plain process; leaves nothing.

Prints one line of JSON to standard output when requests can come in; everything else goes to standard error.
Exit status: 0 after a signal, 1 when it cannot start, 2 for a wrong command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from coordinator.access.api_keys import KeyFile
from coordinator.api.http.batch_service import open_store
from coordinator.settings import CoordinatorSettings, Hosting, Listen
from outrider.errors import ConfigurationError, OutriderError
from outrider.registry.redis_connection import redis_url_from
from outrider.registry.registry import check_redis
from outrider.security.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.settings import from_flags, make_parser
from outrider.text.tokenizer import Tokenizer

SETTINGS: Final = (CoordinatorSettings, Listen)
# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store" below the folder, and Linux's limit of
# 107.
_RAY_TEMP_DIR_BYTES_MAX: Final = 107 - 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the coordinator; returns the exit status."""
    settings, listen = _parse(arguments)
    if listen.host not in LOOPBACK_HOSTS and not listen.has_public_tls and settings.api_keys_file is not None:
        way_out = "" if listen.hosting is Hosting.PLAIN else "give --tls-dir, or "
        print(
            f"coordinator: keys and texts come to {listen.host} in the clear; {way_out}let only a load balancer with "
            "TLS reach that network",
            file=sys.stderr,
        )
    try:
        _check_before_start(settings, listen)
    except OutriderError as error:
        print(f"coordinator: {error.message}", file=sys.stderr)
        return 1
    announce = partial(_announce, settings, listen)
    if listen.hosting is Hosting.PLAIN:
        from coordinator.hosting import plain_process

        return plain_process.run(settings, listen, announce)
    from coordinator.hosting import ray_serve

    return ray_serve.run(settings, listen, announce)


def _announce(settings: CoordinatorSettings, listen: Listen, **facts: Any) -> None:
    """Prints the ready line; `facts` are what the hosting knows better."""
    known = {"port": listen.port, "grpc_port": listen.grpc_port, "metrics_port": settings.metrics_port, "proxy": None}
    known |= facts
    host = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
    line = {
        "event": "ready",
        "http": f"{'https' if listen.has_public_tls else 'http'}://{host}:{known['port']}",
        "grpc": f"{host}:{known['grpc_port']}",
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
    if listen.hosting is not Hosting.PLAIN:  # which reads it itself in a moment
        Tokenizer(Path(settings.tokenizer_dir), settings.chat_template)
    if settings.tls_dir is not None:
        check_role(TlsFiles(Path(settings.tls_dir)).current(), Role.COORDINATOR)
    if settings.api_keys_file is not None:
        KeyFile(Path(settings.api_keys_file))
    if settings.batch_files is not None:
        open_store(settings.batch_files)
    asyncio.run(check_redis(settings.redis_url))
    for name, port in (("--port", listen.port), ("--grpc-port", listen.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((listen.host, port))
            except OSError as error:
                raise ConfigurationError(f"{name} {port} on {listen.host} is not free: {error.strerror}") from error
    if listen.ray_temp_dir is not None and len(os.fsencode(listen.ray_temp_dir)) > _RAY_TEMP_DIR_BYTES_MAX:
        raise ConfigurationError(
            f"--ray-temp-dir {listen.ray_temp_dir} is longer than {_RAY_TEMP_DIR_BYTES_MAX} bytes; Ray's sockets "
            "below it would not fit the system's limit"
        )


def _parse(arguments: Sequence[str] | None) -> tuple[CoordinatorSettings, Listen]:
    parser = make_parser("python -m coordinator", __doc__, *SETTINGS)
    given = parser.parse_args(arguments)
    try:
        url = redis_url_from(given.redis_url or None, given.redis_url_file)
    except ConfigurationError as error:
        parser.error(error.message)
    if not url:
        parser.error("--redis-url, --redis-url-file or OUTRIDER_REDIS_URL is required")
    if given.host not in LOOPBACK_HOSTS and given.api_keys_file is None and not given.is_insecure:
        parser.error(
            f"--host {given.host} without --api-keys lets whoever reaches it in; give --api-keys, or --insecure where "
            "the network itself keeps strangers out"
        )
    for flag, is_given in (
        ("--require-client-certificates", given.needs_client_certificates),
        ("--require-worker-ids", given.require_worker_ids),
    ):
        if is_given and given.tls_dir is None:
            parser.error(f"{flag} needs --tls-dir")
    try:
        settings = from_flags(
            CoordinatorSettings,
            given,
            redis_url=url,
            log_path=_log_path(given.hosting),
            metrics_host=given.host,
            is_metrics_insecure=given.is_insecure or vars(given).get("is_metrics_insecure", False),
        )
        tls_dir = None if settings.tls_dir is None else Path(settings.tls_dir)
        return settings, from_flags(Listen, given, tls_dir=tls_dir)
    except ValueError as error:
        parser.error(str(error))


def _log_path(hosting: Hosting) -> str | None:
    """The file of replicas' logs: this process's standard error, where theirs goes to Ray's files."""
    return f"/proc/{os.getpid()}/fd/2" if hosting is Hosting.RAY_SERVE and sys.platform == "linux" else None


if __name__ == "__main__":
    sys.exit(main())
