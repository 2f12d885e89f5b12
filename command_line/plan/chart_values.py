"""Values of the Helm chart for a pair of models, with the numbers that led to them.

Each pool has GPUs of its own. The smallest number of ranks is chosen with which a worker would start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from outrider.engine.kv.kv_plan import (
    GIB,
    DeviceMemory,
    KvPlan,
    ModelLoadError,
    ModelMemory,
    UnevenRanksError,
    in_words,
    plan_kv,
)
from outrider.engine.options import EngineOptions
from outrider.errors import ConfigurationError
from outrider.settings import settings_of

RANKS_MAX: Final = 64
CPUS_PER_GPU: Final = 4
MEMORY_PER_GPU_GIB: Final = 16
"""Memory of a pod for each of its GPUs. Weights go through it to the GPU in pieces."""
BUSY_SHARE: Final = 0.75
"""Share of the slots at which the autoscaler adds a worker."""
READ_BYTES_PER_S: Final = GIB
"""Rate at which each node reads a network volume, for the duration of a start that is printed."""
VOLUME_SHARE: Final = 1.25
"""Size of a volume for the weights, for what else is in their folders. A second version of a model needs more."""

Needs = Callable[[int], ModelMemory]
"""Memory of a rank of so many. Raises ConfigurationError if the model cannot be sharded so."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Nodes of the installation, and the load that it should serve."""

    gpus_per_node: int
    num_sessions: int  # at once
    session_tokens: int  # of each


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Ranks and KV of the workers of a pool."""

    options: EngineOptions
    memory: str  # of a GPU, as it was given
    num_ranks: int
    needs: ModelMemory
    kv: KvPlan
    usable: int  # bytes of a GPU
    stored_bytes: int  # of the checkpoint, in bfloat16
    reasons: Sequence[str] = field(default_factory=tuple)  # a line for each number of ranks

    def num_sessions(self, session_tokens: int) -> int:
        """Sessions of a worker at once, if all are as long."""
        return min(self.options.max_num_seqs, self.kv.num_tokens // session_tokens)

    @property
    def least_bytes(self) -> int:
        """Memory of a GPU that suffices for one of the longest sequences."""
        return self.needs.fixed + self.kv.max_model_len * self.needs.kv_per_token


def plan_pool(
    options: EngineOptions,
    needs_of: Needs,
    memory: DeviceMemory,
    memory_in_words: str,
    *,
    stored_bytes: int,
    num_ranks: int | None,
    gpus_per_node: int,
) -> PoolPlan:
    """Chooses the ranks, if their number is not given. Raises ConfigurationError if the model fits on none."""
    reasons: list[str] = []
    counts = [num_ranks] if num_ranks else ranks_of(gpus_per_node)
    last: ConfigurationError | None = None
    for count in counts:
        try:
            needs = needs_of(count)
            budget = memory.budget(options.memory_utilization)
            kv = plan_kv(needs, budget, options, "cuda")
        except UnevenRanksError as error:
            last = last or error
            continue
        except ConfigurationError as error:
            last = error
            reasons.append(f"{_counted(count, 'GPU')}: {_shortened(error.message)}")
            if not isinstance(error, ModelLoadError):  # other numbers of ranks do not help
                break
            continue
        reasons.append(
            f"{_counted(count, 'GPU')}: {in_words(needs.weights)} of weights on each and KV of {kv.num_tokens:,} "
            f"tokens, {kv.num_longest} of {kv.max_model_len:,}"
        )
        return PoolPlan(options, memory_in_words, count, needs, kv, budget.usable, stored_bytes, tuple(reasons))
    assert last is not None
    raise last


def ranks_of(gpus_per_node: int) -> list[int]:
    """Numbers of ranks to try: powers of two that fill nodes where one does not suffice."""
    counts = [2**power for power in range(RANKS_MAX.bit_length())]
    return [count for count in counts if count <= gpus_per_node or count % gpus_per_node == 0]


def values_of(target: PoolPlan, draft: PoolPlan | None, wanted: Wanted) -> dict[str, Any]:
    """Values of the chart. Weights are in folders of a claim."""
    served_name = _name(target)
    pair: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9]+", "-", served_name.lower()).strip("-")[:30].strip("-"),
        "servedModelName": served_name,
        "target": {"model": f"/models/{served_name}"},
    }
    values: dict[str, Any] = {"pairs": [pair], "target": _pool(target, wanted)}
    if draft is not None:
        pair["draft"] = {"model": f"/models/{_name(draft)}"}
        values["draft"] = _pool(draft, wanted)
    return values | {"models": {"claim": "models"}}


def document(target: PoolPlan, draft: PoolPlan | None, wanted: Wanted) -> str:
    """The values as YAML, below comments that say how they came about."""
    lines = ["Values for k8s/helm/outrider, by outrider plan --values", ""]
    for role, pool in _pools(target, draft).items():
        lines.append(
            f"{role.capitalize()} {_name(pool)} on {pool.memory}, of which {in_words(pool.usable)} may be used:"
        )
        lines += [f"  {reason}" for reason in pool.reasons]
        num_sessions = pool.num_sessions(wanted.session_tokens)
        lines.append(
            f"  {_counted(num_sessions, 'session')} of {wanted.session_tokens:,} tokens at once; for "
            f"{wanted.num_sessions:,} at {BUSY_SHARE:.0%}: {_counted(_num_workers(pool, wanted), 'worker')}"
        )
    if draft is not None and draft.least_bytes < draft.usable / 2:
        lines.append(
            f"  {in_words(draft.least_bytes)} suffice for one sequence of {draft.kv.max_model_len:,}: a part of a GPU "
            "(draft.gpu.resource: nvidia.com/mig-…) costs less"
        )
    num_nodes = _num_nodes(target.num_ranks, wanted.gpus_per_node)
    seconds = target.stored_bytes / num_nodes / READ_BYTES_PER_S
    lines.append(f"A target starts in about {_duration(seconds)}, if each node reads {in_words(READ_BYTES_PER_S)}/s.")
    size = sum(pool.stored_bytes for pool in _pools(target, draft).values())
    lines += [
        "To have the weights fetched, name hf://ORG/NAME@COMMIT as models, and instead of models.claim:",
        f"  models: {{create: {{size: {math.ceil(VOLUME_SHARE * size / GIB)}Gi}}, fetch: {{secret: hugging-face}}}}",
    ]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comments + yaml.safe_dump(values_of(target, draft, wanted), sort_keys=False, width=120)


def _pools(target: PoolPlan, draft: PoolPlan | None) -> Mapping[str, PoolPlan]:
    return {"target": target} if draft is None else {"target": target, "draft": draft}


def _pool(pool: PoolPlan, wanted: Wanted) -> dict[str, Any]:
    options = pool.options
    num_nodes = _num_nodes(pool.num_ranks, wanted.gpus_per_node)
    num_gpus = pool.num_ranks // num_nodes
    num_workers = _num_workers(pool, wanted)
    memory = f"{MEMORY_PER_GPU_GIB * num_gpus}Gi"
    found: dict[str, Any] = {"device": "cuda", "gpu": {"count": num_gpus}}
    if num_nodes > 1:
        found["nodes"] = num_nodes
    if options.max_model_len is not None:
        found["maxModelLen"] = options.max_model_len
    found["maxNumSeqs"] = options.max_num_seqs
    if options.memory_utilization is not None:
        found["memoryUtilization"] = options.memory_utilization
    settings = settings_of(EngineOptions)
    args = [
        f"{settings[name].flag}={value}"
        for name, value in (("dtype", options.dtype), ("quantization", options.quantization))
        if value != settings[name].initial
    ]
    if args:
        found["args"] = args
    return found | {
        "resources": {
            "requests": {"cpu": str(CPUS_PER_GPU * num_gpus), "memory": memory},
            "limits": {"memory": memory},
        },
        "replicas": {"min": num_workers, "max": max(4, 2 * num_workers)},
        "sessionsPerReplica": _goal(pool, wanted),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }


def _goal(pool: PoolPlan, wanted: Wanted) -> int:
    return max(1, int(BUSY_SHARE * pool.num_sessions(wanted.session_tokens)))


def _num_workers(pool: PoolPlan, wanted: Wanted) -> int:
    return math.ceil(wanted.num_sessions / _goal(pool, wanted))


def _num_nodes(num_ranks: int, gpus_per_node: int) -> int:
    return max(1, num_ranks // gpus_per_node)


def _name(pool: PoolPlan) -> str:
    return pool.options.model.resolve().name


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shortened(message: str) -> str:
    """The part of a refusal that differs from one number of ranks to the next."""
    found = re.search(r"[\d.]+ \w+ are missing", message)
    return found[0] if found else message


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"
