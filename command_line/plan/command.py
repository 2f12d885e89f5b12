"""`outrider plan`: estimates what fits on a device before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from command_line.plan.chart_values import PoolPlan, Wanted, document, plan_pool
from command_line.plan.device_plan import Workers, decide, device_memory, load_of, loads_of
from command_line.plan.gpus import is_gpu, parse_memory
from command_line.plan.report import as_json, report
from command_line.profile import DtypeChoice, QuantizationChoice
from command_line.settings import reader
from command_line.terminal import print_line
from outrider.engine.heads.kind import HeadKind, kind_of_draft
from outrider.engine.kv.kv_plan import ALL_SHARE, SHARED_SHARE, ModelMemory, in_words
from outrider.engine.options import Device, Dtype, EngineOptions, Quantization
from outrider.settings import settings_of

WITH_VALUES: Final = ("draft_memory", "gpus_per_node", "sessions", "session_tokens")
WITHOUT_VALUES: Final = ("prints_json", "num_target_workers", "num_draft_workers")
"""Parameters that have an effect only with and only without --values."""


def _check_memory(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_memory(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


Draft = Annotated[
    Path | None,
    typer.Option(help="Folder of a draft model on the same device, or of a draft head.", show_default=False),
]
DraftHead = Annotated[
    Path | None, typer.Option(help="Folder of a draft head that runs beside the target.", show_default=False)
]
LocalHead = Annotated[
    bool, typer.Option(help="With a draft head, the target runs it, too, where no draft worker does.")
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
DeviceType = Annotated[Device, typer.Option(help="Device type. auto takes a GPU if torch finds one.")]
NumTargets = Annotated[int, typer.Option(min=1, help="Target workers on the same device.")]
NumDrafts = Annotated[int, typer.Option(min=1, help="Draft workers on the same device.")]
DraftQuantization = Annotated[Quantization, typer.Option(help="Quantization of the draft's weights.")]
EarlyExitLayer = Annotated[int | None, typer.Option(min=1, help="Layers of the draft's model that are loaded.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
PrintsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")]
PrintsValues = Annotated[
    bool,
    typer.Option(
        "--values", help="Print values of the Helm chart, and why they are so. Draft workers get GPUs of their own."
    ),
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="With --values: GPUs of a node.")]


def plan(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Model folder. Only its config.json is read.")],
    draft: Draft = None,
    draft_head: DraftHead = None,
    local_head: LocalHead = True,
    memory: Memory = None,
    device: DeviceType = Device.AUTO,
    memory_utilization: Utilization = None,
    tensor_parallel_size: Ranks = None,
    draft_tensor_parallel_size: DraftRanks = None,
    num_target_workers: NumTargets = 1,
    num_draft_workers: NumDrafts = 1,
    dtype: DtypeChoice = Dtype.BFLOAT16,
    quantization: QuantizationChoice = Quantization.NONE,
    draft_quantization: DraftQuantization = Quantization.NONE,
    early_exit_layer: EarlyExitLayer = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    prints_json: PrintsJson = False,
    prints_values: PrintsValues = False,
    draft_memory: DraftMemory = None,
    gpus_per_node: GpusPerNode = 8,
    sessions: Sessions = 1,
    session_tokens: SessionTokens = 4096,
) -> None:
    """Print how much memory a model needs, how many sessions fit on a device, and whether a worker would start there.

    Nothing is loaded. For each rank the plan adds up the weights, the KV of each token, the memory of a step, and the
    process itself. Exit status 1: it would not start.
    """
    _refuse_what_has_no_effect(context, prints_values=prints_values)
    is_elsewhere = memory is not None and (prints_values or is_gpu(memory))
    device_type = _device_type("cuda" if is_elsewhere and device is Device.AUTO else device.value)
    found_memory = device_memory(device_type, memory)
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
    draft, draft_head = _draft_and_head(model, draft, draft_head, prints_values=prints_values)
    draft_options = None if draft is None else _draft_options(options, draft, draft_quantization, early_exit_layer)
    if prints_values:
        if device_type != "cuda":
            raise typer.BadParameter("--values plans for GPUs: give their type or size, as in --memory h100")
        target = _pool(options, tensor_parallel_size, memory, gpus_per_node)
        draft_pool = None
        if draft_options is not None:
            of_draft = draft_tensor_parallel_size, draft_memory or memory, gpus_per_node
            draft_pool = _pool(draft_options, *of_draft, longest=target.kv.max_model_len)
        print_line(document(target, draft_pool, Wanted(gpus_per_node, sessions, session_tokens)).rstrip("\n"))
        return
    targets = Workers(options, num_target_workers, tensor_parallel_size or 1)
    num_draft_ranks = draft_tensor_parallel_size or 1
    drafts = None if draft_options is None else Workers(draft_options, num_draft_workers, num_draft_ranks)
    loads = loads_of(targets, drafts, draft_head, device_type, is_local=local_head, is_shared=is_shared)
    is_one = draft is None and num_target_workers == 1
    share = found_memory.share(memory_utilization, SHARED_SHARE if is_one else ALL_SHARE)
    found = decide(loads, found_memory, share, device_type, is_one=is_one)
    if prints_json:
        print_line(json.dumps(as_json(found), indent=1))
    else:
        report(found, is_given=memory is not None)
    if found.refusal is not None:
        raise typer.Exit(1)


def _refuse_what_has_no_effect(context: typer.Context, *, prints_values: bool) -> None:
    """Raises BadParameter for a flag of the other kind of plan."""
    for name in WITHOUT_VALUES if prints_values else WITH_VALUES:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = next(each.opts[0] for each in context.command.params if each.name == name)
            raise typer.BadParameter(f"{flag} has no effect {'with' if prints_values else 'without'} --values")


def _draft_and_head(
    model: Path, draft: Path | None, draft_head: Path | None, *, prints_values: bool
) -> tuple[Path | None, Path | None]:
    """Folders of what draft workers run and of the draft head that the target knows of. Raises BadParameter."""
    kind = None if draft is None else kind_of_draft(model, draft)
    if draft is not None and draft_head is not None:
        raise typer.BadParameter("--draft and --draft-head exclude each other")
    if kind is not None:
        draft, draft_head = draft if kind is HeadKind.EAGLE3 else None, draft
    if prints_values and draft_head is not None:
        raise typer.BadParameter("--values plans draft models, and no draft heads: see docs/guides/draft-heads.md")
    return draft, draft_head


def _device_type(device: str) -> str:
    import torch

    from outrider.engine.model import device_for

    return torch.device(device_for(device)).type


def _draft_options(
    options: EngineOptions, draft: Path, quantization: Quantization, early_exit_layer: int | None
) -> EngineOptions:
    # Whatever dtype the target has: hints have no precision (`deployment.worker_specs`).
    dtype = options.dtype if quantization is Quantization.NONE else Dtype.BFLOAT16
    return replace(
        options, model=draft, dtype=dtype, quantization=quantization, has_trees=True, early_exit_layer=early_exit_layer
    )


def _pool(
    options: EngineOptions, num_ranks: int | None, given: str | None, gpus_per_node: int, longest: int | None = None
) -> PoolPlan:
    """The workers of one model on GPUs of their own. `longest`: of the sequences that they need to take."""

    def needs_of(count: int) -> ModelMemory:
        return load_of(options, 1, count, "cuda", is_shared=False).needs

    # Weights are quantized while they are loaded.
    stored = replace(options, dtype=Dtype.BFLOAT16, quantization=Quantization.NONE)
    stored_bytes = load_of(stored, 1, 1, "cuda", is_shared=False).needs.weights

    if longest is not None:
        options = replace(options, max_model_len=min(longest, needs_of(1).longest))
    memory = device_memory("cuda", given)
    words = given if given is not None and is_gpu(given) else in_words(memory.total)
    return plan_pool(
        options,
        needs_of,
        memory,
        words,
        stored_bytes=stored_bytes,
        num_ranks=num_ranks,
        gpus_per_node=gpus_per_node,
    )
