"""The lock files say what pyproject.toml says, exactly and of nobody's machine; roles carry what they import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k8s.images.locks import (
    FOLDER,
    LICENCES,
    ROLES,
    dependencies,
    licence_of,
    parse_lock,
    read_lock,
    requirements_of,
)

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OURS = {"outrider", "protos", "coordinator", "draft_worker", "target_worker", "command_line"}
ENTRIES = {
    "coordinator": [
        *("coordinator.__main__", "coordinator.hosting.app"),
        *(f"coordinator.api.grpc.grpc_{name}" for name in ("ingress", "health", "reflection")),
        "command_line.canary.command",  # where the registry can be reached from
        "command_line.fetch.command",  # in an init container or a job
    ],
    "worker": ["target_worker.__main__", "draft_worker.__main__"],
}
IMPORTED_AS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "huggingface_hub": "huggingface-hub",
    "jwt": "pyjwt",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "starlette": "fastapi",
}
_EXPORTER = "opentelemetry-exporter-otlp-proto-grpc"  # imported under the SDK's name
NEEDED_UNSEEN = {
    "coordinator": {
        "httptools",  # by uvicorn
        "httpx",
        "obstore",  # imported by name, where files are in S3
        "python-multipart",  # by Starlette
        _EXPORTER,
    },  # httpx: of the other commands, which `command_line` imports, too
    "worker": {"accelerate", _EXPORTER},
}
"""Packages needed by a role that its modules do not import: others import them if present; pyproject.toml says why."""

STATES_NO_LICENCE = {"cuda-toolkit"}  # a package of nothing but dependencies, by NVIDIA


@pytest.mark.parametrize("name", ROLES)
def test_a_lock_answers_to_pyproject(name: str) -> None:
    wanted = {
        canonicalize_name(requirement.name): requirement
        for requirement in map(Requirement, requirements_of(ROLES[name], PYPROJECT))
    }
    pins = {pin.name: pin for pin in read_lock(name)}
    assert {pin.name for pin in pins.values() if pin.is_direct} == set(wanted), "run `make lock`"
    outside = [
        f"{key}: {pins[key].version} is not {requirement.specifier}"
        for key, requirement in wanted.items()
        if not requirement.specifier.contains(pins[key].version, prereleases=True)
    ]
    assert not outside, "run `make lock`"


@pytest.mark.parametrize("name", ROLES)
def test_a_lock_names_no_index_no_url_and_no_file(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search(r"://|^-|\s@\s|\.whl|--(?!hash=sha256:)", text, re.MULTILINE)
    assert all(pin.hashes for pin in read_lock(name))


def test_locks_agree_in_the_versions_of_what_they_share() -> None:
    found: dict[str, set[str]] = {}
    for name in ROLES:
        for pin in read_lock(name):
            found.setdefault(pin.name, set()).add(pin.version.partition("+")[0])
    assert not {name: versions for name, versions in found.items() if len(versions) > 1}


def test_workers_carry_no_ray_coordinators_no_torch_and_only_cuda_brings_cuda() -> None:
    carried = {name: {pin.name for pin in read_lock(name)} for name in ROLES}
    assert not {"torch", "triton"} & carried["coordinator"]
    for variant in ("worker-cpu", "worker-cuda"):
        assert not {"ray", "fastapi", "uvicorn"} & carried[variant]
    assert not [name for name in carried["worker-cpu"] if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert {"nvidia-cublas", "nvidia-nccl-cu13", "triton"} <= carried["worker-cuda"]
    versions = {pin.name: pin.version for pin in read_lock("worker-cpu")}
    assert versions["torch"].endswith("+cpu")


def test_every_package_states_a_licence() -> None:
    stated = json.loads(LICENCES.read_text(encoding="utf-8"))
    carried = {pin.name for name in ROLES for pin in read_lock(name)}
    assert set(stated) == carried, "run `make lock`"
    assert {name for name, licence in stated.items() if not licence} == STATES_NO_LICENCE


@pytest.mark.parametrize("role", ENTRIES)
def test_a_role_carries_exactly_what_its_modules_import(role: str) -> None:
    names = PYPROJECT["tool"]["outrider"]["images"][role]
    # A target worker imports vLLM where it is told to run it, in an image of its user's own.
    used = {IMPORTED_AS.get(name, name) for name in imported_by(ENTRIES[role]) - {"vllm"}}
    assert set(names) == used | NEEDED_UNSEEN[role]
    assert names == sorted(names)


WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name, name=name)

absent = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Absent())
sys.argv[:] = ["outrider", *sys.argv[2:]]
runpy.run_module("command_line", run_name="__main__")
"""


def run_in_the_coordinators_image(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line without what that image lacks."""
    carried = {canonicalize_name(name) for name in PYPROJECT["tool"]["outrider"]["images"]["coordinator"]}
    known = {canonicalize_name(Requirement(text).name) for text in dependencies(PYPROJECT)}
    modules = {distribution: module for module, distribution in IMPORTED_AS.items()}
    absent = {modules.get(name, name) for name in known - carried}
    absent |= {"draft_worker", "target_worker", "demo", "benchmarks", "k8s"}
    assert {"torch", "grpc_status"} <= absent
    command = [sys.executable, "-c", WITHOUT, ",".join(sorted(absent)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


def test_weights_are_fetched_with_what_the_coordinators_image_holds(tmp_path: Path) -> None:
    result = run_in_the_coordinators_image("fetch", str(ROOT / "demo" / "draft"), str(tmp_path / "model"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_canaries_are_steered_with_what_the_coordinators_image_holds() -> None:
    result = run_in_the_coordinators_image("canary", "start", "--help")
    assert result.returncode == 0, result.stderr
    assert "--draft-model" in result.stdout


def imported_by(entries: list[str]) -> set[str]:
    """Third-party packages that these modules import, or ours that they import, anywhere in their code."""
    seen: set[Path] = set()
    todo, found = list(entries), set[str]()
    while todo:
        name = todo.pop()
        stem = ROOT / name.replace(".", "/")
        path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
        if path is None or path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                top = module.partition(".")[0]
                if top in OURS:
                    todo.append(module)
                elif top not in sys.stdlib_module_names:
                    found.add(top)
    return found


GOOD = f"numpy==2.4.6 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n    # via -r requirements.in\n"


def test_a_pin_is_read_with_its_hashes_and_whose_wish_it_was() -> None:
    (numpy, torch) = parse_lock(f"# said by uv\n{GOOD}torch==2.13.0+cpu --hash=sha256:{'2' * 64}\n    # via x\n")
    assert (numpy.name, numpy.version, len(numpy.hashes), numpy.is_direct) == ("numpy", "2.4.6", 2, True)
    assert (torch.version, torch.is_direct) == ("2.13.0+cpu", False)


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.4.6",
        f"numpy>=2.4.6 --hash=sha256:{'0' * 64}",
        "numpy==2.4.6 --hash=md5:00",
        f"numpy @ https://example.org/numpy.whl --hash=sha256:{'0' * 64}",
        "--index-url https://example.org/simple",
        "git+https://example.org/numpy",
        "-e .",
    ],
)
def test_a_line_that_pins_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not name==version"):
        parse_lock(f"{GOOD}{line}\n")


def test_a_role_that_names_no_dependency_of_ours_is_refused() -> None:
    spoilt = {**PYPROJECT, "tool": {"outrider": {"images": {"worker": ["numpy", "nunpy"]}}}}
    with pytest.raises(ValueError, match="nunpy"):
        requirements_of("worker", spoilt)


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"classifier": ["License :: OSI Approved :: BSD License", "Topic :: X"]}, "BSD License"),
        ({"license": "Apache 2.0\nand its text"}, "Apache 2.0"),
        ({"classifier": ["License :: OSI Approved"]}, ""),
    ],
)
def test_a_licence_is_what_metadata_say_most_exactly(metadata: dict[str, Any], licence: str) -> None:
    assert licence_of(metadata) == licence
