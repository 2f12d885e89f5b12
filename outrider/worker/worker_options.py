"""Settings of a worker as a server: where it listens, whom it trusts, when it counts as lost."""

from __future__ import annotations

import argparse
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from outrider.addresses import bare_host
from outrider.errors import ConfigurationError
from outrider.observability.logs import LogFormat
from outrider.registry.redis_connection import RedisSettings, redis_url_from
from outrider.security.tls import LOOPBACK_HOSTS
from outrider.settings import CAPACITY, NETWORK, SECURITY, check, from_flags, same_as, setting

ZONE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings that both kinds of worker share. Raises ConfigurationError, naming the flag."""

    host: str = setting(
        "127.0.0.1", "address to serve on; :: is all addresses, IPv6 and IPv4", NETWORK, "address", parse=bare_host
    )
    port: int = setting(0, "gRPC port; 0 picks a free one", NETWORK, "port")
    redis_url: str | None = same_as(
        RedisSettings,
        "redis_url",
        help="Redis where the worker is announced; without it, it is not announced",
    )
    metrics_port: int = setting(0, "HTTP port of /metrics; 0 picks a free one", NETWORK, "port")
    worker_id: str = setting("", "id of the worker, unique in its pool", NETWORK, "id", shows="a random one")
    drain_grace_s: float = setting(30.0, "time to finish sequences after SIGTERM", CAPACITY, "seconds", at_least=0)
    stall_s: float = setting(
        10.0, "a step longer than this makes the worker not ready, so that it gets no new sequences",
        CAPACITY, "seconds", above=0,
    )  # fmt: skip
    stall_exit_s: float = setting(
        30.0, "a step longer than this ends the process, so that it is restarted", CAPACITY, "seconds"
    )
    announce: str | None = setting(
        None, "address at which others reach this worker, if it is behind a proxy or serves on all addresses: a host, "
        "or host:port if the port is another one; an IPv6 address before a port stands in brackets",
        NETWORK, "host[:port]", shows="host and port",
    )  # fmt: skip
    zone: str = setting(
        "", "location of the worker, such as a rack or a zone of the cloud: draft workers in the target's zone "
        "are chosen first, until their round trip is known; empty or blank: unknown, which is no zone",
        NETWORK, "name", variable="OUTRIDER_ZONE", parse=str.strip,
    )  # fmt: skip
    tls_dir: Path | None = setting(
        None, "with tls.crt, tls.key and ca.crt: mutual TLS on all ports; the files may be replaced at any time",
        SECURITY, "folder",
    )  # fmt: skip
    health_port: int | None = setting(
        None, "with --tls-dir: port without TLS that answers grpc.health.v1 alone, for probes that have no "
        "certificate; 0 picks a free one",
        NETWORK, "port", shows="none",
    )  # fmt: skip
    is_insecure: bool = setting(
        False, "serve on another --host than this machine's own without --tls-dir",
        SECURITY, flag="--insecure",
    )  # fmt: skip
    redis_url_file: Path | None = same_as(RedisSettings, "redis_url_file")
    redis_wait_s: float = same_as(RedisSettings, "redis_wait_s")
    load_stall_exit_s: float = setting(
        600.0, "loading of the model that neither computes nor reads for this long ends the process, so that it is "
        "restarted; not of a model between several ranks, which wait for each other",
        CAPACITY, "seconds", above=0,
    )  # fmt: skip
    otlp_endpoint: str | None = setting(
        None, "OpenTelemetry collector to send traces to, such as http://127.0.0.1:4317",
        SECURITY, "URL", shows="no traces",
    )  # fmt: skip
    log_format: LogFormat = setting(LogFormat.TEXT, "format of log lines, on standard error", SECURITY)

    def __post_init__(self) -> None:
        check(self)
        if self.tls_dir is None and self.host not in LOOPBACK_HOSTS and not self.is_insecure:
            raise ConfigurationError(
                f"--host {self.host} without --tls-dir lets whoever reaches it in; give --tls-dir, or --insecure where "
                "the network itself keeps strangers out"
            )
        if not self.stall_s < self.stall_exit_s:
            raise ConfigurationError(
                f"--stall-s is {self.stall_s:g} and --stall-exit-s {self.stall_exit_s:g}; permitted: above 0, and the "
                "second above the first"
            )
        if len(self.zone) > ZONE_CHARS_MAX:
            raise ConfigurationError(f"--zone has {len(self.zone)} characters; permitted: at most {ZONE_CHARS_MAX}")


def worker_options(arguments: argparse.Namespace) -> WorkerOptions:
    """Raises ConfigurationError, naming the flag."""
    options = from_flags(WorkerOptions, arguments)
    return replace(
        options,
        redis_url=redis_url_from(options.redis_url, options.redis_url_file),
        worker_id=options.worker_id or f"{arguments.role}-{uuid.uuid4().hex[:8]}",
    )
