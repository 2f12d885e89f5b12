"""Folders of this installation, and the command that runs one of its packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

from outrider.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]
DEMO_TARGET = ROOT / "demo" / "target"
DEMO_DRAFT = ROOT / "demo" / "draft"
DEMO_PARALLEL_DRAFT = ROOT / "demo" / "parallel_draft"
DEMO_HEAD = ROOT / "demo" / "eagle3_head"

_NEEDS: Final = {
    "coordinator": ("fastapi", "uvicorn"),
    "ray_serve": ("fastapi", "ray", "uvicorn"),
    "draft_worker": ("torch", "transformers"),
    "draft_worker.memory": ("numpy", "tokenizers"),
    "target_worker": ("torch", "transformers"),
}
"""Packages of the extras without which a process cannot start; `ray_serve` is a coordinator on Ray Serve."""


def check_installed(*processes: str) -> None:
    """Raises ConfigurationError, which names the extra to install, if a process lacks its packages."""
    missing = {name for process in processes for name in _NEEDS[process] if not importlib.util.find_spec(name)}
    if missing:
        extra = "demo" if len(processes) > 1 else "coordinator" if "coordinator" in processes else "worker"
        raise not_installed(", ".join(sorted(missing)), extra)


def not_installed(names: str, extra: str) -> ConfigurationError:
    """The error of a command whose packages are not installed."""
    return ConfigurationError(
        f"this command needs packages that are not installed ({names}); install them with: "
        f"pip install 'outrider[{extra}]'"
    )


def module(name: str) -> tuple[str, ...]:
    """The command that runs one of our packages with this interpreter."""
    return (sys.executable, "-m", name)


def launcher(name: str, num_ranks: int, grace_s: float) -> tuple[str, ...]:
    """The command that runs one of our packages in so many processes, the ranks of one group on this machine. grace_s:
    longest that they may take to stop."""
    if num_ranks == 1:
        return module(name)
    torchrun = (
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)),
        *("--monitor-interval", "0.2", "--shutdown-timeout", f"{grace_s:g}"),
    )
    return (*module("torch.distributed.run"), *torchrun, "-m", name)


def rank_environment(num_ranks: int) -> dict[str, str]:
    """Variables by which the ranks of `launcher` find each other: by the loopback, whatever the machine is called."""
    if num_ranks == 1:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def engine_path() -> str:
    """PYTHONPATH of another environment's Python: this checkout. An installed Outrider stands beside packages that are
    not for others, so that it must be installed there, too."""
    is_checkout = (ROOT / "pyproject.toml").is_file()
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*([str(ROOT)] if is_checkout else []), *([inherited] if inherited else [])])
