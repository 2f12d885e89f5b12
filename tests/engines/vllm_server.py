"""A vLLM server, with or without hints, and draft workers for it, as processes of a test.

vLLM lives in an environment of its own, whose Python `OUTRIDER_VLLM_PYTHON` names (`make test-engines` makes it).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from outrider.local.free_ports import free_ports

ROOT: Final = Path(__file__).parents[2]
TARGET: Final = ROOT / "demo" / "target"
DRAFT: Final = ROOT / "demo" / "draft"
PYTHON: Final = os.environ.get("OUTRIDER_VLLM_PYTHON", "")
START_S: Final = 570.0
"""vLLM takes a minute to start, and several on a busy machine."""
NUM_SPECULATIVE_TOKENS: Final = 7
needs_vllm = pytest.mark.skipif(not PYTHON, reason="OUTRIDER_VLLM_PYTHON names no Python with vLLM: make test-engines")


def wait_until(is_done: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Waits for something that must come true. Raises AssertionError."""
    until = time.monotonic() + within_s
    while not is_done():
        assert time.monotonic() < until, f"{what}: not within {within_s:g} s"
        time.sleep(0.05)


@dataclass
class Process:
    """A server process, the head of a group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        self.process.wait(60.0)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def start(words: list[str], log: Path, environment: dict[str, str] | None = None) -> Process:
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=file, stderr=file, start_new_session=True
        )
    return Process(process, log)


def start_draft_worker(port: int, folder: Path, *flags: str, model: Path = DRAFT) -> Process:
    """Starts a draft worker and waits until it is ready. Raises AssertionError."""
    log = folder / f"draft-{port}.log"
    before = log.read_text().count('"event": "ready"') if log.exists() else 0
    words = [sys.executable, "-m", "draft_worker", "--model", str(model), "--port", str(port), "--dtype", "float32"]
    made = start([*words, *flags], log)
    try:
        wait_until(lambda: log.read_text().count('"event": "ready"') > before, "the draft worker is ready", START_S)
    except AssertionError:
        made.stop()
        raise
    return made


class VllmServer:
    """A running server."""

    def __init__(self, process: Process, port: int, hints_port: int) -> None:
        self.process = process
        self.hints_port = hints_port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=300.0)

    def completion(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        """One completion, with its token ids."""
        body = {"model": "m", "prompt": prompt, "temperature": 0, "return_token_ids": True, **parameters}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def tokens(self, prompt: str, **parameters: Any) -> list[int]:
        token_ids: list[int] = self.completion(prompt, **parameters)["choices"][0]["token_ids"]
        return token_ids

    def metric(self, name: str) -> float:
        """Sum of a counter over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    @property
    def num_accepted(self) -> float:
        return self.metric("vllm:spec_decode_num_accepted_tokens_total")

    def close(self) -> None:
        self.client.close()
        self.process.stop(signal.SIGTERM)
        self.process.stop()


def vllm_words(port: int, *flags: str, model: Path = TARGET, dtype: str = "float32") -> list[str]:
    # What `vllm serve` runs; the command itself asks for a package `vllm`, and the CPU build is called otherwise.
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
    words += ["--port", str(port), "--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager"]
    return [*words, "--max-model-len", "1024", "--max-num-seqs", "16", *flags]


def hint_flags(
    draft_ports: list[int],
    hints_port: int,
    scheduler: str = "outrider.engines.vllm.scheduler.HintScheduler",
    **settings: Any,
) -> list[str]:
    speculative = {
        "method": "custom_class",
        "model": "outrider.engines.vllm.no_drafts.NoDrafts",
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    workers = [f"127.0.0.1:{port}" for port in draft_ports]
    return [
        *("--scheduler-cls", scheduler, "--no-async-scheduling"),
        *("--speculative-config", json.dumps(speculative)),
        "--additional-config",
        json.dumps({"outrider": {"draft_workers": workers, "port": hints_port, **settings}}),
    ]


def environment(cores: str = "0-1") -> dict[str, str]:
    """vLLM's, for the cores that its threads are bound to."""
    return {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # log probabilities would be compiled, for which a machine may lack a compiler
    }


@contextlib.contextmanager
def running(folder: Path, name: str, *flags: str, hints_port: int = 0, **options: Any) -> Iterator[VllmServer]:
    """A server; the context is entered as soon as it starts, so that several start at once: `wait_ready`."""
    (port,) = free_ports(1)
    variables = environment(options.pop("cores", "0-1")) | options.pop("variables", {})
    log = folder / f"{name}.log"
    server = VllmServer(start(vllm_words(port, *flags, **options), log, variables), port, hints_port)
    try:
        yield server
    finally:
        server.close()


def wait_ready(server: VllmServer) -> None:
    """Waits until a server answers. Raises AssertionError with its log."""

    def is_ready() -> bool:
        assert server.process.process.poll() is None, server.process.tail()
        with contextlib.suppress(httpx.TransportError):
            return server.client.get("/health", timeout=5.0).status_code == 200
        return False

    wait_until(is_ready, "vLLM is ready", START_S)
