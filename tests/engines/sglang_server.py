"""An SGLang server on this machine's CPUs, with or without hints, as a process of a test.

SGLang lives in an environment of its own, whose Python `OUTRIDER_SGLANG_PYTHON` names (`make test-engines` makes it).
It is the package as published, less its compiled kernels: `sglang_kernels` stands in for those that are used here.
"""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.engines.vllm_server import ROOT, TARGET, Process, start, wait_until

PYTHON: Final = os.environ.get("OUTRIDER_SGLANG_PYTHON", "")
START_S: Final = 570.0
"""SGLang takes half a minute to start, and several on a busy machine."""
WIDTH: Final = 8
ENTRY_POINTS: Final = "sglang.srt.plugins"
needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="OUTRIDER_SGLANG_PYTHON names no Python with SGLang: make test-engines"
)


def installed(folder: Path) -> Path:
    """A folder in which Python finds Outrider's entry points as if it were installed, and that of `sglang_kernels`, as
    another package's: of two with one name only the first counts, and a clone may be installed, too."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][ENTRY_POINTS]
    for package, plugins in (("outrider", declared), ("cpu-verify", {"cpu_verify": "cpu_verify:register"})):
        metadata = folder / "metadata" / f"{package.replace('-', '_')}-0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0\n")
        lines = [f"[{ENTRY_POINTS}]", *(f"{name} = {value}" for name, value in plugins.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder / "metadata"


def environment(folder: Path, **variables: str) -> dict[str, str]:
    paths = [ROOT, ROOT / "tests" / "engines" / "sglang_kernels", installed(folder)]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",  # threads of two servers would spin on the same cores
        **variables,
    }


def said_by_sglang(folder: Path, code: str, **variables: str) -> Any:
    """Runs code in SGLang's environment; returns what it prints last, which is JSON."""
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=ROOT, env={**os.environ, **environment(folder, **variables)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


class SglangServer:
    """A running server."""

    def __init__(self, port: int, folder: Path, name: str, *flags: str, **variables: str) -> None:
        words = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--served-model-name", "m"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        words += ["--attention-backend", "torch_native", "--max-total-tokens", "16384", "--mem-fraction-static", "0.3"]
        words += ["--skip-server-warmup", "--max-running-requests", "8", "--chunked-prefill-size", "64", *flags]
        self.process: Process = start(words, folder / f"{name}.log", environment(folder, **variables))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0)

    def wait_ready(self) -> None:
        """Raises AssertionError with the log."""

        def is_ready() -> bool:
            assert self.process.process.poll() is None, self.process.tail()
            try:
                return self.client.get("/health", timeout=30.0).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, "SGLang is ready", START_S)

    def generate(self, prompt: str, **sampling: Any) -> dict[str, Any]:
        body = {"text": prompt, "sampling_params": {"temperature": 0, **sampling}}
        answer = self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        self.client.close()
        self.process.stop()
