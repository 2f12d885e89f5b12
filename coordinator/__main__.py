"""`python -m coordinator`: starts Ray and Serve on this machine, serves until SIGTERM or SIGINT, leaves
nothing.

Prints one line of JSON to standard output when requests can come in; everything else goes to standard error.
Exit status: 0 after a signal, 1 when it cannot start, 2 for a wrong command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.access.api_keys import KeyFile
from coordinator.api.http.batch_service import open_store
from coordinator.hosting.haproxy_launcher import LOOPBACK
from coordinator.hosting.ingress import Chosen, Ingress, ProxyUnusable, choose
from coordinator.hosting.ray_environment import ray_environment
from coordinator.hosting.ray_processes import RayProcesses, kill_descendants
from coordinator.models.models_file import open_models
from coordinator.settings import REFUSALS_AT_ONCE, CoordinatorSettings, Listen, Proxy
from outrider.errors import ConfigurationError, OutriderError
from outrider.registry.redis_connection import redis_url_from
from outrider.registry.registry import check_redis
from outrider.security.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.settings import from_flags, make_parser

SETTINGS: Final = (CoordinatorSettings, Listen)
# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store" below the folder, and Linux's limit of
# 107.
_RAY_TEMP_DIR_BYTES_MAX: Final = 107 - 64
_OBJECT_STORE_BYTES: Final = 100 << 20
_LOOK_EVERY_S: Final = 0.5
"""Whether Ray is still there."""
_SHUTDOWN_LOOK_EVERY_S: Final = 0.05
"""Whether the application has ended."""
_SHUTDOWN_MARGIN_S: Final = 3.0  # after the replicas' own time


class RayNotStarted(Exception):
    """Ray's processes did not come up; the message is Ray's own."""


class RayLost(Exception):
    """A process that Ray cannot do without has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the coordinator; returns the exit status."""
    settings, listen = _parse(arguments)
    if listen.host not in LOOPBACK_HOSTS and listen.tls_dir is None and settings.api_keys_file is not None:
        print(
            f"coordinator: keys and texts come to {listen.host} in the clear; give --tls-dir, or let only a "
            "load balancer with TLS reach that network",
            file=sys.stderr,
        )
    try:
        _check_before_start(settings, listen)
    except OutriderError as error:
        print(f"coordinator: {error.message}", file=sys.stderr)
        return 1
    stop = threading.Event()
    _stop_on_signals(stop)
    has_lost_ray = False
    own_temp_dir = None if listen.ray_temp_dir else tempfile.mkdtemp(prefix="or-", dir="/tmp")
    temp_dir = listen.ray_temp_dir or Path(str(own_temp_dir))
    try:
        # HAProxy's admin socket below it is for everybody who gets there.
        temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        chosen = _choose_proxy(settings, listen, temp_dir)
        _serve(settings, listen, chosen, temp_dir, stop)
    except ProxyUnusable as error:
        print(f"coordinator: --proxy {listen.proxy}: {error}", file=sys.stderr)
        return 1
    except RayNotStarted as error:
        print(
            f"coordinator: Ray did not start; is the machine overloaded, or short of memory? Ray says: {error}",
            file=sys.stderr,
        )
        return 1
    except RayLost as error:
        print(f"coordinator: Ray's {error} has ended, and so does this coordinator", file=sys.stderr, flush=True)
        kill_descendants()
        has_lost_ray = True
    finally:
        if own_temp_dir is not None:
            shutil.rmtree(own_temp_dir, ignore_errors=True)
    if has_lost_ray:
        os._exit(1)  # Ray's own way out would wait for what is not there any more
    return 0


def _choose_proxy(settings: CoordinatorSettings, listen: Listen, temp_dir: Path) -> Chosen:
    ingress = Ingress(
        host=listen.host,
        port=listen.port,
        grpc_port=listen.grpc_port,
        requests_max=(settings.requests_max + REFUSALS_AT_ONCE) * listen.num_replicas,
        generation_max_s=settings.deadline_max_s,
        tls_dir=listen.tls_dir,
        needs_client_certificates=listen.needs_client_certificates,
    )
    chosen = choose(listen.proxy, ingress, temp_dir, os.cpu_count() or 1)
    if chosen.why_not_haproxy is not None:
        print(f"coordinator: Serve's proxy instead of HAProxy: {chosen.why_not_haproxy}", file=sys.stderr)
    return chosen


def _serve(
    settings: CoordinatorSettings, listen: Listen, chosen: Chosen, temp_dir: Path, stop: threading.Event
) -> None:
    _prepare_ray_environment(chosen)
    import ray  # after the environment: Ray reads it on import
    from ray import serve

    from coordinator.hosting import app

    node_id = ""
    is_lost = False
    try:
        node_id = _start_ray(temp_dir)
        _stop_on_signals(stop)  # again: Ray has put its own handler in place, which exits with status 15
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # The ports are ours to name here only: options cannot change once Serve runs.
        serve.start(
            proxy_location="HeadOnly",
            # Behind HAProxy this is where replicas listen; its launcher gives the public listeners their own.
            http_options={
                "host": LOOPBACK if chosen.proxy is Proxy.HAPROXY else listen.host,
                "port": listen.port,
            },
            grpc_options={
                "port": listen.grpc_port,
                "grpc_servicer_functions": [
                    *app.GRPC_SERVICER_FUNCTIONS,
                    # It knows nothing of keys.
                    *([app.GRPC_REFLECTION_FUNCTION] if settings.api_keys_file is None else []),
                ],
                "enable_reflection": False,  # Serve's own has only the older version
            },
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run(app.build_application(settings, listen.num_replicas), name=app.APPLICATION_NAME, route_prefix="/")
        _announce(settings, listen, chosen.proxy)
        _wait(stop)
        _end_application()
    except RayLost:
        is_lost = True
        raise
    finally:
        if not is_lost:  # else it would be waited for
            if ray.is_initialized():
                serve.shutdown()
            ray.shutdown()
        if chosen.launcher is not None:
            chosen.launcher.unlink(missing_ok=True)
            if node_id:  # HAProxy's files, where Serve places them
                shutil.rmtree(temp_dir / node_id, ignore_errors=True)


def _start_ray(temp_dir: Path) -> str:
    """Starts Ray on this machine; returns its id of the machine. Raises RayNotStarted."""
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,  # replicas' output would land on our standard output
            logging_level="warning",
            _temp_dir=str(temp_dir),
            _node_ip_address="127.0.0.1",  # what Ray tells its own; it listens on more, and asks for its token
        )
    except Exception as error:  # it raises nothing narrower where its own processes do not come up in time
        raise RayNotStarted(" ".join(str(error).split())) from error
    return str(ray.get_runtime_context().get_node_id())


def _end_application() -> None:
    """Lets the replicas finish or end their requests while the proxies stay: `serve.shutdown` takes these first."""
    from ray import serve

    from coordinator.hosting import app

    serve.delete(app.APPLICATION_NAME, _blocking=False)
    give_up_at_s = time.monotonic() + app.SHUTDOWN_TIMEOUT_S + _SHUTDOWN_MARGIN_S
    while app.APPLICATION_NAME in serve.status().applications and time.monotonic() < give_up_at_s:
        time.sleep(_SHUTDOWN_LOOK_EVERY_S)


def _wait(stop: threading.Event) -> None:
    """Until it is set. Raises RayLost."""
    with contextlib.closing(RayProcesses.of_this_process()) as processes:
        while not stop.wait(_LOOK_EVERY_S):
            if (name := processes.lost()) is not None:
                raise RayLost(name)


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _announce(settings: CoordinatorSettings, listen: Listen, proxy: Proxy) -> None:
    host = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
    line = {
        "event": "ready",
        "http": f"{'http' if listen.tls_dir is None else 'https'}://{host}:{listen.port}",
        "grpc": f"{host}:{listen.grpc_port}",
        "metrics_port": settings.metrics_port,  # of the first replica
        "proxy": proxy,
        "num_replicas": listen.num_replicas,
        "served_model_names": list(settings.served_model_names),
        "pid": os.getpid(),
    }
    print(json.dumps(line), flush=True)


def _prepare_ray_environment(chosen: Chosen) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    environment, told = ray_environment(os.environ, chosen.environment, root, secrets.token_hex(32))
    for sentence in told:
        print(f"coordinator: {sentence}", file=sys.stderr)
    os.environ.update(environment)


def _check_before_start(settings: CoordinatorSettings, listen: Listen) -> None:
    """Finds in milliseconds what would otherwise come out of a replica's log seconds later.

    Raises ConfigurationError or RegistryUnavailable.
    """
    open_models(settings)
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
            # Replicas' own standard error goes to Ray's files.
            log_path=f"/proc/{os.getpid()}/fd/2" if sys.platform == "linux" else None,
            metrics_host=given.host,
            is_metrics_insecure=given.is_insecure or vars(given).get("is_metrics_insecure", False),
        )
        tls_dir = None if settings.tls_dir is None else Path(settings.tls_dir)
        return settings, from_flags(Listen, given, tls_dir=tls_dir)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
