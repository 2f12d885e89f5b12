"""Profiles of the models where else they could run: the target on the draft's core too, the draft on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.profile import DRAFT_SIZES, TARGET_SIZES, loaded, step_times
from outrider.engine.loading.machine import usable_cores
from outrider.engine.threads import threads

if TYPE_CHECKING:
    from outrider.engine.model import Engine


def chosen_device(choice: str) -> str:
    """The device for a choice of --device: cpu or cuda. Raises DeviceError where there is no such device."""
    from outrider.engine.model import check_device, device_for  # imports torch

    check_device(choice)
    return device_for(choice).partition(":")[0]


def gpu_name() -> str:
    """The name of the GPU that models run on."""
    import torch

    return torch.cuda.get_device_name(0)


def why_no_more_cores(settings: Settings) -> str:
    """Why the target cannot be measured on one core more than it has; empty where it can."""
    num_cores = len(usable_cores())
    if settings.num_threads < num_cores:
        return ""
    return (
        f"the target on the draft's core too, as this process may use {num_cores} "
        f"core{'s'[: num_cores > 1]}: set --cpu-affinity or --num-threads otherwise"
    )


def on_one_more_core(engine: Engine, settings: Settings) -> ModelProfile | None:
    """The target's steps with one thread more; None where there is no core for it, or it runs on a GPU."""
    if settings.device != "cpu" or why_no_more_cores(settings):
        return None
    with threads(settings.num_threads + 1):
        return step_times(engine, TARGET_SIZES, settings, is_target=True)


def draft_on_cpu(draft: Path, settings: Settings, longest: int) -> ModelProfile:
    """The steps of a draft on one core, on a machine with a GPU."""
    own = replace(settings, device="cpu")
    with loaded(draft, own, is_target=False, longest=longest) as engine:
        return step_times(engine, DRAFT_SIZES, own, is_target=False)
