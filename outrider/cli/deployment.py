"""What `outrider serve` runs: the processes of one machine, as a plan.

Pure: options in, child specifications out. Paths are only put together here, never looked at.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from outrider.child_spec import ChildSpec
from outrider.tls import AUTHORITY, Role

ROOT = Path(__file__).resolve().parents[2]
DEMO_TARGET = ROOT / "demo" / "target"
DEMO_DRAFT = ROOT / "demo" / "draft"

# Loading and packing gigabytes of weights takes minutes; a worker that hangs should still be noticed.
WORKER_READY_TIMEOUT_S = 600.0
COORDINATOR_READY_TIMEOUT_S = 120.0
WORKER_DRAIN_S = 5.0  # the coordinator stops first, so what is left to finish belongs to nobody
WORKER_GRACE_S = 10.0
COORDINATOR_GRACE_S = 15.0  # Ray stops its own processes one after the other


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Affinity(StrEnum):
    AUTO = "auto"
    NONE = "none"


class Proxy(StrEnum):
    """What takes requests in, as the coordinator names it."""

    HAPROXY = "haproxy"
    PYTHON = "python"


@dataclass(frozen=True)
class Deployment:
    """One model pair on one machine. None leaves a value to the process it concerns."""

    target: Path
    draft: Path | None
    dtype: Dtype = Dtype.BFLOAT16
    num_speculative_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 9000
    num_target_workers: int = 1
    num_draft_workers: int = 1
    num_replicas: int = 1
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_requests: int | None = None  # these three as the coordinator takes them
    max_queue_wait_s: float | None = None
    tenant_weights: tuple[str, ...] = ()
    served_model_name: str | None = None
    affinity: Affinity = Affinity.AUTO
    quantization: Quantization = Quantization.NONE  # of the target
    draft_quantization: Quantization = Quantization.NONE
    seed_requests: bool = False
    proxy: Proxy | None = None
    enable_prefix_caching: bool = True
    enable_lookup: bool = True
    tensor_parallel_size: int = 1  # processes of each target worker, which share its model
    draft_tensor_parallel_size: int = 1
    allow_heterogeneous_vocab: bool = False
    api_keys: Path | None = None
    tls_dir: Path | None = None  # as `outrider certificates` makes it, with a folder for each part
    is_insecure: bool = False
    logs_requests: bool = False
    otlp_endpoint: str | None = None

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """What a client on this machine believes the coordinator by."""
        if self.tls_dir is None:
            return True
        return ssl.create_default_context(cafile=str(self.tls_dir / AUTHORITY))

    def certificates_of(self, role: Role) -> Path | None:
        """The folder of a part's certificate."""
        return None if self.tls_dir is None else self.tls_dir / role.name.lower()

    @property
    def model_name(self) -> str:
        """What clients ask for: the given name, else that of the target's folder."""
        return self.served_model_name or self.target.resolve().name


@dataclass(frozen=True)
class CorePlan:
    """The cores of each worker; an empty tuple means no pinning."""

    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]


def plan_cores(cores: Sequence[int], num_targets: int, num_drafts: int) -> CorePlan:
    """Splits cores so that no two workers share one: a draft and its target run at the same time, always.

    A draft model is small and gets one core, from the end. Targets share the rest evenly; from four cores on
    one is left to the coordinator. Too few cores for one each: nobody is pinned. Each gets neighbours of `cores`, which
    are near to one memory (`machine.usable_cores`).
    """
    if len(cores) < num_targets + num_drafts:
        return CorePlan(((),) * num_targets, ((),) * num_drafts)
    ordered = list(cores)
    split = len(ordered) - num_drafts
    drafts = tuple((core,) for core in ordered[split:])
    is_roomy = len(ordered) >= 4 and split > num_targets
    rest = ordered[1:split] if is_roomy else ordered[:split]
    share = len(rest) // num_targets
    targets = tuple(tuple(rest[i * share : (i + 1) * share]) for i in range(num_targets))
    return CorePlan(targets, drafts)


def worker_specs(deployment: Deployment, cores: Sequence[int], run_id: str) -> list[ChildSpec]:
    """Target workers, then draft workers. `run_id` keeps the worker ids of several systems apart."""
    num_drafts = deployment.num_draft_workers if deployment.draft is not None else 0
    usable = cores if deployment.affinity is Affinity.AUTO else ()
    plan = plan_cores(usable, deployment.num_target_workers, num_drafts)
    target_flags = {
        "--num-speculative-tokens": deployment.num_speculative_tokens,
        "--served-model-name": deployment.model_name,
        "--quantization": deployment.quantization.value,
    }
    draft_flags: dict[str, object] = {
        "--quantization": deployment.draft_quantization.value,
        "--target-tokenizer": deployment.target,
    }
    if deployment.draft_quantization is not Quantization.NONE:
        draft_flags["--dtype"] = Dtype.BFLOAT16.value  # whatever the target has: hints have no precision
    target_words = [] if deployment.enable_lookup else ["--no-lookup"]
    draft_words = ["--allow-heterogeneous-vocab"] if deployment.allow_heterogeneous_vocab else []
    specs = [
        _worker_spec(
            *("target", i, deployment.target, deployment, own, deployment.tensor_parallel_size),
            *(run_id, target_flags, target_words),
        )
        for i, own in enumerate(plan.targets)
    ]
    if deployment.draft is not None:
        specs += [
            _worker_spec(
                *("draft", i, deployment.draft, deployment, own, deployment.draft_tensor_parallel_size),
                *(run_id, draft_flags, draft_words),
            )
            for i, own in enumerate(plan.drafts)
        ]
    return specs


def _worker_spec(
    role: str,
    index: int,
    model: Path,
    deployment: Deployment,
    cores: tuple[int, ...],
    num_ranks: int,
    run_id: str,
    extra: Mapping[str, object],
    extra_words: Sequence[str] = (),
) -> ChildSpec:
    num_threads = max(len(cores) // num_ranks, 1) if cores else 0  # of each rank
    flags: dict[str, object] = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": 0,
        "--dtype": deployment.dtype.value,
        "--worker-id": f"{role}-{index}-{run_id}",
        "--drain-grace-s": WORKER_DRAIN_S,
        "--tls-dir": deployment.certificates_of(Role[role.upper()]),
        "--otlp-endpoint": deployment.otlp_endpoint,
        "--max-num-seqs": deployment.max_num_seqs,
        "--max-model-len": deployment.max_model_len,
        "--num-threads": num_threads or None,
        "--cpu-affinity": ",".join(map(str, cores)) or None,
        **extra,
    }
    words = [*flatten(flags), *extra_words]
    if not deployment.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    # OpenMP reads its own variable before any flag of ours is parsed.
    environment = {"OMP_NUM_THREADS": str(num_threads)} if cores else {}
    environment |= rank_environment(num_ranks)
    return ChildSpec(
        f"{role}-{index}",
        role,
        (*launcher(f"{role}_worker", num_ranks), *words),
        environment,
        ready_timeout_s=WORKER_READY_TIMEOUT_S,
        stop_grace_s=WORKER_GRACE_S,
    )


def coordinator_spec(deployment: Deployment, ray_temp_dir: Path) -> ChildSpec:
    """The Ray Serve application with its HTTP and gRPC ports."""
    flags = {
        "--tokenizer": deployment.target,
        "--host": deployment.host,
        "--port": deployment.port,
        "--grpc-port": deployment.grpc_port,
        "--num-replicas": deployment.num_replicas,
        "--served-model-name": deployment.model_name,
        "--ray-temp-dir": ray_temp_dir,
        "--proxy": None if deployment.proxy is None else deployment.proxy.value,
        "--max-requests": deployment.max_requests,
        "--max-queue-wait": deployment.max_queue_wait_s,
        "--api-keys": deployment.api_keys,
        "--tls-dir": deployment.certificates_of(Role.COORDINATOR),
        "--otlp-endpoint": deployment.otlp_endpoint,
    }
    switches = {
        "--seed-requests": deployment.seed_requests,
        "--insecure": deployment.is_insecure,
        "--log-requests": deployment.logs_requests,
    }
    words = [*flatten(flags), *(name for name, is_on in switches.items() if is_on)]
    for weight in deployment.tenant_weights:
        words += ["--tenant-weight", weight]
    return ChildSpec(
        "coordinator",
        "coordinator",
        (*module("coordinator"), *words),
        ready_timeout_s=COORDINATOR_READY_TIMEOUT_S,
        stop_grace_s=COORDINATOR_GRACE_S,
    )


def module(name: str) -> tuple[str, ...]:
    """The command that runs one of our packages with this interpreter."""
    return (sys.executable, "-m", name)


def launcher(name: str, num_ranks: int) -> tuple[str, ...]:
    """The command that runs one of our packages in so many processes, the ranks of one group on this machine."""
    if num_ranks == 1:
        return module(name)
    torchrun = (
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)),
        *("--monitor-interval", "0.2", "--shutdown-timeout", f"{WORKER_GRACE_S:g}"),
    )
    return (*module("torch.distributed.run"), *torchrun, "-m", name)


def rank_environment(num_ranks: int) -> dict[str, str]:
    """What the ranks of `launcher` find each other by: the loopback, whatever this machine is called."""
    if num_ranks == 1:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def flatten(flags: Mapping[str, object]) -> list[str]:
    """Command-line words of the flags that have a value."""
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
