"""Images of this repository without a container engine: what their Dockerfiles say, with folders of this machine.

Packages come from this process's own virtual environment, so an image has more of them here than its lock file lists.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from command_line.checkout import ROOT
from tests.images.dockerfile import Stage, lineage, parse

DOCKERFILES: Final = {
    "outrider-worker": ROOT / "k8s/images/worker.Dockerfile",
    "outrider-coordinator": ROOT / "k8s/images/coordinator.Dockerfile",
}
"""Dockerfiles by the name of the repository in an image's reference."""
VIRTUAL_ENVIRONMENT: Final = Path(sys.prefix)
VENV: Final = "/venv"
"""Its path in the images."""


@dataclass(frozen=True, slots=True)
class Image:
    """Everything that a container gets from its image."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    workdir: str
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Path in the image to the folder of this machine that stands there."""


# The entrypoint of Redis' own image starts the server where the first argument is a file of settings.
REDIS: Final = Image(("redis-server",), {"PATH": "/usr/local/bin:/usr/bin:/bin"}, "/data")


def image_of(reference: str) -> Image:
    """The image of a reference such as registry.example.com/outrider/outrider-worker:0.1.0-demo.

    Raises ValueError for one that is not known here.
    """
    repository, _, tag = reference.partition("@")[0].rpartition("/")[2].partition(":")
    if repository == "redis":
        return REDIS
    if repository not in DOCKERFILES:
        raise ValueError(f"the image {reference} is not known here; known: redis, {', '.join(DOCKERFILES)}")
    models = "demo" if tag.endswith("-demo") else "none"
    return image_from(DOCKERFILES[repository].read_text(encoding="utf-8"), models)


def write_programs(folder: Path) -> None:
    """Writes the scripts of the packages as an image has them, which names its own Python in their first lines.

    Programs that are no scripts stay out: no image of ours runs one from there.
    """
    folder.mkdir()
    for path in (VIRTUAL_ENVIRONMENT / "bin").iterdir():
        if path.is_symlink():
            (folder / path.name).symlink_to(path.readlink())
            continue
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if is_script:
            script = path.read_bytes().replace(f"#!{VIRTUAL_ENVIRONMENT}/bin/".encode(), f"#!{VENV}/bin/".encode(), 1)
            (folder / path.name).write_bytes(script)
            (folder / path.name).chmod(0o755)


def image_from(dockerfile: str, models: str) -> Image:
    """The image that a Dockerfile of ours makes, with these models."""
    stages = parse(dockerfile, {"MODELS": models})
    by_name = {stage.name: stage for stage in stages}
    last = stages[-1]
    above = lineage(stages, last)
    folders: dict[str, Path] = {}
    for copy in (each for stage in above for each in stage.of("COPY")):
        source, place = copy.words
        origin = by_name[copy.flags["from"]]
        if source == VENV:
            folders[place] = VIRTUAL_ENVIRONMENT
        elif source == "/app":
            folders |= {f"{place}/{name}": ROOT / name for name in _packages(lineage(stages, origin))}
        else:
            folders |= {to: ROOT / path for path, to in _copies(lineage(stages, origin)) if to.startswith(source)}
    environment = {name: value for stage in above for name, value in stage.environment.items()}
    return Image(tuple(last.of("ENTRYPOINT")[-1].words), environment, last.of("WORKDIR")[-1].value, folders)


def _packages(stages: list[Stage]) -> list[str]:
    """The Python packages that stages copy from the repository."""
    return [path for path, _ in _copies(stages) if (ROOT / path / "__init__.py").is_file()]


def _copies(stages: list[Stage]) -> list[tuple[str, str]]:
    """Paths that stages copy from the repository, each with its destination."""
    copies = [each for stage in stages for each in stage.of("COPY") if "from" not in each.flags]
    return [(source, each.words[-1]) for each in copies for source in each.words[:-1]]
