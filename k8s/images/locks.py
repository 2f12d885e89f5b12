"""The images' lock files: every package of an image, at one version, with the hashes of its files.

`make lock` writes them from pyproject.toml: which role carries which dependency stands there under
`tool.outrider.images`, in which versions under `project.dependencies` and the extras. Versions stay as they are while
they fit; `make lock LOCK_ARGS=--upgrade` takes the newest. Beside them `licences.json` says what each package is
licensed under.

A lock names no index: the builder chooses where packages come from, and the hashes prove that they are the same.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(__file__).resolve().parent / "locks"
LICENCES: Final = FOLDER / "licences.json"

PYTHON_VERSION: Final = "3.11"  # of the images, and of the tests
PLATFORM: Final = "x86_64-manylinux_2_36"  # glibc of the images' Debian
ROLES: Final[Mapping[str, str]] = {
    "build": "build",
    "coordinator": "coordinator",
    "worker-cpu": "worker",
    "worker-cuda": "worker",
}
"""Roles by lock; each lock meets their requirements. `build` builds our own package."""

STEP_TIMEOUT_S: Final = 600
_ASKED_FOR: Final = "requirements.in"  # the file that uv names for packages that we asked for


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock."""

    name: str  # canonical
    version: str
    hashes: tuple[str, ...]  # "sha256:…", one per permitted file
    is_direct: bool  # asked for by us, not only by another package


def dependencies(pyproject: Mapping[str, Any]) -> list[str]:
    """The requirements of all roles: those of every process and the extras, without what only developers need."""
    extras = pyproject["project"]["optional-dependencies"]
    own = [text for role in ("coordinator-plain", "coordinator", "worker", "demo", "s3") for text in extras[role]]
    return pyproject["project"]["dependencies"] + [text for text in own if not text.startswith("outrider[")]


def requirements_of(role: str, pyproject: Mapping[str, Any]) -> list[str]:
    """Requirements of a role from pyproject.toml. Raises ValueError for a name that is not a dependency."""
    if role == "build":
        return list(pyproject["build-system"]["requires"])
    known = {canonicalize_name(Requirement(text).name): text for text in dependencies(pyproject)}
    names = pyproject["tool"]["outrider"]["images"][role]
    if missing := [name for name in names if canonicalize_name(name) not in known]:
        raise ValueError(f"tool.outrider.images.{role} names packages that are not dependencies: {', '.join(missing)}")
    return [known[canonicalize_name(name)] for name in names]


def parse_lock(text: str) -> list[Pin]:
    """Packages of a lock. Raises ValueError for anything that is not name==version with sha256 hashes: an option, a
    URL, a range."""
    pins: list[Pin] = []
    for entry in re.sub(r" \\\n", " ", text).split("\n"):
        if entry.startswith("    # "):  # why the package above is here
            if pins and entry.endswith(f"-r {_ASKED_FOR}"):
                pins[-1] = replace(pins[-1], is_direct=True)
            continue
        if not entry or entry.startswith("#"):
            continue
        found = re.fullmatch(r"([\w.-]+)==([\w.!+-]+)((?: +--hash=sha256:[0-9a-f]{64})+)", entry)
        if found is None:
            raise ValueError(f"not name==version with sha256 hashes: {entry[:200]}")
        name, version, hashes = found.groups()
        pins.append(Pin(name, version, tuple(re.findall(r"sha256:\w+", hashes)), is_direct=False))
    return pins


def read_lock(name: str) -> list[Pin]:
    """Packages of a lock file. Raises ValueError as `parse_lock`, OSError if there is none."""
    return parse_lock((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Licence from a package's metadata: an SPDX expression, else classifiers, else a short field."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get("classifier", ())
        if line.startswith("License :: ") and not line.endswith("OSI Approved")
    ]
    if classifiers:
        return ", ".join(classifiers)
    text = str(metadata.get("license") or "").strip()
    return text.splitlines()[0][:80] if text else ""


def compile_lock(name: str, requirements: Sequence[str], arguments: Sequence[str]) -> None:
    """Lets uv write one lock. Raises CalledProcessError; uv has printed the reason."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _ASKED_FOR).write_text("\n".join(requirements), encoding="utf-8")
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", _ASKED_FOR, "--no-config", "--quiet"),
                *("--python-version", PYTHON_VERSION, "--python-platform", PLATFORM),
                *("--generate-hashes", "--only-binary", ":all:", "--custom-compile-command", "make lock"),
                *("--output-file", str(FOLDER / f"{name}.txt"), *arguments),
            ],
            check=True,
            timeout=STEP_TIMEOUT_S,
            cwd=folder,
        )


def find_licences(name: str, arguments: Sequence[str]) -> dict[str, str]:
    """Lets pip read the metadata of a lock's packages. Raises CalledProcessError; pip has printed the reason."""
    result = subprocess.run(
        [
            # A pip that reads current metadata, whatever the environment's own is.
            *(sys.executable, "-m", "uv", "run", "--isolated", "--no-project", "--no-config", "--quiet"),
            *("--python", sys.executable, "--with", "pip>=26", "python", "-m", "pip", "install", "--quiet"),
            *("--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--require-hashes"),
            *("--report", "-", *arguments, "--requirement", str(FOLDER / f"{name}.txt")),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=STEP_TIMEOUT_S,
    )
    metadata = [entry["metadata"] for entry in json.loads(result.stdout)["install"]]
    return {canonicalize_name(each["name"]): licence_of(each) for each in metadata}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make lock", description="Writes the images' lock files.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument(
        "--cpu-wheels",
        metavar="FOLDER",
        type=lambda text: Path(text).resolve(),
        help="index of torch's CPU build; default: PyTorch's own",
    )
    given = parser.parse_args(arguments)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    licences: dict[str, str] = {}
    try:
        for name, role in ROLES.items():
            chosen = ["--upgrade"] if given.upgrade else []
            wheels: list[str] = []
            if name == "worker-cpu":
                wheels = ["--find-links", str(given.cpu_wheels)] if given.cpu_wheels else []
                chosen += wheels or ["--torch-backend", "cpu"]
                wheels = wheels or ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
            compile_lock(name, requirements_of(role, pyproject), chosen)
            licences |= find_licences(name, wheels)
            print(f"{name}: {len(read_lock(name))} packages")
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"make lock: {name}: {error}", file=sys.stderr)
        return 1
    LICENCES.write_text(json.dumps(licences, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
