"""A coordinator on Ray Serve: starts Ray and Serve on this machine, serves until SIGTERM or SIGINT, leaves nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from coordinator.hosting.haproxy_launcher import LOOPBACK
from coordinator.hosting.ingress import Chosen, Ingress, ProxyUnusable, choose
from coordinator.hosting.ray_environment import ray_environment
from coordinator.hosting.ray_processes import RayProcesses, kill_descendants
from coordinator.intake.request_limit import ongoing_max
from coordinator.settings import CoordinatorSettings, Listen, Proxy
from outrider.errors import ConfigurationError
from outrider.local.private_files import claim_folder
from outrider.visible_text import visible

_OBJECT_STORE_BYTES: Final = 100 << 20
_LOOK_EVERY_S: Final = 0.5
"""Whether Ray is still there."""
_SHUTDOWN_LOOK_EVERY_S: Final = 0.05
"""Whether the application has ended."""
_RAY_FOLDER: Final = "r"  # short: Ray's sockets below it have long names
_SHUTDOWN_MARGIN_S: Final = 3.0  # after the replicas' own time

Announce = Callable[..., object]
"""Tells that requests can come in, with facts about how they do."""


class RayNotStarted(Exception):
    """Ray's processes did not come up; the message is Ray's own."""


class RayLost(Exception):
    """A process that Ray cannot do without has ended."""


def run(settings: CoordinatorSettings, listen: Listen, announce: Announce) -> int:
    """Serves until a signal; returns the exit status."""
    if importlib.util.find_spec("ray") is None:
        print(
            "coordinator: Ray is not installed: pip install 'outrider[coordinator]', or give --hosting plain",
            file=sys.stderr,
        )
        return 1
    stop = threading.Event()
    _stop_on_signals(stop)
    has_lost_ray = False
    own_temp_dir = None if listen.ray_temp_dir else tempfile.mkdtemp(prefix="or-", dir="/tmp")
    temp_dir = listen.ray_temp_dir or Path(str(own_temp_dir))
    try:
        # HAProxy's admin socket below it is for everybody who gets there, and its launcher runs as this user.
        claim_folder(temp_dir)
        chosen = _choose_proxy(settings, listen, temp_dir)
        _serve(settings, listen, chosen, temp_dir, stop, announce)
    except ConfigurationError as error:
        print(visible(f"coordinator: {error.message}"), file=sys.stderr)
        return 1
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
        requests_max=ongoing_max(settings.requests_max) * listen.num_replicas,
        generation_max_s=settings.deadline_max_s,
        tls_dir=listen.tls_dir,
        needs_client_certificates=listen.needs_client_certificates,
    )
    chosen = choose(listen.proxy, ingress, temp_dir, os.cpu_count() or 1)
    if chosen.why_not_haproxy is not None:
        print(f"coordinator: Serve's proxy instead of HAProxy: {chosen.why_not_haproxy}", file=sys.stderr)
    return chosen


def _serve(
    settings: CoordinatorSettings,
    listen: Listen,
    chosen: Chosen,
    temp_dir: Path,
    stop: threading.Event,
    announce: Announce,
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
                    *([] if settings.knows_callers else [app.GRPC_REFLECTION_FUNCTION]),
                ],
                "enable_reflection": False,  # Serve's own has only the older version
            },
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        application = app.build_application(settings, listen.num_replicas, listen.drain_grace_s)
        serve.run(application, name=app.APPLICATION_NAME, route_prefix="/")
        announce(proxy=chosen.proxy)
        _wait(stop)
        _end_application(listen.drain_grace_s)
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
            # A folder of its own in ours: Ray opens its folder to every user of this machine.
            _temp_dir=str(temp_dir / _RAY_FOLDER),
            _node_ip_address="127.0.0.1",  # what Ray tells its own; it listens on more, and asks for its token
        )
    except Exception as error:  # it raises nothing narrower where its own processes do not come up in time
        raise RayNotStarted(" ".join(str(error).split())) from error
    return str(ray.get_runtime_context().get_node_id())


def _end_application(grace_s: float) -> None:
    """Lets the replicas finish or end their requests while the proxies stay: `serve.shutdown` takes these first."""
    from ray import serve

    from coordinator.hosting import app

    serve.delete(app.APPLICATION_NAME, _blocking=False)
    give_up_at_s = time.monotonic() + grace_s + _SHUTDOWN_MARGIN_S
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


def _prepare_ray_environment(chosen: Chosen) -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment, told = ray_environment(os.environ, chosen.environment, root, secrets.token_hex(32))
    for sentence in told:
        print(f"coordinator: {sentence}", file=sys.stderr)
    os.environ.update(environment)
