"""Runs one client's program in its environment and reads the result of each of its checks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.clients.catalogue import FOLDER, Client

ROOT: Final = FOLDER.parents[1]
SHARED: Final = FOLDER / "checks"
_OUTPUT_CHARS_MAX: Final = 8000
_ERROR_CHARS_MAX: Final = 200
_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test. url: `http://host:port`. grpc: `host:port`, empty if unknown."""

    url: str
    grpc: str
    model: str
    tokenizer: Path

    def variables(self) -> dict[str, str]:
        """Environment variables by which the programs find the server."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "OUTRIDER_URL": self.url,
            "OUTRIDER_GRPC": self.grpc,
            "OUTRIDER_MODEL": self.model,
            "OUTRIDER_TOKENIZER": str(self.tokenizer),
            "OUTRIDER_PROTOS": str(ROOT / "protos"),
            # No client sends anything to anybody but the server.
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


@dataclass(frozen=True, slots=True)
class Result:
    """How the run of one client ended. state: `passed`, `failed` or `skipped`. output: the end of what it printed."""

    client: Client
    state: str
    text: str
    output: str = ""


def result_of(client: Client, status: int | None, stdout: str, output: str) -> Result:
    """The result from the program's exit status (None: it took too long) and its lines of checks. Pure."""
    checks = []
    for line in stdout.splitlines():
        with suppress(ValueError):
            if isinstance(read := json.loads(line), dict) and "check" in read:
                checks.append(read)
    failed = [
        f"{each['check']} ({' '.join(str(each.get('error')).split())[:_ERROR_CHARS_MAX]})"
        for each in checks
        if each.get("ok") is not True
    ]
    if status is None:
        failed.append(f"not ended after {client.timeout_s} s")
    elif status and not failed:
        failed.append(f"exit status {status}")
    elif not checks:
        failed.append("no check was run")
    if failed:
        text = f"{len(failed)} of {max(len(checks), 1)} failed: {'; '.join(failed)}"
        return Result(client, "failed", text, output[-_OUTPUT_CHARS_MAX:])
    return Result(client, "passed", f"{len(checks)} check{'s' if len(checks) > 1 else ''} passed")


def run_client(client: Client, environment: Path, server: Server) -> Result:
    """Runs the program in a folder of its own, with nothing of this process's environment but the necessary."""
    with tempfile.TemporaryDirectory(prefix=f"outrider-{client.key}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path in (client.program, *SHARED.glob(f"*{client.program.suffix}")):
            shutil.copy(path, folder)
        if client.language == "node":
            (folder / "node_modules").symlink_to(environment / "node_modules")
            command = ["node", client.program.name]
        else:
            command = [str(environment / "bin" / "python"), client.program.name]
        kept = {key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ}
        variables = kept | {"HOME": name} | server.variables() | dict(client.variables)
        return _run(client, command, folder, variables)


def _run(client: Client, command: list[str], folder: Path, variables: Mapping[str, str]) -> Result:
    with (folder / "stdout").open("w+b") as stdout, (folder / "stderr").open("w+b") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(client.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it and what it started
            process.wait()
    out, err = ((folder / each).read_text(encoding="utf-8", errors="replace") for each in ("stdout", "stderr"))
    return result_of(client, status, out, f"{err}\n{out}")
