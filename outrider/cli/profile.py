"""`outrider profile`: where a step's time goes, and what the device would permit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.deployment import Device, Dtype, Quantization
from outrider.machine import hardware

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


def profile(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    batch_sizes: Annotated[
        str,
        typer.Option(
            help="Sequences in a step, such as 1,4,16.", callback=lambda text: _numbers(text) and text
        ),
    ] = "1,4,16",
    rows: Annotated[
        str,
        typer.Option(
            help="Tokens of each sequence in a step: 1 decodes plainly, 8 verifies seven hints.",
            callback=lambda text: _numbers(text) and text,
        ),
    ] = "1,8",
    context: Annotated[int, typer.Option(min=1, help="Tokens that each sequence has behind it.")] = 512,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind; medians are shown.")] = 20,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV.")] = Dtype.BFLOAT16,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = Quantization.NONE,
    device: Annotated[Device, typer.Option(help="auto: a GPU where torch sees one.")] = Device.AUTO,
    num_threads: Annotated[int, typer.Option(min=1, help="torch's threads, on a CPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers, for machines.")] = False,
) -> None:
    """Measure where the time of a model's steps goes, and how near they are to what the device permits.

    The model runs here, alone. To profile a model that is cut between ranks, start it as
    the worker is started: torchrun --nproc-per-node N -m outrider profile MODEL.
    """
    import torch

    from outrider.engine.loading import load_model
    from outrider.engine.memory_plan import ServingShape, plan_memory
    from outrider.engine.model import DTYPES, EngineConfig, device_for
    from outrider.engine.profiling import measure_device, profile_steps
    from outrider.engine.rank_group import join_ranks

    group = join_ranks(60.0)
    kinds = [(size, num) for size in _numbers(batch_sizes) for num in _numbers(rows)]
    place = device_for(device.value)
    longest = context + max(num for _, num in kinds)
    num_sequences = max(size for size, _ in kinds)
    shape = ServingShape(
        DTYPES[dtype.value],
        quantization.value,
        1 if group is None else group.size,
        torch.device(place).type,
        longest,
        num_sequences,
    )
    needs = plan_memory(model, shape)
    engine = load_model(
        EngineConfig(
            model,
            dtype.value,
            device=place,
            max_num_seqs=num_sequences,
            max_model_len=longest,
            kv_cache_bytes=2 * needs.kv_per_token * (longest + 512) * num_sequences,
            num_threads=num_threads,
            quantization=quantization.value,
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
        print(
            json.dumps({"device": name, "speed": asdict(speed), "steps": [_as_json(each) for each in found]})
        )
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
    console = Console(highlight=False)
    console.print(
        f"{device}{threads}: reads {speed.bytes_per_s / 1e9:.1f} GB/s, "
        f"computes {speed.flops_per_s / 1e9:.0f} GFLOP/s"
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
                f"[bold]{part:.2f}[/bold]" if is_binding else f"{part:.2f}"
                for part, is_binding in (
                    (each.read_ms, each.is_bound_by_reading),
                    (each.compute_ms, not each.is_bound_by_reading),
                )
            ),
            f"{each.share_of_limit:.0%}",
        )
    console.print(table)
    console.print(
        f"Each sequence has {context} tokens behind it. plan: laying the step out; model: all layers; choice: the most "
        "likely tokens. The larger bound of the two is what the device permits at best.",
    )
