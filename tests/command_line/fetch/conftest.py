"""A Hub on this machine, and `outrider fetch` with what it needs of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from command_line.fetch.command import open_source
from command_line.fetch.fetching import Fetch, Outcome
from command_line.fetch.options import FetchOptions
from command_line.fetch.place import Place
from command_line.fetch.sources import Source
from tests.command_line.fetch.checkpoints import sharded_model
from tests.command_line.fetch.hub_server import HubServer, Repository

ROOT = Path(__file__).parents[3]
REPOSITORY = "some-org/some-model"


@dataclass
class Notes:
    """A display that keeps what it is told."""

    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    total: tuple[int, int] = (0, 0)
    paths: list[str] = field(default_factory=list)

    def begin(self, num_files: int, num_bytes: int) -> None:
        self.total, self.num_bytes = (num_files, num_bytes), 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def finished(self, path: str) -> None:
        self.paths.append(path)

    def note(self, message: str) -> None:
        self.notes.append(message)


@dataclass
class Fetcher:
    """Fetches inside this process."""

    shown: Notes = field(default_factory=Notes)
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, address: str | Source, folder: Path, lease_s: float = 60.0, **options: Any) -> Outcome:
        self.shown, self.stop = Notes(), threading.Event()
        source = open_source(address) if isinstance(address, str) else address
        try:
            given = FetchOptions(source=source.address, folder=folder, **options)
            return Fetch(source, Place(folder, lease_s), given, self.shown, self.stop).run()
        finally:
            source.close()


@pytest.fixture
def fetch() -> Fetcher:
    return Fetcher()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The Hub of this process: no other can be reached, and nobody is logged in."""
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with server.host.running(), server.running():
        yield server


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    """A repository with a model in two files, and everything beside it that repositories have."""
    return hub.add(REPOSITORY, sharded_model())


Command = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def command(hub: HubServer, tmp_path: Path) -> Iterator[Command]:
    """Starts `outrider fetch` as a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "command_line", "fetch", *map(str, arguments)],
            cwd=ROOT, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def content_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
