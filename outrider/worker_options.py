"""The part of a worker's command line that both kinds share."""

from __future__ import annotations

import argparse
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.errors import ConfigurationError
from outrider.logs import LogFormat
from outrider.redis_connection import redis_url_from
from outrider.tls import LOOPBACK_HOSTS

if TYPE_CHECKING:
    from outrider.engine.model import EngineConfig

ZONE_CHARS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The part of a worker's command line that both kinds share."""

    host: str
    port: int  # 0 picks a free one
    redis_url: str | None  # None: not announced, for tests and benchmarks
    metrics_port: int  # 0 picks a free one
    worker_id: str
    drain_grace_s: float
    stall_s: float = 10.0  # without a sign of life from the model until the worker counts as not ready
    stall_exit_s: float = 30.0  # until it ends itself
    announce: str | None = None  # host:port under which others reach it; None: where it listens
    zone: str = ""  # where it is, in the operator's words
    tls_dir: Path | None = None  # certificates; None: in the clear
    health_port: int | None = None  # of health alone, in the clear; 0 picks a free one
    is_insecure: bool = False  # may be reached from other machines in the clear

    def __post_init__(self) -> None:
        """Raises ConfigurationError, naming the flag."""
        if self.tls_dir is None and self.host not in LOOPBACK_HOSTS and not self.is_insecure:
            raise ConfigurationError(
                f"--host {self.host} without --tls-dir lets whoever reaches it in; give --tls-dir, or --insecure where "
                "the network itself keeps strangers out"
            )
        if not 0 < self.stall_s < self.stall_exit_s:
            raise ConfigurationError(
                f"--stall-s is {self.stall_s:g} and --stall-exit-s {self.stall_exit_s:g}; permitted: above 0, and the "
                "second above the first"
            )
        if len(self.zone) > ZONE_CHARS_MAX:
            raise ConfigurationError(
                f"--zone has {len(self.zone)} characters; permitted: at most {ZONE_CHARS_MAX}"
            )


def add_worker_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Adds the flags of `WorkerOptions` and of the engine."""
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to serve on (default %(default)s)")
    network.add_argument("--port", type=int, default=0, help="gRPC port; 0 picks a free one (default)")
    network.add_argument(
        "--announce",
        default=None,
        metavar="HOST:PORT",
        help="where others reach this worker, when it is behind a proxy or serves on 0.0.0.0; default: host and port",
    )
    network.add_argument(
        "--metrics-port", type=int, default=0, help="HTTP port of /metrics; 0 picks a free one"
    )
    network.add_argument(
        "--redis-url",
        default=None,
        help="where to announce the worker (default: OUTRIDER_REDIS_URL); not announced without it",
    )
    network.add_argument(
        "--redis-url-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="that holds the URL and its password, in place of --redis-url: other processes can see a command line and "
        "an environment (default: OUTRIDER_REDIS_URL_FILE)",
    )
    network.add_argument(
        "--tls-dir",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="with tls.crt, tls.key and ca.crt: mutual TLS on all ports; the files may be replaced at any time",
    )
    network.add_argument(
        "--health-port",
        type=int,
        default=None,
        metavar="PORT",
        help="with --tls-dir: answers grpc.health.v1 and nothing else, in the clear, for probes that have no "
        "certificate (default: none)",
    )
    network.add_argument(
        "--otlp-endpoint",
        default=None,
        metavar="URL",
        help="OpenTelemetry collector to send traces to, such as http://127.0.0.1:4317 (default: no traces)",
    )
    network.add_argument(
        "--log-format",
        type=LogFormat,
        choices=list(LogFormat),
        default=LogFormat.TEXT,
        metavar="{text,json}",
        help="of log lines, on standard error (default %(default)s)",
    )
    network.add_argument(
        "--insecure",
        action="store_true",
        help="serve on another --host than this machine's own without --tls-dir",
    )
    network.add_argument(
        "--zone",
        default=os.environ.get("OUTRIDER_ZONE", ""),
        help="where the worker is, such as a rack or a zone of the cloud: hints are asked of draft workers in the "
        "target's zone first, until their round trip is known (default: OUTRIDER_ZONE)",
    )
    network.add_argument("--worker-id", default=f"{role}-{uuid.uuid4().hex[:8]}", help="unique in its pool")
    network.add_argument(
        "--drain-grace-s", type=float, default=30.0, help="time to finish sessions after SIGTERM, seconds"
    )
    network.add_argument(
        "--stall-s",
        type=float,
        default=10.0,
        help="after a step of so many seconds the worker is not ready and gets no new sessions (default %(default)s)",
    )
    network.add_argument(
        "--stall-exit-s",
        type=float,
        default=30.0,
        help="after one of so many the process ends itself, so that it is restarted (default %(default)s)",
    )
    parser.set_defaults(role=role)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", required=True, help="folder in Hugging Face format")
    engine.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of weights and KV"
    )
    engine.add_argument(
        "--quantization",
        default="none",
        choices=("none", "int8", "fp8"),
        help="of the weights, while loading: int8 and fp8 halve the memory and move the logits a little; on a CPU a "
        "step with int8 takes about as long or longer, one with fp8 several times as long (default none)",
    )
    engine.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where the model runs; auto: on the GPU if there is one (default %(default)s)",
    )
    engine.add_argument("--max-num-seqs", type=int, default=32, help="sessions at once (default %(default)s)")
    engine.add_argument(
        "--block-size",
        type=int,
        default=None,
        help="KV entries per block (default: 16 on a CPU, 256 on a GPU, whose attention takes multiples of that)",
    )
    engine.add_argument(
        "--kv-cache-gib",
        type=float,
        default=2.0,
        help="most memory for KV, GiB; a target worker's sessions take of it as they grow, and give way to each other "
        "when it is used up (default %(default)s)",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="texts that begin alike share the KV that was computed for them (default on)",
    )
    engine.add_argument(
        "--max-model-len", type=int, default=None, help="prompt plus output; default: the model's"
    )
    engine.add_argument(
        "--enforce-eager",
        action="store_true",
        help="run transformers' own modules even where the compiled kernels could, and on a GPU no CUDA graphs",
    )
    engine.add_argument("--num-threads", type=int, default=1, help="torch threads (default %(default)s)")
    engine.add_argument(
        "--cpu-affinity", default=None, help="cores to run on, such as 0 or 0,1; default: any"
    )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's part of the command line. Imports torch."""
    from outrider.engine.model import EngineConfig, device_for

    return EngineConfig(
        Path(arguments.model),
        dtype=arguments.dtype,
        device=device_for(arguments.device),
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        block_size=arguments.block_size,
        kv_cache_bytes=int(arguments.kv_cache_gib * 2**30),
        num_threads=arguments.num_threads,
        quantization=arguments.quantization,
        use_kernels=not arguments.enforce_eager,
        has_trees=arguments.role == "draft",
    )


def worker_options(arguments: argparse.Namespace) -> WorkerOptions:
    """Raises ConfigurationError, naming the flag."""
    return WorkerOptions(
        arguments.host,
        arguments.port,
        redis_url_from(arguments.redis_url, arguments.redis_url_file),
        arguments.metrics_port,
        arguments.worker_id,
        arguments.drain_grace_s,
        arguments.stall_s,
        arguments.stall_exit_s,
        arguments.announce,
        arguments.zone,
        arguments.tls_dir,
        arguments.health_port,
        arguments.insecure,
    )
