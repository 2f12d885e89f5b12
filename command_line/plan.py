"""`outrider plan`: estimates what fits on a device before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from command_line.profile import DtypeChoice, QuantizationChoice
from outrider.engine.loading.machine import available_memory
from outrider.engine.options import Device, Dtype, Quantization

if TYPE_CHECKING:
    from outrider.engine.loading.memory_plan import ModelMemory

LENGTHS: Final = (1024, 4096, 16_384, 65_536, 131_072)
_PREFIXES: Final = "KMGT"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 80GiB or 80GB. KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB of 1000, with
    or without the B. Raises ValueError, also for a number without a unit."""
    found = _SIZE.fullmatch(text.strip())
    size = 0.0
    if found is not None:
        prefix, binary = (found[2] or "").upper(), found[3]
        size = float(found[1]) * ((1024 if binary else 1000) ** (1 + _PREFIXES.index(prefix)) if prefix else 1)
    if size < 1:
        wanted = f"{text.strip()}GiB or {text.strip()}GB" if re.fullmatch(r"\d+", text.strip()) else "80GiB or 80GB"
        raise ValueError(f"{text!r} is not a size with its unit, such as {wanted}")
    return int(size)


def _check_size(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_size(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def plan(
    model: Annotated[Path, typer.Argument(help="Model folder. Only its config.json is read.")],
    draft: Annotated[
        Path | None,
        typer.Option(help="Model folder of a draft model on the same device.", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each rank's device, such as 80GiB (2^30 bytes each) or 80GB (10^9). Give it to plan for "
            "another machine.",
            show_default="what is free here",
            callback=_check_size,
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Device type. auto takes a GPU if torch finds one.", show_default=True)
    ] = Device.AUTO,
    utilization: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="Share of the memory that may be used, from 0 to 1; the rest is held back."
        ),
    ] = 0.9,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks that share the model (tensor parallelism).")
    ] = 1,
    dtype: DtypeChoice = Dtype.BFLOAT16,
    quantization: QuantizationChoice = Quantization.NONE,
    draft_quantization: Annotated[
        Quantization, typer.Option(help="Quantization of the draft's weights.")
    ] = Quantization.NONE,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest sequence, prompt plus output, in tokens.", show_default="the model's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
) -> None:
    """Print how much memory a model needs and how many sessions fit on a device.

    Nothing is loaded. For each rank the plan adds up the weights, the KV of each token, the memory of a step, and the
    process itself.
    """
    import torch

    from outrider.engine.loading.memory_plan import ServingShape, plan_memory
    from outrider.engine.model import DTYPES, device_for

    device_type = torch.device(device_for(device.value)).type
    free = parse_size(memory) if memory else _free_memory(device_type)
    usable = int(utilization * free)
    shape = ServingShape(DTYPES[dtype.value], quantization.value, tensor_parallel_size, device_type, max_model_len)
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
        _report(model, target, beside, found, usable, free, is_given=memory is not None)
    if not found["num_tokens"]:
        raise typer.Exit(1)


def _free_memory(device_type: str) -> int:
    """Free bytes of the first GPU, or of this machine."""
    import torch

    if device_type == "cpu":
        return available_memory()
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU here: give its memory with --memory")
    return torch.cuda.mem_get_info()[0]


def _findings(target: ModelMemory, draft: ModelMemory | None, usable: int) -> dict[str, Any]:
    """The plan as JSON. A draft keeps KV for every token that its target keeps, so both get the same number of
    tokens."""
    fixed = target.fixed + (draft.fixed if draft else 0)
    per_token = target.kv_per_token + (draft.kv_per_token if draft else 0)
    num_tokens = max(usable - fixed, 0) // per_token
    lengths = sorted({*(each for each in LENGTHS if each < target.max_model_len), target.max_model_len})
    return {
        **_parts(target),
        "draft": None if draft is None else _parts(draft),
        "num_tokens": num_tokens,
        "sessions_by_length": {length: num_tokens // length for length in lengths},
        "missing": max(fixed + per_token - usable, 0),
    }


def _parts(model: ModelMemory) -> dict[str, int]:
    return {name: getattr(model, name) for name in ("weights", "kv_per_token", "step", "process")}


def _report(
    model: Path,
    target: ModelMemory,
    draft: ModelMemory | None,
    found: dict[str, Any],
    usable: int,
    free: int,
    *,
    is_given: bool,
) -> None:
    from outrider.engine.loading.memory_plan import in_words

    console = Console(highlight=False)
    rest = "; the rest is held back (--utilization)" if usable < free else ""
    console.print(
        f"{model.resolve().name}: {in_words(usable)} of each rank's device may be used. That is {usable / free:.0%} of "
        f"{in_words(free)} ({'--memory' if is_given else 'what is free here'}){rest}.",
        soft_wrap=True,
    )
    table = Table()
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
    console.print(table)
    if found["num_tokens"]:
        console.print(f"KV of {found['num_tokens']:,} tokens fits. Sessions at once, by their length in tokens:")
        shown = (f"{length:,}: {n:,}" for length, n in found["sessions_by_length"].items())
        console.print("  " + "   ".join(shown), soft_wrap=True)
    else:
        console.print(
            f"It does not fit: {in_words(found['missing'])} are missing. Shard it over more ranks "
            "(--tensor-parallel-size), quantize it (--quantization), or use a larger device.",
            soft_wrap=True,
        )
