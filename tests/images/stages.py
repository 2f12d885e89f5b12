"""Does what a Dockerfile says without a container engine: every stage in a root of its own, by chroot and mounts.

What stands in for a base image is read-only: this machine's system folders and its Python, or the root file system in
OUTRIDER_SLIM_ROOT (`debootstrap --variant=minbase bookworm` makes one) for the slim one. Compilers and OpenMP of this
machine are hidden from stages that are built on the slim image. Everything else is as the Dockerfile makes it: an
environment with nothing but its ENV, folders with nothing but what it copied.

Where packages come from is this machine's matter: its pip's settings hold in every stage. Needs root, as mounts do.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.images.dockerfile import Instruction, Stage, lineage, parse

STEP_TIMEOUT_S = 900.0
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
CONFIGURATION = (
    *("passwd", "group", "shadow", "gshadow", "login.defs", "nsswitch.conf", "default", "skel"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
)
OF_THIS_MACHINE = ("resolv.conf", "hosts", "ssl")
HIDDEN = (
    *("gcc", "g++", "cc", "c++", "cpp", "clang", "clang++", "ld", "as", "nvcc", "wget", "curl"),
    "../lib/x86_64-linux-gnu/libgomp.so.1",
)
PYTHON = Path(os.path.realpath(sys.executable))
OWN_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def can_build() -> bool:
    """Whether this process may mount."""
    probe = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return shutil.which("unshare") is not None and not subprocess.run(probe, capture_output=True).returncode


def pip_settings() -> dict[str, str]:
    """This machine's, as environment variables."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = [line.partition("=") for line in listed.stdout.splitlines() if "=" in line]
    settings = {
        f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}": str(ast.literal_eval(value))
        for name, _, value in pairs
    }
    return settings | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def local_folders(settings: Mapping[str, str]) -> list[Path]:
    """Folders of packages and constraints that the settings name; of an index on disk the one above, for its files."""
    words = [word for value in settings.values() for word in value.split()]
    paths = [Path(word) for word in words if word.startswith("/")]
    paths += [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
    paths += [path.parent for path in paths if path.is_file()]
    return [path for path in paths if path.is_dir()]


def is_in_context(name: str, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore leaves a file in the build's context: the last pattern decides that meets it or a folder
    above it."""
    parts = name.split("/")
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    is_in = True
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        if bare.startswith("**/"):
            meets = any(fnmatch.fnmatchcase(part, bare[3:]) for part in parts)
        else:
            meets = any(path.count("/") == bare.count("/") and fnmatch.fnmatchcase(path, bare) for path in above)
        if meets:
            is_in = pattern.startswith("!")
    return is_in


def copy_context(source: Path, destination: Path) -> None:
    lines = (source / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for top in sorted(source.iterdir()):
        if top.name in (".git", ".venv", "build"):  # large, and out of every context
            continue
        files = [top] if top.is_file() else [path for path in top.rglob("*") if path.is_file()]
        for path in files:
            name = path.relative_to(source)
            if is_in_context(name.as_posix(), patterns):
                (destination / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, destination / name)


@dataclass(frozen=True, slots=True)
class Root:
    """A stage's own root: a folder for what it made, over a base that it cannot change."""

    folder: Path
    base: Path
    is_slim: bool
    settings: Mapping[str, str]  # of this machine's pip, and build arguments: while it is built alone
    environment: dict[str, str]

    def prepare(self) -> None:
        for name in SYSTEM:
            original = self.base / name
            if original.is_symlink():
                (self.folder / name).symlink_to(os.readlink(original))
            elif original.is_dir():
                (self.folder / name).mkdir(parents=True)
        for name in ("proc", "dev", "tmp", "etc", "shims"):
            (self.folder / name).mkdir()
        for origin, names in ((self.base, CONFIGURATION), (Path("/"), OF_THIS_MACHINE)):
            for name in names:
                path = origin / "etc" / name
                if path.is_dir():
                    shutil.copytree(path, self.folder / "etc" / name, ignore_dangling_symlinks=True)
                elif path.is_file():
                    shutil.copy2(path, self.folder / "etc" / name)
        for name, words in (("python", ""), ("python3", ""), ("pip", "-m pip")):
            shim = self.folder / "shims" / name
            shim.write_text(f'#!/bin/sh\nexec {PYTHON} {words} "$@"\n')
            shim.chmod(0o755)

    def command(
        self,
        words: Sequence[str],
        *,
        workdir: str,
        user: str = "0:0",
        is_read_only: bool = False,
        volumes: Mapping[Path, str] | None = None,
    ) -> list[str]:
        """The command line that runs `words` in this root, as the first process of a PID namespace of its own.

        volumes: mounted read-only.
        """
        root = shlex.quote(str(self.folder))
        lines = ["set -e", f"mount --bind {root} {root}"]

        def mount(source: Path | str, place: str) -> None:
            target = shlex.quote(f"{self.folder}{place}")
            make = "mkdir -p" if Path(source).is_dir() else "touch"
            lines.extend(
                [
                    f"[ -e {target} ] || {make} {target}",
                    f"mount --rbind {shlex.quote(str(source))} {target}",
                    f"mount -o remount,bind,ro {target}",
                ]
            )

        for name in SYSTEM:
            if (self.base / name).is_dir() and not (self.base / name).is_symlink():
                mount(self.base / name, f"/{name}")
        prefix = Path(sys.base_prefix)
        if not prefix.is_relative_to("/usr"):
            (self.folder / prefix.relative_to("/")).mkdir(parents=True, exist_ok=True)
        if prefix != Path("/usr"):
            mount(prefix, str(prefix))
        if not PYTHON.is_relative_to("/usr/local"):
            mount(self.folder / "shims", "/usr/local/bin")
        for folder in () if is_read_only else local_folders(self.settings):
            mount(folder, str(folder))
        for source, place in (volumes or {}).items():
            mount(source, place)
        if self.is_slim:
            for name in HIDDEN:
                if (self.base / "usr/bin" / name).exists():
                    mount("/dev/null", f"/usr/bin/{name}")
        lines += [
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
        ]
        if is_read_only:
            lines.append(f"mount -o remount,bind,ro {root}")
        wanted = {"PATH": OWN_PATH, **self.environment}
        if not is_read_only:
            wanted.update(self.settings)
        inside = ["/usr/bin/env", "-i", f"--chdir={workdir}"]
        inside += [f"{name}={value}" for name, value in wanted.items()]
        # Changing the user takes back what --kill-child asked of the kernel, so it is asked for once more: else all of
        # this outlives who started it.
        uid, gid = user.split(":")
        as_user = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig=KILL"]
        lines.append(shlex.join(["exec", "chroot", str(self.folder), *as_user, *inside, *words]))
        return [
            *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
            *("/bin/sh", "-c", "\n".join(lines)),
        ]


@dataclass(slots=True)
class Image:
    """The result of a build: the last stage's root, and how it is to be run."""

    root: Root
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)

    def command(
        self, words: Sequence[str], *, volumes: Mapping[Path, str] | None = None, has_entrypoint: bool = True
    ) -> list[str]:
        """The command line that runs the image as Kubernetes would: as its user, on a read-only root with a /tmp."""
        return self.root.command(
            [*(self.entrypoint if has_entrypoint else ()), *words],
            workdir=self.workdir,
            user=self.user,
            is_read_only=True,
            volumes=volumes,
        )


def build(
    dockerfile: Path, context: Path, folder: Path, arguments: Mapping[str, str] | None = None, target: str = ""
) -> Image:
    """Builds every stage that the last one needs, or that `target` names, below `folder`; returns it. Raises as
    `_follow`."""
    stages = parse(dockerfile.read_text(encoding="utf-8"), arguments)
    by_name = {stage.name: stage for stage in stages}
    settings = pip_settings() | dict(arguments or {})
    made: dict[str, Image] = {}
    copy_context(context, folder / "context")

    def make(stage: Stage) -> Image:
        name = stage.name or "last"
        if name in made:
            return made[name]
        if stage.base in by_name and not stage.instructions:  # another name for it
            return make(by_name[stage.base])
        origin = lineage(stages, stage)[0].base
        is_slim = "slim" in origin
        base = Path(os.environ.get("OUTRIDER_SLIM_ROOT", "/")) if is_slim else Path("/")
        image = Image(Root(folder / name, base, is_slim, settings, {}))
        image.root.folder.mkdir(parents=True)
        image.root.prepare()
        if stage.base in by_name:
            above = make(by_name[stage.base])
            image.root.environment.update(above.root.environment)
            image.workdir, image.user = above.workdir, above.user
        for instruction in stage.instructions:
            _follow(image, instruction, folder / "context", lambda other: make(by_name[other]))
        made[name] = image
        return image

    return make(by_name[target] if target else stages[-1])


def _follow(image: Image, step: Instruction, context: Path, stage_of: Callable[[str], Image]) -> None:
    """Does what one instruction says. Raises AssertionError with what a command said, ValueError for an unknown one."""
    match step.keyword:
        case "ENV":
            pairs = [word.partition("=") for word in step.words]
            image.root.environment.update({name: value for name, _, value in pairs})
        case "WORKDIR":
            image.workdir = step.value
            (image.root.folder / step.value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = step.value
        case "ENTRYPOINT":
            image.entrypoint = step.words
        case "COPY":
            origin = stage_of(step.flags["from"]).root.folder if "from" in step.flags else context
            *sources, place = step.words
            target = Path(image.workdir, place)
            for source in sources:
                _copy(origin / source.lstrip("/"), image.root.folder / target.relative_to("/"), place)
        case "RUN":
            command = image.root.command(["/bin/sh", "-c", step.value], workdir=image.workdir)
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=STEP_TIMEOUT_S)
            assert not result.returncode, f"RUN {step.value}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
        case "ARG" | "EXPOSE" | "CMD":
            pass
        case _:
            raise ValueError(f"{step.keyword} is not known here")


def _copy(source: Path, target: Path, place: str) -> None:
    """As COPY: a folder's content into a folder, a file into a folder or under a new name. Between stages by links,
    as nothing changes a file in place."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=os.link)
    else:
        target = target / source.name if place.endswith("/") else target
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
