"""The Dockerfiles: pinned by digest, nobody's root, nothing to build with in what is shipped."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from k8s.images.locks import parse_lock
from outrider.engines.vllm.contract import TESTED_VERSIONS
from tests.images.dockerfile import Stage, lineage, parse
from tests.images.stages import is_in_context

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "k8s" / "images"
VLLM = IMAGES / "vllm.Dockerfile"  # extends an image of others
DOCKERFILES = sorted(set(IMAGES.glob("*.Dockerfile")) - {VLLM})
HADOLINT = Path(sys.executable).parent / "hadolint"
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def mistakes(stages: list[Stage]) -> Iterator[str]:
    """Sentences about the mistakes in a Dockerfile."""
    names = {stage.name for stage in stages}
    for stage in stages:
        if stage.base not in names and not DIGEST.search(stage.base):
            yield f"FROM {stage.base} may be another one tomorrow"
        for step in stage.of("COPY"):
            sources = [] if "from" in step.flags else step.words[:-1]
            for source in sources:
                if not (ROOT / source).exists() or not is_in_context(source, ignored()):
                    yield f"{source} is not there to be copied"
        for step in stage.of("RUN"):
            for command in step.value.split("&&"):
                is_install = re.search(r"\bpip\b.*\binstall\b", command)
                if is_install and not {"--require-hashes", "--only-binary"} <= set(command.split()):
                    yield f"takes packages without hashes, or builds them: {command.strip()}"
                if re.search(r"\b(apt|apt-get|curl|wget)\b", command):
                    yield f"fetches what nothing pins: {command.strip()}"
            if stage.name == "" and "pip" in step.value:
                yield "installs in the last stage"
        if stage.of("ADD"):
            yield "ADD may fetch"
    last = stages[-1]
    if "slim" not in lineage(stages, last)[0].base:
        yield f"ships {lineage(stages, last)[0].base}, with its compilers"
    if [step.value for step in last.of("USER")] != ["10001:10001"] or last.of("RUN")[1:]:
        yield "does not end as 10001:10001"
    if last.environment.get("HOME") != "/tmp":
        yield "has a home that cannot be written"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_pinned_and_ships_nothing_to_build_with(path: Path) -> None:
    assert list(mistakes(parse(path.read_text(encoding="utf-8"), {"VARIANT": "cuda"}))) == []


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        (r"(slim-bookworm)@sha256:\w+", r"\1"),
        (r"--require-hashes", ""),
        (r"--only-binary :all:", ""),
        (r"USER 10001:10001", "USER root"),
        (r"USER 10001:10001\n", ""),
        (r"HOME=/tmp", "HOME=/root"),
        (r"FROM base\nRUN", "FROM base\nRUN apt-get install gcc &&"),
        (r"FROM base\nRUN", "FROM base\nRUN pip install ray &&"),
        (r"COPY outrider", "COPY outriders"),
        (r"COPY outrider", "COPY tests"),
        (r"3\.11-slim-bookworm", "3.11-bookworm"),
    ],
)
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_mistake_is_found(path: Path, written: str, instead: str) -> None:
    text, count = re.subn(written, instead, path.read_text(encoding="utf-8"))
    assert count
    assert list(mistakes(parse(text, {"VARIANT": "cpu"})))


@pytest.mark.skipif(not HADOLINT.exists() and shutil.which("hadolint") is None, reason="hadolint is not here")
def test_hadolint_has_nothing_to_say() -> None:
    program = str(HADOLINT) if HADOLINT.exists() else "hadolint"
    result = subprocess.run(
        [program, *map(str, [*DOCKERFILES, VLLM])], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "")


def stages_for_vllm() -> list[Stage]:
    return parse(VLLM.read_text(encoding="utf-8"))


def test_what_is_copied_into_vllms_image_is_pinned_and_pure_python() -> None:
    *files, extended = stages_for_vllm()
    assert list(mistakes(files)) == []
    assert files[-1].name == "files"
    (copied,) = extended.of("COPY")
    assert (copied.flags, copied.words) == ({"from": "packages"}, ["/outrider", "/opt/outrider"])
    assert extended.environment == {"PYTHONPATH": copied.words[1]}
    assert {step.keyword for step in extended.instructions} == {"COPY", "ENV"}, "all else stays as vLLM made it"


def test_the_image_of_vllm_is_of_a_release_that_was_tested() -> None:
    name, _, version = stages_for_vllm()[-1].base.partition(":v")
    assert name == "vllm/vllm-openai"
    assert version.rpartition(".")[0] in TESTED_VERSIONS


def test_the_package_for_vllm_is_the_one_of_its_extra(tmp_path: Path) -> None:
    """The command takes one pin from the workers' lock."""
    (packages,) = [stage for stage in stages_for_vllm() if stage.name == "packages"]
    command, _ = packages.of("RUN")
    shutil.copy(IMAGES / "locks" / "worker-cpu.txt", tmp_path)
    script = command.value.partition("&&")[0].replace("/locks/", f"{tmp_path}/")
    subprocess.run(["sh", "-c", script], check=True, timeout=30)
    (pin,) = parse_lock((tmp_path / "vllm.txt").read_text(encoding="utf-8"))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [pin.name] == [Requirement(each).name for each in extra["vllm"]]
    assert Requirement(extra["vllm"][0]).specifier.contains(pin.version)
    assert pin.hashes


def test_the_variants_differ_in_their_lock_alone() -> None:
    text = (ROOT / "k8s/images/worker.Dockerfile").read_text(encoding="utf-8")
    cpu, cuda = (parse(text, {"VARIANT": variant})[-1] for variant in ("cpu", "cuda"))
    assert cpu == cuda
    (packages,) = [stage for stage in parse(text, {"VARIANT": "cuda"}) if stage.name == "packages"]
    copied = [step.value for step in packages.of("COPY")]
    assert copied == ["k8s/images/locks/worker-cuda.txt /locks/worker.txt"]


@pytest.mark.parametrize(("models", "wanted"), [("none", set()), ("demo", {"/models/target", "/models/draft"})])
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_models_of_the_demo_where_that_is_asked_for(path: Path, models: str, wanted: set[str]) -> None:
    stages = parse(path.read_text(encoding="utf-8"), {"VARIANT": "cpu", "MODELS": models})
    (chosen,) = lineage(stages, next(stage for stage in stages if stage.name == "models"))[-2:-1]
    assert {step.words[1] for step in chosen.of("COPY")} == wanted
    assert "/models /models" in [step.value for step in stages[-1].of("COPY") if step.flags == {"from": "models"}]


def test_the_entry_point_is_what_manifests_give_arguments_to() -> None:
    for path in DOCKERFILES:
        (entrypoint,) = parse(path.read_text(encoding="utf-8"), {"VARIANT": "cpu"})[-1].of("ENTRYPOINT")
        assert entrypoint.words == ["python", "-m"]


def test_the_registry_is_one_image_in_compose_and_in_manifests() -> None:
    compose = yaml.safe_load((ROOT / "k8s/images/compose.yaml").read_text(encoding="utf-8"))
    named = compose["services"]["redis"]["image"]
    assert (
        yaml.safe_load((ROOT / "k8s/helm/outrider/values.yaml").read_text(encoding="utf-8"))["images"]["redis"] == named
    )


@pytest.mark.parametrize(
    ("name", "is_in"),
    [
        ("outrider/engine/compiled/kernels.cpp", True),
        ("k8s/images/locks/worker-cpu.txt", True),
        ("outrider/engine/compiled/_kernels.cpython-311-x86_64-linux-gnu.so", False),
        ("outrider/__pycache__/errors.cpython-311.pyc", False),
        ("k8s/images/secrets/redis-url", False),
        (".git/config", False),
        ("tests/models.py", False),
    ],
)
def test_the_context_holds_what_images_are_made_of(name: str, is_in: bool) -> None:
    assert is_in_context(name, ignored()) is is_in
