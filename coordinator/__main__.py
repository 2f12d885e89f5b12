"""`python -m coordinator`: starts Ray and Serve on this machine, serves until SIGTERM or SIGINT, leaves
nothing.

Prints one line of JSON to standard output when requests can come in; everything else goes to standard error.
Exit status: 0 after a signal, 1 when it cannot start, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.haproxy_launcher import LOOPBACK
from coordinator.ingress import Chosen, Ingress, Proxy, ProxyUnusable, choose
from coordinator.ray_environment import ray_environment
from coordinator.ray_processes import RayProcesses, kill_descendants
from coordinator.settings import REFUSALS_AT_ONCE, CoordinatorSettings
from outrider.api_keys import KeyFile
from outrider.errors import ConfigurationError, OutriderError
from outrider.logs import LogFormat
from outrider.redis_connection import redis_url_from
from outrider.registry import check_redis
from outrider.tenants import parse_tenant_weight
from outrider.tls import LOOPBACK_HOSTS, Role, TlsFiles, check_role
from outrider.tokenizer import Tokenizer

# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store" below the folder, and Linux's limit of
# 107.
_RAY_TEMP_DIR_BYTES_MAX: Final = 107 - 64
_OBJECT_STORE_BYTES: Final = 100 << 20
_LOOK_EVERY_S: Final = 0.5
"""Whether Ray is still there."""


class RayLost(Exception):
    """A process that Ray cannot do without has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where this machine listens, and with how much of itself."""

    host: str
    port: int
    grpc_port: int
    num_replicas: int
    ray_temp_dir: Path | None
    proxy: Proxy | None  # None: HAProxy where it runs
    tls_dir: Path | None
    needs_client_certificates: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the coordinator; returns the exit status."""
    settings, listen = _parse(arguments)
    if listen.host not in LOOPBACK_HOSTS and listen.tls_dir is None and settings.api_keys_file is not None:
        print(
            f"coordinator: keys and texts come to {listen.host} in the clear; give --tls-dir, or keep that "
            "network to a load balancer which speaks TLS",
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
    except RayLost as error:
        print(
            f"coordinator: Ray's {error} has ended, and so does this coordinator", file=sys.stderr, flush=True
        )
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

    from coordinator.app import APPLICATION_NAME, GRPC_SERVICER_FUNCTIONS, build_application

    node_id = ""
    is_lost = False
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
        node_id = ray.get_runtime_context().get_node_id()
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
                "grpc_servicer_functions": list(GRPC_SERVICER_FUNCTIONS),
                # It knows nothing of keys.
                "enable_reflection": settings.api_keys_file is None,
            },
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run(build_application(settings, listen.num_replicas), name=APPLICATION_NAME, route_prefix="/")
        _announce(settings, listen, chosen.proxy)
        _wait(stop)
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
    Tokenizer(Path(settings.tokenizer_dir), settings.chat_template)
    if settings.tls_dir is not None:
        check_role(TlsFiles(Path(settings.tls_dir)).current(), Role.COORDINATOR)
    if settings.api_keys_file is not None:
        KeyFile(Path(settings.api_keys_file))
    asyncio.run(check_redis(settings.redis_url))
    for name, port in (("--port", listen.port), ("--grpc-port", listen.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((listen.host, port))
            except OSError as error:
                raise ConfigurationError(
                    f"{name} {port} on {listen.host} is not free: {error.strerror}"
                ) from error
    if listen.ray_temp_dir is not None and len(os.fsencode(listen.ray_temp_dir)) > _RAY_TEMP_DIR_BYTES_MAX:
        raise ConfigurationError(
            f"--ray-temp-dir {listen.ray_temp_dir} is longer than {_RAY_TEMP_DIR_BYTES_MAX} bytes; Ray's sockets "
            "below it would not fit the system's limit"
        )


def _tenant_weight(text: str) -> tuple[str, float]:
    """Raises ArgumentTypeError."""
    try:
        return parse_tenant_weight(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse(arguments: Sequence[str] | None) -> tuple[CoordinatorSettings, Listen]:
    parser = argparse.ArgumentParser(prog="python -m coordinator", description=__doc__)
    parser.add_argument("--tokenizer", required=True, metavar="MODEL_DIR", type=Path,
                        help="model folder whose tokenizer the targets share")  # fmt: skip
    parser.add_argument("--redis-url", help="the registry; default: OUTRIDER_REDIS_URL")
    parser.add_argument("--redis-url-file", type=Path, metavar="FILE",
                        help="that holds the URL and its password, in place of --redis-url; default: "
                        "OUTRIDER_REDIS_URL_FILE")  # fmt: skip
    parser.add_argument("--api-keys", type=Path, metavar="FILE",
                        help="requests need a key from this file (`outrider keys`), which may change at any time; "
                        "without it whoever reaches the coordinator may ask")  # fmt: skip
    parser.add_argument("--otlp-endpoint", metavar="URL",
                        help="OpenTelemetry collector to send traces to, such as http://127.0.0.1:4317; "
                        "OpenTelemetry's variables for sampling and headers hold (default: no traces)")  # fmt: skip
    parser.add_argument("--log-format", type=LogFormat, choices=list(LogFormat), default=LogFormat.TEXT,
                        metavar="{text,json}",
                        help="of replicas' log lines, on standard error (default: text)")  # fmt: skip
    parser.add_argument("--log-requests", action="store_true",
                        help="a line for each request: who, how long, how many tokens; never what was said",
    )  # fmt: skip
    parser.add_argument("--tls-dir", type=Path, metavar="FOLDER",
                        help="with tls.crt, tls.key and ca.crt: mutual TLS with the workers, and TLS on the public "
                        "ports (HAProxy only); the files may be replaced at any time")  # fmt: skip
    parser.add_argument("--require-client-certificates", action="store_true",
                        help="with --tls-dir: clients, too, need a certificate that ca.crt signed")  # fmt: skip
    parser.add_argument("--require-worker-ids", action="store_true",
                        help="with --tls-dir: use no worker whose certificate does not name its id (`outrider "
                        "certificates --worker`); without it one that names no id may announce every one")  # fmt: skip
    parser.add_argument("--insecure", action="store_true",
                        help="serve on another --host than this machine's own without --api-keys")  # fmt: skip
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the HTTP and gRPC listeners; all else of ours listens on the loopback, and Ray's own ports "
        "ask for its token (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=8000, help="of HTTP (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=9000, help="of gRPC (default: %(default)s)")
    parser.add_argument("--metrics-port", type=int, metavar="PORT",
                        help="each replica's own /metrics for Prometheus, on the first free port from here on; that of "
                        "--port is some replica's (default: none; with --tls-dir for those with a certificate, which "
                        "beside --api-keys it has to be)")  # fmt: skip
    parser.add_argument("--proxy", type=Proxy, choices=list(Proxy), metavar="{haproxy,python}",
                        help="what takes requests in; python is Serve's own, which runs anywhere and costs several "
                        "times more per streamed chunk (default: haproxy where it runs)")  # fmt: skip
    parser.add_argument(
        "--num-replicas", type=int, default=1, help="coordinator replicas (default: %(default)s)"
    )
    parser.add_argument("--served-model-name", action="append", default=[], metavar="NAME",
                        help="serve only targets of this name; may be repeated (default: all)")  # fmt: skip
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja file instead of the model's own"
    )
    parser.add_argument(
        "--seed-requests", action="store_true",
        help="give sampled requests without a seed a random one, told in metrics.seed, so that all decoding is coupled",
    )  # fmt: skip
    parser.add_argument(
        "--no-priors", action="store_true",
        help="start every request by speculating, whatever came of others like it",
    )  # fmt: skip
    parser.add_argument("--max-requests", type=int, default=512,
                        help="at once per replica, those that wait included; one of n (best_of) sequences counts n "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-queue-wait", type=float, default=30.0, metavar="SECONDS",
                        help="for a place at a target worker; a request that would wait longer is refused at once, "
                        "with status 429 and the time after which to come back (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tenant-weight", action="append", default=[], type=_tenant_weight, metavar="NAME=WEIGHT",
                        help="share of a tenant (`user` over HTTP, `tenant` over gRPC), of tokens and slots, where "
                        "requests wait, beside the 1 of those not named; may be repeated")  # fmt: skip
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS",
                        help="for requests without a deadline (default: %(default)s)")  # fmt: skip
    parser.add_argument("--target-silence-max", type=float, default=20.0, metavar="SECONDS",
                        help="without a word from the target worker of a text; then the worker counts as lost and "
                        "another goes on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--client-stall-max", type=float, default=30.0, metavar="SECONDS",
                        help="that output may wait for a client that does not read it; then the request ends, and can "
                        "be resumed, and a connection that takes nothing is closed (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--ray-temp-dir", type=Path, help="Ray's files; short (default: a new folder in /tmp)"
    )
    given = parser.parse_args(arguments)
    try:
        redis_url = redis_url_from(given.redis_url, given.redis_url_file)
    except ConfigurationError as error:
        parser.error(error.message)
    if not redis_url:
        parser.error("--redis-url, --redis-url-file or OUTRIDER_REDIS_URL is required")
    if given.host not in LOOPBACK_HOSTS and given.api_keys is None and not given.insecure:
        parser.error(
            f"--host {given.host} without --api-keys lets whoever reaches it in; give --api-keys, or --insecure where "
            "the network itself keeps strangers out"
        )
    if given.require_client_certificates and given.tls_dir is None:
        parser.error("--require-client-certificates needs --tls-dir")
    if given.require_worker_ids and given.tls_dir is None:
        parser.error("--require-worker-ids needs --tls-dir")
    if given.num_replicas < 1:
        parser.error("--num-replicas must be at least 1")
    try:
        settings = CoordinatorSettings(
            tokenizer_dir=str(given.tokenizer.resolve()),
            redis_url=redis_url,
            otlp_endpoint=given.otlp_endpoint,
            log_format=given.log_format,
            # Replicas' own standard error goes to Ray's files.
            log_path=f"/proc/{os.getpid()}/fd/2" if sys.platform == "linux" else None,
            logs_requests=given.log_requests,
            tls_dir=str(given.tls_dir.absolute()) if given.tls_dir else None,
            require_worker_ids=given.require_worker_ids,
            api_keys_file=str(given.api_keys.absolute()) if given.api_keys else None,
            served_model_names=tuple(given.served_model_name),
            chat_template=given.chat_template.read_text(encoding="utf-8") if given.chat_template else None,
            seed_requests=given.seed_requests,
            uses_priors=not given.no_priors,
            requests_max=given.max_requests,
            queue_wait_max_s=given.max_queue_wait,
            tenant_weights=tuple(given.tenant_weight),
            deadline_default_s=given.request_timeout,
            target_silence_max_s=given.target_silence_max,
            client_stall_max_s=given.client_stall_max,
            metrics_port=given.metrics_port,
            is_metrics_insecure=given.insecure,
            metrics_host=given.host,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    listen = Listen(
        host=given.host,
        port=given.port,
        grpc_port=given.grpc_port,
        num_replicas=given.num_replicas,
        ray_temp_dir=given.ray_temp_dir,
        proxy=given.proxy,
        tls_dir=given.tls_dir,
        needs_client_certificates=given.require_client_certificates,
    )
    return settings, listen


if __name__ == "__main__":
    sys.exit(main())
