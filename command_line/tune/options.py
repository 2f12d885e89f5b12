"""Settings of `outrider tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command_line.checkout import DEMO_TARGET
from outrider.engine.options import Device, Dtype, EngineOptions, Quantization
from outrider.settings import check, same_as, setting

_MODELS = "Models"
_MACHINE = "Serving"
_MEASURING = "Measurement"
_RESULT = "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Settings of `outrider tune`. Raises SettingError."""

    target: Path = setting(DEMO_TARGET, "model folder of the target", _MODELS, "folder", shows="the demo's")
    draft: tuple[Path, ...] = setting(
        (), "folder of a draft model, or of a draft head that was made for the target; given several times, they are "
        "compared",
        _MODELS, "folder", shows="the demo's",
    )  # fmt: skip
    early_exit_layer: tuple[int, ...] = setting(
        (), "compare so many of the target's own first layers as a draft, too; may be given several times",
        _MODELS, "layers",
    )  # fmt: skip
    all_sources: bool = setting(
        False, "compare what the target's folder offers, too: its MTP layer, where it has one, and a quarter of its "
        "layers, unless --early-exit-layer says how many",
        _MODELS,
    )  # fmt: skip
    prompts: Path | None = setting(
        None, 'JSON lines with a "prompt" each, or plain text with blank lines between prompts; acceptance '
        "depends on the prompts, so use those of your users",
        _MODELS, "file", shows="a few built-in ones",
    )  # fmt: skip
    dtype: Dtype = same_as(EngineOptions, "dtype", group=_MACHINE)
    quantization: Quantization = same_as(EngineOptions, "quantization", group=_MACHINE)
    device: Device = same_as(EngineOptions, "device", group=_MACHINE)
    num_threads: int = setting(
        1, "threads of the target on a CPU; a draft worker has one", _MACHINE, "threads", at_least=1, at_most=1024
    )
    cpu_affinity: str | None = same_as(EngineOptions, "cpu_affinity", group=_MACHINE)
    batch_sizes: str = setting(
        "1,4,8,16,32", "numbers of concurrent sequences to give advice for", _MACHINE, "n[,n...]"
    )
    context_len: int = setting(
        256, "context of each sequence while steps are timed; at most half of what the model can",
        _MACHINE, "tokens", at_least=1,
    )  # fmt: skip
    max_speculative_tokens: int = setting(
        12, "longest block of hints to consider", _MACHINE, "tokens", at_least=1, at_most=20
    )
    overhead_ms: float | None = setting(
        None, "overhead of the target worker in a plain step with one sequence; the other overheads follow in "
        "proportion",
        _MACHINE, "ms", at_least=0, shows="0.35, measured with the demo pair",
    )  # fmt: skip
    link_ms: float | None = setting(
        None, "one-way delay of a message between workers", _MACHINE, "ms", at_least=0, shows="0.15, loopback"
    )
    draft_gpu: str = setting(
        "l4", "on a machine with a GPU: type of a smaller GPU that the draft could have, where its steps are predicted "
        "from the memory bandwidth",
        _MACHINE, "type",
    )  # fmt: skip
    prices: str = setting(
        "", "on a machine with a GPU: what devices cost relative to each other, such as h100=10,l4=1,core=0.05",
        _MACHINE, "device=price[,...]", shows="rough ratios of clouds' list prices",
    )  # fmt: skip
    max_tokens: int = setting(100, "greedy tokens per prompt", _MEASURING, "tokens", at_least=8)
    budget_s: float = setting(
        10.0, "most time for each of the five phases, without loading",
        _MEASURING, "seconds", at_least=0.1, at_most=3600,
    )  # fmt: skip
    as_json: bool = setting(False, "print one JSON object instead", _RESULT, flag="--json")
    as_flags: bool = setting(False, "print only the commands to paste", _RESULT, flag="--flags")

    def __post_init__(self) -> None:
        check(self)
