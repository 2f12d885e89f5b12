"""An environment of its own for each client, from its lock: a virtual environment or a folder of npm's.

Invariant: a folder that has the mark was installed completely from the lock whose hash is in the folder's name, and
nothing changes it afterwards. At most one environment of each client is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.clients.catalogue import Client, package_name

INSTALL_TIMEOUT_S: Final = 1800
WAIT_FOR_OTHER_RUN_S: Final = 900
PYTHON_VERSION: Final = "3.11"  # the oldest that the project supports; locks are written for it
_MARK: Final = ".complete"
_FOR_GPUS: Final = re.compile(r"nvidia-|cuda-|triton$")
_MESSAGE_CHARS_MAX: Final = 500
# As pip, uv and npm say that no index answers.
_UNREACHABLE: Final = re.compile(
    r"NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|Temporary failure in name resolution"
    r"|error sending request|dns error|client error \(Connect\)"
    r"|\b(?:ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH)\b"
)


class InstallError(Exception):
    """An environment could not be made; the message says why."""


class UnreachableError(InstallError):
    """Nothing can install the client: no package index answers, or npm is missing."""


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Folder of all environments, which respects XDG_CACHE_HOME."""
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "outrider" / "clients"


def environment_key(client: Client, lock: bytes, interpreter: str) -> str:
    """Name of the client's environment: another lock or another interpreter has another one."""
    digest = hashlib.sha256(b"\0".join([interpreter.encode(), lock])).hexdigest()
    return f"{client.key}-{digest[:16]}"


def locked_version(client: Client, lock: str) -> str:
    """The version of the client's first package in the text of its lock. Raises ValueError if it is not there."""
    name = package_name(client.packages[0])
    if client.language == "node":
        entry = json.loads(lock)["packages"].get(f"node_modules/{name}")
        if entry is not None:
            return str(entry["version"])
    elif found := re.search(rf"^{re.escape(name)}==(\S+)", lock, re.MULTILINE | re.IGNORECASE):
        return found[1]
    raise ValueError(f"{client.lock.name} of {client.key} does not pin {name}; run: python -m tests.clients --lock")


def unreachable(output: str) -> str | None:
    """The installer's word for an index that does not answer; None if it failed for another reason."""
    found = _UNREACHABLE.search(output)
    return found[0] if found else None


def is_left_out(package: str, client: Client) -> bool:
    """Whether the client's lock leaves the package out, for example because only a build of torch for GPUs needs it."""
    if package in client.borrowed or package in client.left_out:
        return True
    return "torch" in client.borrowed and _FOR_GPUS.match(package) is not None


@contextmanager
def exclusive(cache: Path) -> Iterator[None]:
    """Keeps other runs from the environments. Raises InstallError if another run has them for too long."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as file:
        deadline = time.monotonic() + WAIT_FOR_OTHER_RUN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    reason = f"another run has used {cache} for {WAIT_FOR_OTHER_RUN_S} s"
                    raise InstallError(f"{reason}; wait for its end, or set XDG_CACHE_HOME") from None
                time.sleep(1)
        yield


def prepare(client: Client, cache: Path) -> Path:
    """The client's environment, installed first if it is not there. Raises InstallError, UnreachableError."""
    # Borrowed packages are links into the environment that this runs in.
    interpreter = f"{sys.prefix if client.borrowed else sys.base_prefix} {sys.version_info[:2]}"
    key = environment_key(client, client.lock.read_bytes(), interpreter if client.language == "python" else "node")
    folder = cache / key
    if (folder / _MARK).exists():
        return folder
    for old in cache.glob(f"{client.key}-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True)
    (_install_python if client.language == "python" else _install_node)(client, folder)
    (folder / _MARK).touch()
    return folder


def _install_python(client: Client, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-compile", "--requirement", str(client.lock)], folder)
    for package in client.borrowed:
        _link(package, folder)


def _link(package: str, folder: Path) -> None:
    """Links a package of the project's own environment into a client's. Raises InstallError if it is not there."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise InstallError(f"{package} is not in the project's environment; run: make install") from None
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in {file.parts[0] for file in files} - {".."}:
        (packages / name).symlink_to(Path(str(metadata.distribution(package).locate_file(name))))


def _install_node(client: Client, folder: Path) -> None:
    for name in ("package.json", client.lock.name):
        shutil.copy(client.folder / name, folder)
    retries = ["--fetch-retries=2", "--fetch-retry-mintimeout=500", "--fetch-retry-maxtimeout=5000"]
    _run([_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", *retries], folder)


def write_lock(client: Client) -> None:
    """Pins the newest versions of the client's packages and of what they need. Raises InstallError."""
    (_lock_python if client.language == "python" else _lock_node)(client)


def _lock_python(client: Client) -> None:
    with tempfile.TemporaryDirectory() as name:
        asked, overrides = Path(name) / "requirements.in", Path(name) / "overrides.txt"
        asked.write_text("\n".join(client.packages), encoding="utf-8")
        pins = [f"{each}=={metadata.version(each).partition('+')[0]}" for each in client.borrowed]
        overrides.write_text("\n".join(pins), encoding="utf-8")
        _run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", str(asked), "--no-config", "--quiet", "--upgrade"),
                *("--python-version", PYTHON_VERSION, "--only-binary", ":all:", "--no-annotate"),
                *("--custom-compile-command", f"python -m tests.clients --lock {client.key}"),
                *("--output-file", str(client.lock), "--override", str(overrides)),
            ],
            client.folder,
        )
    lines = client.lock.read_text(encoding="utf-8").splitlines(keepends=True)
    needed = [line for line in lines if not is_left_out(line.partition("==")[0], client)]
    client.lock.write_text("".join(needed), encoding="utf-8")


def _lock_node(client: Client) -> None:
    manifest = {"name": f"outrider-client-{client.key}".replace("_", "-"), "private": True, "type": "module"}
    (client.folder / "package.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    client.lock.unlink(missing_ok=True)
    flags = ["--package-lock-only", "--save-exact", "--omit-lockfile-registry-resolved", "--no-audit", "--no-fund"]
    _run([_npm(), "install", *flags, *client.packages], client.folder)


def _npm() -> str:
    if (npm := shutil.which("npm")) is None or shutil.which("node") is None:
        raise UnreachableError("npm is not installed")
    return npm


def _run(command: Sequence[str], folder: Path) -> None:
    """Runs one step of an installation. Raises InstallError, UnreachableError with the last of what it printed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{command[0]}` took more than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        output = done.stdout + done.stderr
        reason = " ".join(output.split())[-_MESSAGE_CHARS_MAX:] or f"exit status {done.returncode}"
        if word := unreachable(output):
            raise UnreachableError(f"the package index does not answer ({word})")
        raise InstallError(reason)
