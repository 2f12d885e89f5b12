"""`outrider plan`: estimates what fits on a device before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from command_line.plan.chart_values import PoolPlan, Wanted, document, plan_pool
from command_line.plan.gpus import is_gpu, parse_memory
from command_line.profile import DtypeChoice, QuantizationChoice
from command_line.settings import reader
from outrider.engine.kv.kv_plan import (
    ALL_SHARE,
    SHARED_SHARE,
    DeviceMemory,
    KvPlan,
    Load,
    ModelLoadError,
    ModelMemory,
    divide,
    in_words,
    plan_kv,
)
from outrider.engine.loading.machine import machine_memory
from outrider.engine.options import AUTO, Device, Dtype, EngineOptions, Quantization
from outrider.settings import settings_of

LENGTHS: Final = (1024, 4096, 16_384, 65_536, 131_072)


def _check_memory(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_memory(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class _Found:
    """The plan of all workers that share a device."""

    memory: DeviceMemory
    share: float
    loads: dict[str, Load]  # by role, the target's first
    workers: dict[str, KvPlan]  # likewise; empty where they do not fit
    refusal: str | None

    @property
    def usable(self) -> int:
        return self.memory.usable(self.share)

    @property
    def missing(self) -> int:
        """Bytes that are missing for the models alone, and one token."""
        needed = (each.num_ranks * (each.needs.fixed + each.needs.kv_per_token) for each in self.loads.values())
        return max(sum(needed) - self.usable, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV fits in every worker: a draft keeps KV for every token that its target keeps."""
        fixed = sum(each.num_ranks * each.needs.fixed for each in self.loads.values())
        per_token = sum(each.num_ranks * each.needs.kv_per_token for each in self.loads.values())
        return max(self.usable - fixed, 0) // per_token

    @property
    def sessions_by_length(self) -> dict[int, int]:
        """Sessions at once, if all are as long."""
        longest = self.workers["target"].max_model_len if self.workers else self.loads["target"].needs.longest
        lengths = sorted({*(each for each in LENGTHS if each < longest), longest})
        return {length: self.num_tokens // length for length in lengths}


Draft = Annotated[
    Path | None, typer.Option(help="Model folder of a draft model on the same device.", show_default=False)
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|GPU",
        help="Memory of each rank's device, such as 80GiB (2^30 bytes each) or 80GB (10^9), or its type, such as h100. "
        "Give it to plan for another machine.",
        show_default="what is free here",
        callback=_check_memory,
    ),
]
Utilization = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1.0,
        help="Share of the memory that may be used, by the draft too, from 0 to 1; the rest is held back.",
        show_default=f"0.9; of what a machine has free {SHARED_SHARE:g} for one worker, {ALL_SHARE:g} for several",
    ),
]
MaxModelLen = Annotated[
    Any,
    typer.Option(
        metavar="TOKENS",
        parser=reader(settings_of(EngineOptions)["max_model_len"]),
        help="Longest sequence, prompt plus output; auto: the model's, or what fits if that is less.",
        show_default="the model's",
    ),
]


Ranks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ranks that share the model (tensor parallelism).",
        show_default="1; with --values the fewest that it fits on",
    ),
]
DraftRanks = Annotated[
    int | None, typer.Option(min=1, help="Ranks that share the draft model.", show_default="likewise")
]
DraftMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|GPU",
        help="With --values: memory of each GPU of the draft workers, or its type.",
        show_default="as --memory",
        callback=_check_memory,
    ),
]
Sessions = Annotated[int, typer.Option(min=1, help="With --values: sessions at once that the workers are to serve.")]
SessionTokens = Annotated[int, typer.Option(min=1, help="With --values: tokens of such a session, prompt and output.")]


def plan(
    model: Annotated[Path, typer.Argument(help="Model folder. Only its config.json is read.")],
    draft: Draft = None,
    memory: Memory = None,
    device: Annotated[
        Device, typer.Option(help="Device type. auto takes a GPU if torch finds one.", show_default=True)
    ] = Device.AUTO,
    memory_utilization: Utilization = None,
    tensor_parallel_size: Ranks = None,
    draft_tensor_parallel_size: DraftRanks = None,
    num_target_workers: Annotated[int, typer.Option(min=1, help="Target workers on the same device.")] = 1,
    num_draft_workers: Annotated[int, typer.Option(min=1, help="Draft workers on the same device.")] = 1,
    dtype: DtypeChoice = Dtype.BFLOAT16,
    quantization: QuantizationChoice = Quantization.NONE,
    draft_quantization: Annotated[
        Quantization, typer.Option(help="Quantization of the draft's weights.")
    ] = Quantization.NONE,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
    as_values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Print values of the Helm chart, and why they are so. Draft workers get GPUs of their own.",
        ),
    ] = False,
    draft_memory: DraftMemory = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="With --values: GPUs of a node.")] = 8,
    sessions: Sessions = 1,
    session_tokens: SessionTokens = 4096,
) -> None:
    """Print how much memory a model needs, how many sessions fit on a device, and whether a worker would start there.

    Nothing is loaded. For each rank the plan adds up the weights, the KV of each token, the memory of a step, and the
    process itself. Exit status 1: it would not start.
    """
    import torch

    from outrider.engine.model import device_for

    is_elsewhere = memory is not None and (as_values or is_gpu(memory))
    kind = "cuda" if is_elsewhere and device is Device.AUTO else device.value
    device_type = torch.device(device_for(kind)).type
    found_memory = _device_memory(device_type, memory)
    # The ranks of a worker share the memory of this machine; --memory is of each rank's device.
    is_shared = device_type == "cpu" and memory is None
    options = EngineOptions(
        model=model,
        dtype=dtype,
        quantization=quantization,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        memory_utilization=memory_utilization,
    )
    # Whatever dtype the target has: hints have no precision (`deployment.worker_specs`).
    draft_dtype = dtype if draft_quantization is Quantization.NONE else Dtype.BFLOAT16
    draft_options = None
    if draft is not None:
        draft_options = replace(
            options, model=draft, dtype=draft_dtype, quantization=draft_quantization, has_trees=True
        )
    if as_values:
        if device_type != "cuda":
            raise typer.BadParameter("--values plans for GPUs: give their type or size, as in --memory h100")
        wanted = Wanted(gpus_per_node, sessions, session_tokens)
        target = _pool(options, tensor_parallel_size, memory, gpus_per_node)
        drafts = None
        if draft_options is not None:
            longest = target.kv.max_model_len
            drafts = _pool(draft_options, draft_tensor_parallel_size, draft_memory or memory, gpus_per_node, longest)
        print(document(target, drafts, wanted), end="")
        return
    ranks = num_target_workers, tensor_parallel_size or 1
    loads = {"target": _load(options, *ranks, device_type, is_shared=is_shared)}
    if draft_options is not None:
        ranks = num_draft_workers, draft_tensor_parallel_size or 1
        loads["draft"] = _load(draft_options, *ranks, device_type, is_shared=is_shared)
    is_one = draft is None and num_target_workers == 1
    share = found_memory.share(memory_utilization, SHARED_SHARE if is_one else ALL_SHARE)
    found = _decide(loads, found_memory, share, device_type, is_one=is_one)
    if as_json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        _report(found, is_given=memory is not None)
    if found.refusal is not None:
        raise typer.Exit(1)


def _load(options: EngineOptions, num_workers: int, num_ranks: int, device_type: str, *, is_shared: bool) -> Load:
    """The ranks of one model's workers on a device, or on a machine that all ranks share. Raises ConfigurationError."""
    from outrider.engine.loading.memory_plan import ServingShape, plan_memory

    needs = plan_memory(options.model, ServingShape.of(options, num_ranks, device_type))
    return Load(needs, options, num_workers * (num_ranks if is_shared else 1))


def _pool(
    options: EngineOptions, num_ranks: int | None, given: str | None, gpus_per_node: int, longest: int | None = None
) -> PoolPlan:
    """The workers of one model on GPUs of their own. `longest`: of the sequences that they need to take."""

    def needs_of(count: int) -> ModelMemory:
        return _load(options, 1, count, "cuda", is_shared=False).needs

    if longest is not None:
        options = replace(options, max_model_len=min(longest, needs_of(1).longest))
    memory = _device_memory("cuda", given)
    words = given if given is not None and is_gpu(given) else in_words(memory.total)
    return plan_pool(
        options,
        needs_of,
        memory,
        words,
        num_ranks=num_ranks,
        gpus_per_node=gpus_per_node,
    )


def _device_memory(device_type: str, given: str | None) -> DeviceMemory:
    """The given memory, or that of the first GPU or this machine."""
    import torch

    if given is not None:
        return DeviceMemory(parse_memory(given), parse_memory(given), is_own=True)
    if device_type == "cpu":
        return machine_memory()
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU here: give its memory with --memory")
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total, free, is_own=True)


def _decide(loads: dict[str, Load], memory: DeviceMemory, share: float, device_type: str, *, is_one: bool) -> _Found:
    """As a worker decides that starts alone, or those that `outrider serve` starts on this device together."""
    workers: dict[str, KvPlan] = {}
    try:
        if is_one:
            budgets = [memory.budget(share, loads["target"].num_ranks)]
        else:
            budgets = divide([*loads.values()], memory, share, device_type)
        for (role, each), budget in zip(loads.items(), budgets, strict=True):
            options = each.options
            if workers and options.max_model_len in (None, AUTO):  # no longer than the target's
                options = replace(options, max_model_len=min(each.needs.longest, workers["target"].max_model_len))
            workers[role] = plan_kv(each.needs, budget, options, device_type)
    except ModelLoadError as error:
        return _Found(memory, share, loads, {}, error.message)
    return _Found(memory, share, loads, workers, None)


def _as_json(found: _Found) -> dict[str, Any]:
    parts = {role: _parts(each.needs) for role, each in found.loads.items()}
    return {
        **parts["target"],
        "draft": parts.get("draft"),
        "num_tokens": found.num_tokens,
        "sessions_by_length": found.sessions_by_length,
        "missing": found.missing,
        "memory": found.memory.free,
        "usable": found.usable,
        "starts": found.refusal is None,
        "refusal": found.refusal,
        "workers": {role: asdict(each) | {"num_tokens": each.num_tokens} for role, each in found.workers.items()},
    }


def _parts(model: ModelMemory) -> dict[str, int]:
    return {name: getattr(model, name) for name in ("weights", "kv_per_token", "step", "process")}


def _report(found: _Found, *, is_given: bool) -> None:
    console = Console(highlight=False)
    free = found.memory.free
    rest = "; the rest is held back (--memory-utilization)" if found.usable < free else ""
    console.print(
        f"{found.loads['target'].options.model.resolve().name}: {in_words(found.usable)} of each rank's device may be "
        f"used. That is {found.usable / free:.0%} of {in_words(free)} "
        f"({'--memory' if is_given else 'what is free here'}){rest}.",
        soft_wrap=True,
    )
    table = Table()
    table.add_column("")
    for role in found.loads:
        table.add_column(role, justify="right")
    for label, name in (
        ("weights", "weights"),
        ("a step's work", "step"),
        ("the process", "process"),
        ("KV of a token", "kv_per_token"),
    ):
        table.add_row(label, *(in_words(getattr(each.needs, name)) for each in found.loads.values()))
    console.print(table)
    if found.refusal is not None:
        console.print(f"It does not fit. A worker would refuse to start: {found.refusal}.", soft_wrap=True)
        return
    console.print(f"KV of {found.num_tokens:,} tokens fits. Sessions at once, by their length in tokens:")
    shown = (f"{length:,}: {n:,}" for length, n in found.sessions_by_length.items())
    console.print("  " + "   ".join(shown), soft_wrap=True)
    for role, each in found.workers.items():
        console.print(
            f"A {role} worker starts: {in_words(each.num_bytes)} on each rank for KV of {each.num_tokens:,} tokens; "
            f"longest sequence {each.max_model_len:,}.",
            soft_wrap=True,
        )
