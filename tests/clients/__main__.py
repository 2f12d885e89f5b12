"""`python -m tests.clients`: runs other people's clients against a live server, each in an environment of its own.

Exit status: 0 if no client failed, 1 if one did, 2 if a name or a declaration is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from command_line.checkout import DEMO_TARGET
from tests.clients.catalogue import Client, choose, package_name, read_clients
from tests.clients.environments import (
    InstallError,
    UnreachableError,
    cache_folder,
    exclusive,
    locked_version,
    prepare,
    write_lock,
)
from tests.clients.page import Row, read_rows, write_page
from tests.clients.runs import ROOT, Result, Server, run_client
from tests.e2e.system import START_TIMEOUT_S, running_system

VLLM_START_S: Final = 900.0
PAGE: Final = ROOT / "docs" / "reference" / "clients.md"


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Runs clients against a live server.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders of tests/clients; all without any")
    parser.add_argument("--short", action="store_true", help="only those that are small and quick")
    parser.add_argument(
        "--may-be-offline",
        action="store_true",
        help="skip clients whose packages cannot be fetched; otherwise they fail",
    )
    parser.add_argument(
        "--url", help="server that runs already, such as http://127.0.0.1:8000, instead of one started here"
    )
    parser.add_argument("--grpc", default="", metavar="HOST:PORT", help="its gRPC address; the gRPC clients need it")
    parser.add_argument(
        "--engine", default="outrider", choices=("outrider", "vllm"),
        help="of the target of the server that is started here; vllm: by the Python in OUTRIDER_VLLM_PYTHON",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help=f"write the results into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--lock", action="store_true", help="pin the newest versions instead of running anything")
    return parser


@contextlib.contextmanager
def server_at(url: str, grpc: str, engine: str = "outrider") -> Iterator[Server]:
    """A server that runs already at this address, else one of its own with the demo pair and batches."""
    if url:
        url = url.rstrip("/").removesuffix("/v1")
        models = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).raise_for_status().json()["data"]
        yield Server(url, grpc, models[0]["id"], DEMO_TARGET)
        return
    with tempfile.TemporaryDirectory(prefix="outrider-clients-") as folder:
        print("starting outrider serve with the demo pair", flush=True)
        flags = ["--batch-files", Path(folder) / "batches", *(vllm_flags() if engine == "vllm" else ())]
        timeout_s = VLLM_START_S if engine == "vllm" else START_TIMEOUT_S
        with running_system(Path(folder) / "serve", *flags, timeout_s=timeout_s) as system:
            yield Server(system.url, system.grpc, system.model, DEMO_TARGET)


def vllm_flags() -> list[str]:
    """Flags of `outrider serve` for a target whose model vLLM runs. Raises SystemExit."""
    python = os.environ.get("OUTRIDER_VLLM_PYTHON")
    if not python:
        sys.exit("--engine vllm: OUTRIDER_VLLM_PYTHON names no Python with vLLM (make test-engines makes one)")
    args = "--enforce-eager --kv-cache-memory-bytes 268435456"
    words = ["--engine", "vllm", "--engine-python", python, "--vllm-args", args]
    return [*words, "--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", "1024"]


def environments_of(
    clients: Sequence[Client], cache: Path, *, may_be_offline: bool
) -> tuple[dict[str, Path], list[Result]]:
    """The environment of each client by its key, and the results of those that have none."""
    made: dict[str, Path] = {}
    results = []
    for client in clients:
        started = time.monotonic()
        try:
            made[client.key] = prepare(client, cache)
        except InstallError as error:
            is_skipped = may_be_offline and isinstance(error, UnreachableError)
            results.append(Result(client, "skipped" if is_skipped else "failed", f"not installed: {error}"))
            show(results[-1], started)
        else:
            print(f"{client.key}: environment ready ({time.monotonic() - started:.1f} s)", flush=True)
    return made, results


def show(result: Result, started: float) -> None:
    """Prints one line for a result, with the end of the program's output if it failed."""
    if result.output:
        print(result.output, flush=True)
    print(f"{result.client.key}: {result.state}, {result.text} ({time.monotonic() - started:.1f} s)", flush=True)


def run_all(clients: Sequence[Client], given: argparse.Namespace) -> list[Result]:
    """Installs and runs the clients one after the other. Raises InstallError if another run has the environments."""
    with exclusive(cache := cache_folder(os.environ)):
        environments, results = environments_of(clients, cache, may_be_offline=given.may_be_offline)
        if not environments:
            return results
        with server_at(given.url, given.grpc, given.engine) as server:
            for client in clients:
                if client.key not in environments:
                    continue
                started = time.monotonic()
                if client.needs_grpc and not server.grpc:
                    result = Result(client, "skipped", "the server's gRPC address is unknown; name it with --grpc")
                else:
                    result = run_client(client, environments[client.key], server)
                results.append(result)
                show(result, started)
    return results


def version_of(client: Client) -> str:
    return locked_version(client, client.lock.read_text(encoding="utf-8"))


def package_of(client: Client) -> str:
    """The client's first package and its version, as the page shows them."""
    return f"`{package_name(client.packages[0])}` {version_of(client)}"


def commit() -> str:
    """The commit of this checkout, marked if files differ from it; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def write(results: Sequence[Result], clients: Sequence[Client], described: str) -> None:
    """Writes the rows of clients that were run into the page; `described` is the commit that they were run at."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows: Mapping[str, Row] = {
        each.client.name: Row(each.client.name, package_of(each.client), each.client.run, each.text, day, described)
        for each in results
        if each.state != "skipped"
    }
    old = read_rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    PAGE.write_text(write_page([client.name for client in clients], old, rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    given = arguments_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server is stopped on the way out
    try:
        clients = read_clients()
        chosen = choose(clients, given.names, only_short=given.short)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        if given.lock:
            for client in chosen:
                write_lock(client)
                print(f"{client.key}: {client.packages[0]} {version_of(client)}", flush=True)
            return 0
        described = commit()
        results = run_all(chosen, given)
    except (InstallError, httpx.HTTPError) as error:
        print(f"{given.url}: {error}" if isinstance(error, httpx.HTTPError) else error, file=sys.stderr)
        return 1
    print()
    for result in results:
        print(f"{result.state:8}{result.client.name:32}{version_of(result.client):12}{result.text}")
    if given.write:
        write(results, clients, described)
    return 1 if any(result.state == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
