"""Chooses the device of a model, a GPU or the CPU, and says why.

`read_facts` looks at the machine, `choose_device` decides from what it found. A GPU that was asked for and cannot be
used is refused with the cause and the way out, before any weight is read; nothing falls back to the CPU but `auto`.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from outrider.errors import ConfigurationError

logger = logging.getLogger(__name__)

# The least driver on Linux for each major version of CUDA, any minor version
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html).
LEAST_DRIVERS: Final[Mapping[int, str]] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_DRIVER_FILE: Final = "proc/driver/nvidia/version"
_DRIVER_VERSION: Final = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)*)\b")
_HIDING: Final = frozenset({"", "-1", "none", "void", "NoDevFiles"})
_CAUSE_CHARS_MAX: Final = 200


class DeviceError(ConfigurationError):
    """The chosen device cannot be used; the message names the cause and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts about this machine's GPUs, and about this process among the ranks of the machine."""

    torch_version: str = ""
    torch_cuda: str | None = None  # the version of CUDA that torch was built with; None: it was built without
    num_devices: int = 0  # that torch can use
    driver: str | None = None  # version of the loaded kernel module; None: none is loaded
    has_device_files: bool = False
    cuda_visible: str | None = None  # CUDA_VISIBLE_DEVICES; None: not set
    container_visible: str | None = None  # NVIDIA_VISIBLE_DEVICES, by which a container runtime adds devices
    failure: str = ""  # why torch could not start CUDA, in its own words
    local_rank: int = 0
    num_local_ranks: int = 1


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device by torch's name, and the reason in words."""

    name: str
    reason: str
    is_surprising: bool = False  # the CPU, although there is a GPU


def find_device(choice: str) -> str:
    """The device of this process, by torch's name, for a choice of `--device`; logs it with the reason. Raises
    DeviceError."""
    chosen = choose_device(choice, read_facts())
    level = logging.WARNING if chosen.is_surprising else logging.INFO
    logger.log(level, "the model runs on %s (%s)", chosen.name, chosen.reason)
    return chosen.name


def choose_device(choice: str, facts: DeviceFacts) -> DeviceChoice:
    """Decides on the device of a rank, for a choice of `--device`: auto, cpu or cuda. Raises DeviceError."""
    if choice == "cpu":
        return DeviceChoice("cpu", "--device cpu")
    obstacle = _obstacle(facts)
    if obstacle is None:
        if facts.num_devices < max(facts.num_local_ranks, facts.local_rank + 1):
            raise DeviceError(
                f"{facts.num_local_ranks} ranks run on this machine, and torch sees {facts.num_devices} CUDA "
                f"device{'s'[: facts.num_devices > 1]} here: each rank needs its own. Start as many ranks "
                "(--nproc-per-node, --tensor-parallel-size) as there are devices, or add devices to the container "
                "(nvidia.com/gpu in its limits)"
            )
        of_all = f"device {facts.local_rank} of {facts.num_devices}"
        return DeviceChoice(f"cuda:{facts.local_rank}", f"--device {choice}, {of_all} that torch sees")
    cause, remedy = obstacle
    if choice == "cuda":
        raise DeviceError(f"--device cuda: {cause}; {remedy}, or set --device cpu")
    is_there = facts.has_device_files or facts.driver is not None
    return DeviceChoice("cpu", f"--device auto: {cause}", is_there and not _is_hidden(facts))


def _obstacle(facts: DeviceFacts) -> tuple[str, str] | None:
    """Why torch can use no GPU here, and the way out; None where it can."""
    if facts.num_devices:
        return None
    if facts.torch_cuda is None:
        return (
            f"torch {facts.torch_version} is built for CPUs alone",
            "install a build for CUDA (the worker's image with the tag ending in -cuda)",
        )
    if _is_hidden(facts):
        return (
            f"CUDA_VISIBLE_DEVICES is {facts.cuda_visible!r}, which hides every device",
            "unset it, or name devices in it, such as 0",
        )
    if facts.driver is None and not facts.has_device_files:
        if facts.container_visible is not None:
            return (
                f"no NVIDIA driver and no device in this container, although NVIDIA_VISIBLE_DEVICES is "
                f"{facts.container_visible!r}",
                "ask for devices (nvidia.com/gpu in the container's limits, or --gpus of docker) on a node that has "
                "them and NVIDIA's container runtime",
            )
        return (
            "no NVIDIA driver here (no /dev/nvidia*, no /proc/driver/nvidia/version)",
            "install the driver; in a container ask for devices (nvidia.com/gpu in its limits, or --gpus of docker)",
        )
    least = LEAST_DRIVERS.get(int(facts.torch_cuda.partition(".")[0]))
    if facts.driver is not None and least is not None and _version(facts.driver) < _version(least):
        return (
            f"the NVIDIA driver {facts.driver} is too old for torch {facts.torch_version}, which is built with CUDA "
            f"{facts.torch_cuda} and needs at least {least}",
            "update the driver, or install a build of torch for an older CUDA",
        )
    if not facts.has_device_files:
        return (
            f"the NVIDIA driver {facts.driver} is loaded, and no device is in this container (no /dev/nvidia0; "
            f"NVIDIA_VISIBLE_DEVICES is {_shown(facts.container_visible)})",
            "ask for devices (nvidia.com/gpu in the container's limits, or --gpus of docker)",
        )
    return (
        f"torch {facts.torch_version}, built with CUDA {facts.torch_cuda}, cannot use the NVIDIA driver "
        f"{facts.driver or 'here'} ({facts.failure or 'it sees no device'}; CUDA_VISIBLE_DEVICES is "
        f"{_shown(facts.cuda_visible)})",
        "look at nvidia-smi on the node and in the container",
    )


def _is_hidden(facts: DeviceFacts) -> bool:
    return facts.cuda_visible is not None and facts.cuda_visible.strip() in _HIDING


def _shown(variable: str | None) -> str:
    return "not set" if variable is None else repr(variable)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def read_facts(root: Path = Path("/")) -> DeviceFacts:
    """Looks at torch, the files below `root`, and the environment. Raises DeviceError."""
    num_devices, failure = _torch_devices()
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError as error:
        raise DeviceError(f"LOCAL_RANK and LOCAL_WORLD_SIZE must be numbers, as torchrun sets them: {error}") from error
    return DeviceFacts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda or torch.version.hip,
        num_devices=num_devices,
        driver=_driver_version(root / _DRIVER_FILE),
        # MIG devices come with their GPU's own file. Windows' subsystem for Linux has one of its own for all.
        has_device_files=any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists(),
        cuda_visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        container_visible=os.environ.get("NVIDIA_VISIBLE_DEVICES"),
        failure=failure,
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
    )


def _torch_devices() -> tuple[int, str]:
    """The number of devices that torch can use; where there is none, its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason, as a warning
        if torch.cuda.is_available():
            return torch.cuda.device_count(), ""
        try:
            torch.cuda.init()
        except Exception as error:  # an AssertionError without CUDA, whatever the driver says with it
            return 0, " ".join(str(error).split())[:_CAUSE_CHARS_MAX]
    return 0, ""


def _driver_version(path: Path) -> str | None:
    """The version of the loaded kernel module; None where there is none, or the file does not say."""
    try:
        found = _DRIVER_VERSION.search(path.read_text(errors="replace").partition("\n")[0])
    except OSError:
        return None
    return found[1] if found is not None else None
