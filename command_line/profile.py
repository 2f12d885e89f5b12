"""`outrider profile`: measures where a step's time goes and compares it with the device's limits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from command_line.report import print_notes
from command_line.terminal import TerminalConsole, print_line
from outrider.engine.loading.machine import hardware
from outrider.engine.options import Device, Dtype, EngineOptions, Quantization

if TYPE_CHECKING:
    from outrider.engine.profiling import DeviceSpeed, StepTimes


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers above 0, such as 1,8")
    return numbers


Model = Annotated[Path, typer.Argument(help="Model folder.")]
BatchSizes = Annotated[
    str,
    typer.Option(help="Sequences in a step, such as 1,4,16.", callback=lambda text: _numbers(text) and text),
]
Rows = Annotated[
    str,
    typer.Option(
        help="Tokens of each sequence in a step: 1 is plain decoding, 8 verifies seven hints.",
        callback=lambda text: _numbers(text) and text,
    ),
]
Context = Annotated[int, typer.Option(min=1, help="Tokens in each sequence's KV cache.")]
Steps = Annotated[int, typer.Option(min=2, help="Steps to time for each combination. The medians are shown.")]
DtypeChoice = Annotated[Dtype, typer.Option(help="Type of weights and KV.")]
QuantizationChoice = Annotated[Quantization, typer.Option(help="Quantization of the weights.")]
DeviceChoice = Annotated[Device, typer.Option(help="Device. auto takes a GPU if torch finds one.")]
NumThreads = Annotated[int, typer.Option(min=1, help="torch's threads on a CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def profile(
    model: Model,
    batch_sizes: BatchSizes = "1,4,16",
    rows: Rows = "1,8",
    context: Context = 512,
    steps: Steps = 20,
    dtype: DtypeChoice = Dtype.BFLOAT16,
    quantization: QuantizationChoice = Quantization.NONE,
    device: DeviceChoice = Device.AUTO,
    num_threads: NumThreads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure where the time of a model's steps goes, and compare it with the device's limits.

    The model runs here, alone. To profile a sharded model, start this command as the worker is started: torchrun
    --nproc-per-node N -m command_line profile MODEL.
    """
    import torch

    from outrider.engine.loading.loading import load_model
    from outrider.engine.loading.memory_plan import ServingShape, plan_memory
    from outrider.engine.model import DTYPES, device_for
    from outrider.engine.profiling import measure_device, profile_steps
    from outrider.engine.ranks.rank_group import join_ranks

    kinds = [(size, num) for size in _numbers(batch_sizes) for num in _numbers(rows)]
    group = join_ranks(60.0)
    place = device_for(device.value)
    longest = context + max(num for _, num in kinds)
    num_sequences = max(size for size, _ in kinds)
    num_ranks = 1 if group is None else group.size
    shape = ServingShape(DTYPES[dtype.value], quantization.value, num_ranks, torch.device(place).type)
    needs = plan_memory(model, shape)
    engine = load_model(
        EngineOptions(
            model=model,
            dtype=dtype,
            device=device,
            max_num_seqs=num_sequences,
            max_model_len=longest,
            kv_cache_gib=2 * needs.kv_per_token * (longest + 512) * num_sequences / 2**30,
            num_threads=num_threads,
            quantization=quantization,
        ),
        group,
    )
    if group is not None and group.rank > 0:
        engine.follow()
        return
    speed = measure_device(place, DTYPES[dtype.value])
    engine.lead()
    try:
        found = list(profile_steps(engine, speed, needs.weights_read, kinds, context, steps))
    finally:
        engine.dismiss()
    name = hardware() if place == "cpu" else torch.cuda.get_device_name(place)
    if as_json:
        print_line(json.dumps({"device": name, "speed": asdict(speed), "steps": [_as_json(each) for each in found]}))
    else:
        _report(model, name, num_threads, speed, found, context, is_cut=group is not None)


def _as_json(times: StepTimes) -> dict[str, object]:
    shares = {"model_ms": times.model_ms, "share_of_limit": times.share_of_limit}
    return asdict(times) | shares | {"bound_by": "reading" if times.is_bound_by_reading else "arithmetic"}


def _report(
    model: Path,
    device: str,
    num_threads: int,
    speed: DeviceSpeed,
    found: list[StepTimes],
    context: int,
    *,
    is_cut: bool,
) -> None:
    threads = f", {num_threads} thread{'s'[: num_threads > 1]}"
    console = TerminalConsole()
    console.print(
        f"{device}{threads}: reads {speed.bytes_per_s / 1e9:.1f} GB/s, computes {speed.flops_per_s / 1e9:.0f} GFLOP/s",
        soft_wrap=True,
    )
    table = Table(title=f"{model.resolve().name}: steps, milliseconds", title_style="bold")
    columns = ["sequences × rows", "whole", "±", "plan", "model", *(["ranks"] if is_cut else []), "choice"]
    for column in (*columns, "at least: reading", "arithmetic", "of the limit"):
        table.add_column(column, justify="right")
    for each in found:
        parts = [each.whole_ms, each.spread_ms / 2, each.plan_ms, each.model_ms]
        parts += [each.ranks_ms] if is_cut else []
        table.add_row(
            f"{each.num_sequences} × {each.num_rows}",
            *(f"{part:.2f}" for part in [*parts, each.choice_ms]),
            *(
                Text(f"{part:.2f}", "bold" if is_binding else "")
                for part, is_binding in (
                    (each.read_ms, each.is_bound_by_reading),
                    (each.compute_ms, not each.is_bound_by_reading),
                )
            ),
            f"{each.share_of_limit:.0%}",
        )
    console.print(table)
    ranks = ", ranks (their exchange)" if is_cut else ""
    captions = (
        f"sequences × rows: sequences in a step, each with {context} tokens in its KV cache, and the tokens that it "
        "computes for each: 1 in plain decoding, else one more than the hints that it verifies.",
        "whole: a step's median time. ±: half the distance between the fastest and the slowest quarter. Its parts: "
        f"plan (preparing the step), model (all layers){ranks} and choice (finding the most likely tokens).",
        "at least: time to read the weights and the KV once, and time of the arithmetic, at the device's speeds. No "
        "step can be faster than the larger of the two. of the limit: that time as a share of the whole.",
    )
    print_notes(console, captions)
