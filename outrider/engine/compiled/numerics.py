"""A line that identifies an engine's arithmetic: everything beside the weights that determines the bits of its logits.

Two engines with equal weights and equal lines compute the same logits bit for bit, so that a sequence may move between
them at any token. Whatever may change a bit is a token of the line: types, the number of ranks, the class of the
processor or device, the forms of the linear layers, versions. Products of a library also depend on the number of
threads (seen: float32 of 64 rows with one thread and with two) and may depend on the exact processor; our compiled
products do not. The last token is a hash of the engine's logits for the loader's probe, which reveals differences that
have no token (another compiler, a variable that limits a library).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from outrider.engine.compiled import kernels

NUMERICS_VERSION: Final = 2
"""Version of this engine's own arithmetic. Raise it with every change that may change a bit of logits, or the choice
among equal logits (attention, norms, sums over ranks, quantization, logit processing, sampling, grammar)."""

_CPU_FIELDS: Final = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
NUM_PROBE_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The properties of an engine that determine its bits."""

    dtype: str
    quantization: str
    num_ranks: int
    device: str  # see `device_class`
    layers: str  # implementation of attention and of everything between the linear layers
    linear_forms: Mapping[str, str]  # by shape, `LinearForms.report`
    num_threads: int


def describe(arithmetic: Arithmetic, probe_logits: torch.Tensor, cpu_model: str) -> str:
    """Returns the line. `cpu_model` names the processor; it counts in full where libraries multiply."""
    forms = sorted(set(arithmetic.linear_forms.values()))
    tokens = [
        f"v{NUMERICS_VERSION}",
        arithmetic.dtype,
        f"quantization={arithmetic.quantization}",
        f"ranks={arithmetic.num_ranks}",
        arithmetic.device,
        f"layers={arithmetic.layers}",
        f"linear={_joined(forms, arithmetic.linear_forms)}",
    ]
    if arithmetic.device.startswith("cpu/"):
        is_library = forms != ["compiled"] or arithmetic.layers == "modules"
        # Without a library's products there are still its tables of sines, which depend on the processor's vendor.
        tokens.append(f"processor={cpu_model if is_library else cpu_model.partition('-')[0]}")
        tokens += [f"threads={arithmetic.num_threads}"] * is_library
    tokens += [
        f"torch={torch.__version__}",
        f"transformers={version('transformers')}",
        f"probe={probe_digest(probe_logits)}",
    ]
    return " ".join(token.replace(" ", "-") for token in tokens)


def _joined(forms: list[str], by_shape: Mapping[str, str]) -> str:
    """The forms' names, with a digest of which shape has which where there are several."""
    if len(forms) == 1:
        return forms[0]
    digest = hashlib.sha256(json.dumps(dict(by_shape), sort_keys=True).encode()).hexdigest()[:8]
    return f"{'+'.join(forms)}#{digest}"


def probe_digest(logits: torch.Tensor) -> str:
    """A hash of the bits of float32 logits."""
    numbers = logits.detach().float().cpu().contiguous().numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:NUM_PROBE_DIGITS]


def device_class(device: str) -> str:
    """The class of a device, such as cpu/amx, cpu/avx512-bf16, cpu/generic, cuda/sm90/NVIDIA-H100-80GB-HBM3/132."""
    if device.startswith("cuda"):
        found = torch.cuda.get_device_properties(device)
        # Libraries choose kernels by the number of multiprocessors, which differs among devices of one name.
        return f"cuda/sm{found.major}{found.minor}/{found.name}/{found.multi_processor_count}"
    return cpu_class(
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        has_amx=torch.cpu._is_amx_tile_supported(),
        has_bfloat16=torch.cpu._is_avx512_bf16_supported(),
    )


def cpu_class(machine: str, torch_capability: str, *, has_amx: bool, has_bfloat16: bool) -> str:
    """The class of a CPU. `torch_capability` is the instruction set that torch's loops use, which a variable may
    limit."""
    capability = torch_capability.lower().replace("default", "generic")
    if machine not in ("x86_64", "AMD64"):
        return f"cpu/{machine}-{capability}"
    own = "amx" if has_amx else "avx512-bf16" if has_bfloat16 else capability
    is_limited = (has_amx or has_bfloat16) and capability != "avx512"
    return f"cpu/{own}-as-{capability}" if is_limited else f"cpu/{own}"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, such as GenuineIntel-6-207."""
    try:
        lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    stated = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return "-".join(stated[name] for name in _CPU_FIELDS if name in stated) or (
        platform.processor() or platform.machine()
    )


def compiled_layers() -> str:
    """The name and version of our compiled kernels."""
    return f"compiled-{kernels.VERSION}"
