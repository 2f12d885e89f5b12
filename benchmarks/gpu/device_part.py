"""The device's name and versions, and its speeds: what it reads, copies and computes at most."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Final

import torch

from benchmarks.gpu.outcome import Outcome, Setting
from benchmarks.shared.machine import machine
from outrider.engine.device import read_facts
from outrider.engine.layers.paged_attention import NEEDED_PARAMETERS, missing_parameters

DATA_SHEET_GB_PER_S: Final = {
    "H200": 4800.0, "H100 PCIe": 2000.0, "H100 NVL": 3938.0, "H100": 3350.0, "GH200": 4000.0, "B200": 8000.0,
    "A100-SXM4-80GB": 2039.0, "A100 80GB PCIe": 1935.0, "A100-SXM4-40GB": 1555.0, "A100-PCIE-40GB": 1555.0,
    "L40S": 864.0, "L4": 300.0, "A10G": 600.0, "T4": 320.0,
}  # fmt: skip
"""Memory bandwidth by a part of the device's name, from NVIDIA's data sheets; the longest part that fits counts."""
COPY_BYTES: Final = {"cpu": 1 << 27, "cuda": 1 << 32}


def data_sheet(name: str) -> float | None:
    """GB/s that the maker states for a device of this name; None where it is not known."""
    found = [part for part in DATA_SHEET_GB_PER_S if part.lower() in name.lower()]
    return DATA_SHEET_GB_PER_S[max(found, key=len)] if found else None


def missing_in_varlen() -> list[str]:
    """Parameters that torch's attention over a block table lacks here; all of them where there is no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return list(NEEDED_PARAMETERS)
    return missing_parameters(varlen_attn)


def copy_gb_per_s(device: str, num_tries: int = 7) -> float:
    """Bytes read and written by a copy within the device's memory, per second; the best of some tries."""
    source = torch.ones(COPY_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    times = []
    for _ in range(num_tries + 1):
        _finish(device)
        started = time.perf_counter()
        destination.copy_(source)
        _finish(device)
        times.append(time.perf_counter() - started)
    return 2e-9 * source.numel() / min(times[1:])


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def missing_packages(role: str = "worker") -> list[str]:
    """Packages that an image of this role carries and this environment lacks."""
    import tomllib

    from benchmarks.shared.machine import ROOT

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    missing = []
    for name in declared["tool"]["outrider"]["images"][role]:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def run(setting: Setting, outcome: Outcome) -> None:
    """Writes the device's facts and speeds."""
    facts = read_facts()
    for name, value in machine().items():
        outcome.put(name, value)
    outcome.put("cuda", facts.torch_cuda)
    outcome.put("driver", facts.driver)
    outcome.put("num_gpus", 0 if setting.is_tiny else facts.num_devices)
    outcome.put("missing_packages", missing_packages())
    outcome.put("missing_in_varlen_attn", missing_in_varlen())
    if not setting.is_tiny:
        properties = torch.cuda.get_device_properties(0)
        outcome.put("device", properties.name)
        outcome.put("device_memory_gib", round(properties.total_memory / 2**30, 1))
        outcome.put("multiprocessors", properties.multi_processor_count)
        outcome.put("data_sheet_gb_per_s", data_sheet(properties.name))
    else:
        outcome.put("device", "the CPU (--tiny)")
    # Behind the facts, which say what is missing where this cannot be imported.
    from outrider.engine.profiling import measure_device

    speed = measure_device(setting.device, torch.bfloat16)
    outcome.put("read_gb_per_s", round(speed.bytes_per_s / 1e9, 1))
    outcome.put("tflop_per_s", round(speed.flops_per_s / 1e12, 2))
    outcome.put("copy_gb_per_s", round(copy_gb_per_s(setting.device), 1))
