"""`outrider plan`: what fits, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.deployment import Device, Dtype, Quantization
from outrider.machine import available_memory

if TYPE_CHECKING:
    from outrider.engine.memory_plan import ModelMemory

LENGTHS: Final = (1024, 4096, 16_384, 65_536, 131_072)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of such as 80GiB, 24g or 1073741824. Units are powers of 1024. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a size, such as 80GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _check_size(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_size(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def plan(
    model: Annotated[Path, typer.Argument(help="Model folder; its config.json is all that is read.")],
    draft: Annotated[
        Path | None, typer.Option(help="Model folder of a draft that shares the device.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of the device of each rank, such as 80GiB.",
            show_default="what is free here",
            callback=_check_size,
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Its kind. auto: a GPU where torch sees one.", show_default=True)
    ] = Device.AUTO,
    utilization: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the memory that may be used.")
    ] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks that share the model.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV.")] = Dtype.BFLOAT16,
    quantization: Annotated[Quantization, typer.Option(help="Of the weights.")] = Quantization.NONE,
    draft_quantization: Annotated[
        Quantization, typer.Option(help="Of the draft's weights.")
    ] = Quantization.NONE,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Prompt plus output.", show_default="the model's")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The numbers, for machines, in bytes.")] = False,
) -> None:
    """Say what a model needs and how many sessions fit on a device, before anything is loaded.

    Weights, KV per token, what a step works with and what the process itself takes, for each rank of a worker.
    """
    import torch

    from outrider.engine.memory_plan import ServingShape, plan_memory
    from outrider.engine.model import DTYPES, device_for

    device_type = torch.device(device_for(device.value)).type
    free = parse_size(memory) if memory else _free_memory(device_type)
    usable = int(utilization * free)
    shape = ServingShape(
        DTYPES[dtype.value], quantization.value, tensor_parallel_size, device_type, max_model_len
    )
    target = plan_memory(model, shape)
    beside: ModelMemory | None = None
    if draft is not None:
        beside = plan_memory(
            draft,
            ServingShape(DTYPES[dtype.value], draft_quantization.value, 1, device_type, target.max_model_len),
        )
    found = _findings(target, beside, usable)
    if as_json:
        print(json.dumps(found | {"memory": free, "usable": usable}, indent=1))
    else:
        _report(model, target, beside, usable, found)
    if not found["num_tokens"]:
        raise typer.Exit(1)


def _free_memory(device_type: str) -> int:
    """The first GPU's, or this machine's."""
    import torch

    if device_type == "cpu":
        return available_memory()
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU here: say how much memory it has, with --memory")
    return torch.cuda.mem_get_info()[0]


def _findings(target: ModelMemory, draft: ModelMemory | None, usable: int) -> dict[str, Any]:
    """A draft keeps every token that its target keeps, so that both are divided alike."""
    fixed = target.fixed + (draft.fixed if draft else 0)
    per_token = target.kv_per_token + (draft.kv_per_token if draft else 0)
    num_tokens = max(usable - fixed, 0) // per_token
    lengths = sorted({*(each for each in LENGTHS if each < target.max_model_len), target.max_model_len})
    return {
        "weights": target.weights,
        "kv_per_token": target.kv_per_token,
        "step": target.step,
        "process": target.process,
        "draft": None
        if draft is None
        else {
            "weights": draft.weights,
            "kv_per_token": draft.kv_per_token,
            "step": draft.step,
            "process": draft.process,
        },
        "num_tokens": num_tokens,
        "sessions_by_length": {length: num_tokens // length for length in lengths},
        "missing": max(fixed + per_token - usable, 0),
    }


def _report(
    model: Path, target: ModelMemory, draft: ModelMemory | None, usable: int, found: dict[str, Any]
) -> None:
    from outrider.engine.memory_plan import in_words

    table = Table(title=f"{model.resolve().name} in {in_words(usable)}, for each rank", title_style="bold")
    table.add_column("")
    table.add_column("target", justify="right")
    if draft is not None:
        table.add_column("draft", justify="right")
    for label, name in (
        ("weights", "weights"),
        ("a step's work", "step"),
        ("the process", "process"),
        ("KV of a token", "kv_per_token"),
    ):
        table.add_row(label, *(in_words(getattr(each, name)) for each in (target, draft) if each is not None))
    console = Console(highlight=False)
    console.print(table)
    if found["num_tokens"]:
        console.print(
            f"KV of {found['num_tokens']:,} tokens fits. Sessions at once, by their length in tokens:"
        )
        console.print(
            "  " + "   ".join(f"{length:,}: {n:,}" for length, n in found["sessions_by_length"].items())
        )
    else:
        console.print(
            f"It does not fit: {in_words(found['missing'])} are missing. Cut it between more ranks "
            "(--tensor-parallel-size), quantize it (--quantization), or give it a larger device."
        )
