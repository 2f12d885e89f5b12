"""Plan of the processes that `outrider serve` runs on one machine.

Pure: options in, child specifications out. Paths are only put together here, never looked at.
"""

from __future__ import annotations

import shlex
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from command_line.checkout import engine_path, launcher, module, rank_environment
from command_line.start.cores import WorkerThreads, draft_threads, plan_cores, target_threads
from coordinator.formats.names import ReasoningParserName, ToolCallParserName, check_combination
from coordinator.settings import ALL_TENANTS, CoordinatorSettings, Hosting, Listen, Proxy, check_identity_provider
from draft_worker.limits import DraftModel
from outrider.engine.kv.kv_plan import ALL_SHARE
from outrider.engine.options import Dtype, EngineOptions, Quantization
from outrider.local.child_spec import ChildSpec
from outrider.objective import parse_tenant_objective
from outrider.observability.vllm_names import MetricsNames
from outrider.security.tenants import parse_tenant_weight
from outrider.security.tls import AUTHORITY, Role
from outrider.settings import CAPACITY, MODEL, SECURITY, SettingError, check, check_each, same_as, setting, words_for
from target_worker.limits import EngineName, SchedulerLimits, Service

# Loading and packing weights takes minutes, and hours from a slow disk. A worker that is stuck ends itself
# (--load-stall-exit-s), but not one of several ranks.
WORKER_READY_TIMEOUT_S = 4 * 3600.0
COORDINATOR_READY_TIMEOUT_S = 120.0
WORKER_DRAIN_S = 5.0  # the coordinator stops first, so what is left to finish belongs to nobody
WORKER_GRACE_S = 10.0
COORDINATOR_GRACE_S = 25.0  # 10 for running requests; then Ray stops its own processes one after the other


class Affinity(StrEnum):
    AUTO = "auto"
    NONE = "none"


@dataclass(frozen=True)
class Deployment:
    """One model pair on one machine. None leaves a value to the process it concerns. Raises SettingError."""

    target: Path
    draft: Path | None
    dtype: Dtype = same_as(EngineOptions, "dtype")
    quantization: Quantization = same_as(EngineOptions, "quantization")  # of the target
    draft_quantization: Quantization = Quantization.NONE
    engine: EngineName = same_as(
        Service,
        "engine",
        help="engine that runs the target; vllm: an installed vLLM, see --engine-python and --vllm-args",
    )
    engine_python: Path | None = setting(
        None, "with --engine vllm: Python of the environment that vLLM is installed in", MODEL, "file", shows="this one"
    )
    vllm_args: str = setting(
        "", "with --engine vllm: flags of vLLM's own, as one word, such as '--kv-cache-dtype fp8'", MODEL, "flags"
    )
    draft_head: Path | None = same_as(
        Service, "draft_head",
        help="folder of a draft head that runs beside the target, without draft workers: EAGLE-3, Medusa, or the "
        "target's own folder for its MTP layers",
    )  # fmt: skip
    local_head: bool = same_as(Service, "local_head")
    early_exit_layer: int | None = same_as(
        DraftModel, "early_exit_layer", shows="none",
        help="draft with so many of the target's first layers; it pays where the target was trained for it (LayerSkip)",
    )  # fmt: skip
    allow_heterogeneous_vocab: bool = same_as(DraftModel, "allow_heterogeneous_vocab")
    served_model_name: str | None = same_as(Service, "served_model_name")
    num_speculative_tokens: int | None = same_as(SchedulerLimits, "num_speculative_tokens", None)
    enable_lookup: bool = same_as(SchedulerLimits, "has_lookup")
    enable_prefix_caching: bool = same_as(EngineOptions, "enable_prefix_caching", flag="--prefix-caching")
    chat_template: Path | None = same_as(CoordinatorSettings, "chat_template")
    tool_call_parser: ToolCallParserName | None = same_as(CoordinatorSettings, "tool_call_parser")
    reasoning_parser: ReasoningParserName | None = same_as(CoordinatorSettings, "reasoning_parser")
    seed_requests: bool = same_as(CoordinatorSettings, "seed_requests")
    host: str = same_as(Listen, "host")
    port: int = same_as(Listen, "port")
    grpc_port: int = same_as(Listen, "grpc_port")
    hosting: Hosting = same_as(Listen, "hosting")
    proxy: Proxy | None = same_as(Listen, "proxy")
    num_target_workers: int = setting(1, "target workers", CAPACITY, "workers", at_least=1, at_most=64)
    num_draft_workers: int = setting(1, "draft workers", CAPACITY, "workers", at_least=1, at_most=64)
    num_memory_workers: int = setting(
        0, "memory workers, which remember what was generated for each tenant and hint at it when it comes again, "
        "beside draft workers or without any",
        CAPACITY, "workers", at_least=0, at_most=64,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "processes of each target worker, between which its model is sharded",
        CAPACITY, "processes", at_least=1, at_most=64,
    )  # fmt: skip
    draft_tensor_parallel_size: int = setting(
        1, "processes of each draft worker", CAPACITY, "processes", at_least=1, at_most=64
    )
    num_replicas: int = same_as(Listen, "num_replicas", at_most=64)
    metrics_names: MetricsNames = same_as(CoordinatorSettings, "metrics_names")
    max_num_seqs: int | None = same_as(EngineOptions, "max_num_seqs", None)
    max_model_len: int | str | None = same_as(EngineOptions, "max_model_len")
    memory_utilization: float = setting(
        ALL_SHARE, "share of the device's memory that all workers together may use; it is divided so that all keep the "
        "KV of equally many tokens",
        CAPACITY, "share", above=0, at_most=1,
    )  # fmt: skip
    max_requests: int | None = same_as(CoordinatorSettings, "requests_max", None)
    max_queue_wait_s: float | None = same_as(CoordinatorSettings, "queue_wait_max_s", None)
    response_life_s: float | None = same_as(CoordinatorSettings, "response_life_s", None)
    batch_files: str | None = same_as(CoordinatorSettings, "batch_files")
    memory_tenants: tuple[str, ...] = same_as(
        CoordinatorSettings, "memory_tenants", shows="all where there are no API keys"
    )
    tenant_weights: tuple[str, ...] = same_as(CoordinatorSettings, "tenant_weights")
    tenant_objectives: tuple[str, ...] = same_as(CoordinatorSettings, "tenant_objectives")
    affinity: Affinity = setting(
        Affinity.AUTO, "auto gives each worker cores of its own where there are enough",
        CAPACITY, flag="--cpu-affinity",
    )  # fmt: skip
    target_threads: int | None = setting(
        None, "threads of each target worker, in every step",
        CAPACITY, "threads", at_least=1,
        shows="one on each of its cores",
    )  # fmt: skip
    draft_threads: int | None = setting(
        None, "threads and cores of each draft worker", CAPACITY, "threads", at_least=1, shows="1"
    )
    share_cores: bool = setting(
        False, "let targets also use the cores of draft workers in steps that this is measured to make faster; not "
        "shown to gain where the coordinator and clients use these cores, too",
        CAPACITY,
    )  # fmt: skip
    api_keys: Path | None = same_as(CoordinatorSettings, "api_keys_file")
    oidc_issuer: str | None = same_as(CoordinatorSettings, "oidc_issuer")
    oidc_audience: str | None = same_as(CoordinatorSettings, "oidc_audience")
    oidc_jwks_url: str | None = same_as(CoordinatorSettings, "oidc_jwks_url")
    oidc_tenant_claim: str = same_as(CoordinatorSettings, "oidc_tenant_claim")
    oidc_ca_file: str | None = same_as(CoordinatorSettings, "oidc_ca_file")
    tls_dir: Path | None = setting(
        None, "TLS on the public ports and between all processes, with the certificates that `outrider "
        "certificates` makes, which has a folder for each process",
        SECURITY, "folder", shows="in the clear",
    )  # fmt: skip
    is_insecure: bool = same_as(Listen, "is_insecure")
    logs_requests: bool = same_as(CoordinatorSettings, "logs_requests")
    otlp_endpoint: str | None = same_as(CoordinatorSettings, "otlp_endpoint")

    def __post_init__(self) -> None:
        check(self)
        check_identity_provider(self)
        self._check_engine()
        try:
            check_combination(self.tool_call_parser, self.reasoning_parser)
        except ValueError as error:
            raise SettingError("tool_call_parser", str(error)) from None
        Listen(hosting=self.hosting, proxy=self.proxy, num_replicas=self.num_replicas)
        if self.hosting is Hosting.PLAIN and self.tls_dir is not None:
            why = "its certificates are for the public ports, too, on which a plain process has no TLS"
            raise SettingError("tls_dir", f"--tls-dir needs --hosting {Hosting.RAY_SERVE}: {why}")
        if self.num_memory_workers and self.knows_callers and not self.memory_tenants:
            raise SettingError("memory_tenants", "--num-memory-workers with API keys needs --memory-tenant: whom for")
        # Here as well as in the coordinator, which starts last.
        check_each("tenant_weights", "--tenant-weight", self.tenant_weights, parse_tenant_weight)
        check_each("tenant_objectives", "--tenant-slo", self.tenant_objectives, parse_tenant_objective)

    def _check_engine(self) -> None:
        """Raises SettingError for what does not go with the engine."""
        is_vllm = self.engine is EngineName.VLLM
        for name, value in (("engine_python", self.engine_python), ("vllm_args", self.vllm_args)):
            if value and not is_vllm:
                raise SettingError(name, f"--{name.replace('_', '-')} needs --engine {EngineName.VLLM}")
        if self.draft_head is not None and not self.local_head and not self.drafts_with_head:
            raise SettingError(
                "local_head", "--no-local-head leaves the draft head to draft workers: give it as --draft"
            )
        if is_vllm and self.draft_head is not None:
            why = "vLLM keeps no features for draft heads; draft with a model, or leave --engine out"
            raise SettingError("draft_head", f"--draft-head {self.draft_head}: {why}")
        if self.drafts_with_head and self.draft_tensor_parallel_size > 1:
            why = "a draft head runs in one process"
            raise SettingError(
                "draft_tensor_parallel_size", f"--draft-tensor-parallel-size {self.draft_tensor_parallel_size}: {why}"
            )
        if is_vllm and self.target_threads is not None:
            why = "vLLM binds threads of its own: set VLLM_CPU_OMP_THREADS_BIND"
            raise SettingError("target_threads", f"--target-threads {self.target_threads}: {why}")
        if is_vllm and self.quantization is not Quantization.NONE:
            why = "is our engine's; give vLLM's own in --vllm-args, such as '--quantization fp8'"
            raise SettingError("quantization", f"--quantization {self.quantization} {why}")
        try:
            shlex.split(self.vllm_args)
        except ValueError as error:
            raise SettingError("vllm_args", f"--vllm-args: {error}") from None
        is_fixed = is_vllm or self.tensor_parallel_size > 1 or self.target_threads is not None
        if self.share_cores and (is_fixed or self.affinity is Affinity.NONE):
            why = "for threads that may change: not with --engine vllm, several ranks, --target-threads or no affinity"
            raise SettingError("share_cores", f"--share-cores is {why}")

    @property
    def knows_callers(self) -> bool:
        """Whether requests need an API key or a token."""
        return self.api_keys is not None or self.oidc_issuer is not None

    @property
    def drafts_with_head(self) -> bool:
        """Whether draft workers run the draft head, whose features the target then sends to them."""
        return self.draft is not None and self.draft == self.draft_head

    @property
    def has_hints(self) -> bool:
        """Whether there are workers that send hints."""
        return self.draft is not None or self.num_memory_workers > 0

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """The certificates by which a client on this machine recognizes the coordinator."""
        if self.tls_dir is None:
            return True
        return ssl.create_default_context(cafile=str(self.tls_dir / AUTHORITY))

    def certificates_of(self, role: Role) -> Path | None:
        """The folder of a part's certificate."""
        return None if self.tls_dir is None else self.tls_dir / role.name.lower()

    @property
    def model_name(self) -> str:
        """The name that clients ask for: the given one, else that of the target's folder."""
        return self.served_model_name or self.target.resolve().name


@dataclass(frozen=True)
class WorkerMemory:
    """The memory of the workers of one pool, which others use too."""

    max_model_len: int | str | None = same_as(EngineOptions, "max_model_len")
    memory_utilization: float | None = same_as(EngineOptions, "memory_utilization")
    kv_cache_gib: float | None = same_as(EngineOptions, "kv_cache_gib")


def worker_specs(
    deployment: Deployment, cores: Sequence[int], run_id: str, memory: Mapping[str, WorkerMemory] | None = None
) -> list[ChildSpec]:
    """Target workers, then draft workers, then memory workers. `run_id` keeps the worker ids of several systems apart.
    `memory` is that of each role; None leaves it to the workers."""
    told = memory or {role: WorkerMemory(deployment.max_model_len) for role in ("target", "draft")}
    deployment = replace(deployment, max_model_len=None)
    num_drafts = deployment.num_draft_workers if deployment.draft is not None else 0
    usable = cores if deployment.affinity is Affinity.AUTO else ()
    is_ours = deployment.engine is EngineName.OUTRIDER and deployment.tensor_parallel_size == 1
    plan = plan_cores(
        *(usable, deployment.num_target_workers, num_drafts, deployment.target_threads, deployment.draft_threads),
        may_share=is_ours,  # ranks are not told how many threads a step has
        shares_cores=deployment.share_cores,
    )
    target = replace(deployment, served_model_name=deployment.model_name)
    if deployment.engine is EngineName.VLLM:
        specs = [_vllm_spec(i, target, own, run_id, told["target"]) for i, own in enumerate(plan.targets)]
    else:
        words = words_for(target, EngineOptions, Service, SchedulerLimits)
        words += [*words_for(told["target"], EngineOptions), "--metrics-names", deployment.metrics_names.value]
        size = deployment.tensor_parallel_size
        specs = [
            _worker_spec("target", i, deployment.target, deployment, threads, size, run_id, words)
            for i, threads in enumerate(target_threads(plan, deployment.target_threads, size))
        ]
    if deployment.draft is not None:
        draft = replace(deployment, quantization=deployment.draft_quantization)
        if draft.quantization is not Quantization.NONE:
            draft = replace(draft, dtype=Dtype.BFLOAT16)  # whatever the target has: hints have no precision
        words = ["--target-tokenizer", str(deployment.target), *words_for(draft, EngineOptions, DraftModel)]
        words += words_for(told["draft"], EngineOptions)
        size = deployment.draft_tensor_parallel_size
        specs += [
            _worker_spec("draft", i, deployment.draft, deployment, threads, size, run_id, words)
            for i, threads in enumerate(draft_threads(plan, deployment.draft_threads, size))
        ]
    return specs + [_memory_spec(i, deployment, run_id) for i in range(deployment.num_memory_workers)]


def _memory_spec(index: int, deployment: Deployment, run_id: str) -> ChildSpec:
    """A memory worker. It needs little of a core, so it has none of its own."""
    flags = _server_flags_of("memory", index, Role.DRAFT, deployment, run_id) | {"--tokenizer": deployment.target}
    command = (*module("draft_worker.memory"), *flatten(flags))
    return ChildSpec(f"memory-{index}", "draft", command, stop_grace_s=WORKER_GRACE_S)


def _vllm_spec(
    index: int, deployment: Deployment, cores: tuple[int, ...], run_id: str, memory: WorkerMemory
) -> ChildSpec:
    """A target worker on vLLM, whose ranks are vLLM's own."""
    # Without draft workers vLLM goes without speculation, which costs it a few parameters.
    num_hints = None if deployment.has_hints else 0
    flags = _flags_of("target", index, deployment.target, deployment, cores, run_id) | {
        "--engine": deployment.engine.value,
        "--served-model-name": deployment.model_name,
        "--metrics-names": deployment.metrics_names.value,
        "--num-speculative-tokens": deployment.num_speculative_tokens or num_hints,
    }
    kv_bytes = None if memory.kv_cache_gib is None else int(memory.kv_cache_gib * 2**30)
    theirs: dict[str, object] = {
        "--dtype": deployment.dtype.value,
        "--max-num-seqs": deployment.max_num_seqs,
        "--max-model-len": memory.max_model_len,
        "--tensor-parallel-size": deployment.tensor_parallel_size if deployment.tensor_parallel_size > 1 else None,
        "--kv-cache-memory-bytes": kv_bytes,
        "--gpu-memory-utilization": None if kv_bytes else memory.memory_utilization,
    }
    caching = [] if deployment.enable_prefix_caching else ["--no-enable-prefix-caching"]
    command = (str(deployment.engine_python or sys.executable), "-m", "target_worker", *flatten(flags), "--")
    return ChildSpec(
        f"target-{index}",
        "target",
        (*command, *flatten(theirs), *caching, *shlex.split(deployment.vllm_args)),
        {} if deployment.engine_python is None else {"PYTHONPATH": engine_path()},
        ready_timeout_s=WORKER_READY_TIMEOUT_S,
        stop_grace_s=WORKER_GRACE_S,
    )


def _flags_of(
    role: str, index: int, model: Path, deployment: Deployment, cores: tuple[int, ...], run_id: str
) -> dict[str, object]:
    """The flags of a worker with a model, of either pool and engine."""
    return {
        "--model": model,
        **_server_flags_of(role, index, Role[role.upper()], deployment, run_id),
        "--cpu-affinity": ",".join(map(str, cores)) or None,
    }


def _server_flags_of(name: str, index: int, role: Role, deployment: Deployment, run_id: str) -> dict[str, object]:
    """The flags that every worker takes."""
    return {
        "--host": "127.0.0.1",
        "--port": 0,
        "--worker-id": f"{name}-{index}-{run_id}",
        "--drain-grace-s": WORKER_DRAIN_S,
        "--tls-dir": deployment.certificates_of(role),
        "--otlp-endpoint": deployment.otlp_endpoint,
    }


def _worker_spec(
    role: str,
    index: int,
    model: Path,
    deployment: Deployment,
    threads: WorkerThreads,
    num_ranks: int,
    run_id: str,
    words: Sequence[str],
) -> ChildSpec:
    flags = _flags_of(role, index, model, deployment, threads.cores, run_id) | {
        "--num-threads": threads.num_threads,
        "--num-threads-beside-draft": threads.num_threads_beside_draft,
    }
    # OpenMP reads its own variable before any flag of ours is parsed.
    environment = {"OMP_NUM_THREADS": str(threads.num_threads)} if threads.cores else {}
    environment |= rank_environment(num_ranks)
    return ChildSpec(
        f"{role}-{index}",
        role,
        (*threads.through, *launcher(f"{role}_worker", num_ranks, WORKER_GRACE_S), *flatten(flags), *words),
        environment,
        ready_timeout_s=WORKER_READY_TIMEOUT_S,
        stop_grace_s=WORKER_GRACE_S,
    )


def coordinator_spec(deployment: Deployment, ray_temp_dir: Path) -> ChildSpec:
    """The coordinator with its HTTP and gRPC ports."""
    is_plain = deployment.hosting is Hosting.PLAIN
    if deployment.engine is EngineName.VLLM:  # its seeds couple nothing, and a generator for each request costs time
        deployment = replace(deployment, seed_requests=False)
    flags = {
        "--tokenizer": deployment.target,
        "--served-model-name": deployment.model_name,
        "--ray-temp-dir": None if is_plain else ray_temp_dir,
        "--drain-notice-s": 0 if is_plain else None,  # nothing stands in front
        "--tls-dir": deployment.certificates_of(Role.COORDINATOR),
        "--memory-tenant": ALL_TENANTS if deployment.num_memory_workers and not deployment.memory_tenants else None,
    }
    return ChildSpec(
        "coordinator",
        "coordinator",
        (*module("coordinator"), *flatten(flags), *words_for(deployment, CoordinatorSettings, Listen)),
        ready_timeout_s=COORDINATOR_READY_TIMEOUT_S,
        stop_grace_s=COORDINATOR_GRACE_S,
    )


def flatten(flags: Mapping[str, object]) -> list[str]:
    """Command-line words of the flags that have a value."""
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
