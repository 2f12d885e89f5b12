"""The images' stages are built and run, without an engine (`stages.py`): what they carry, and that they serve.

Packages are installed anew into empty environments, from where this machine's pip takes them: a minute an image.
"""

from __future__ import annotations

import importlib.metadata
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.local.free_ports import free_ports
from tests.images.stages import Image, build, can_build

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "k8s" / "images"
MODELS = {ROOT / "demo": "/models"}
START_S = 90.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_build(), reason="building stages needs root, mounts and unshare"),
]


@contextmanager
def built(name: str, folder: Path) -> Iterator[Image]:
    """Gone afterwards: a gigabyte is too much for pytest to keep three of."""
    try:
        yield build(IMAGES / f"{name}.Dockerfile", ROOT, folder, {"VARIANT": "cpu"})
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with built("worker", tmp_path_factory.mktemp("worker")) as image:
        yield image


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with built("coordinator", tmp_path_factory.mktemp("coordinator")) as image:
        yield image


def run(image: Image, words: Sequence[str], *, has_entrypoint: bool = True) -> str:
    """The standard output of a command in the image. Raises AssertionError if the command fails."""
    command = image.command(words, volumes=MODELS, has_entrypoint=has_entrypoint)
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


def evaluated(image: Image, code: str) -> str:
    return run(image, ["python", "-c", code], has_entrypoint=False).strip()


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills the process, which is unshare, and all its descendants afterwards."""
    try:
        yield
    finally:
        family = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(timeout=30)
        deadline = time.monotonic() + 10
        while (left := [each for each in family if is_alive(each)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for each in left:
            each.kill()
        assert not left, f"outlived the test: {left}"


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(image: Image, words: Sequence[str], log: Path) -> Iterator[Mapping[str, Any]]:
    """A process of the image, once it has printed that it is ready: what it said then."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            image.command(words, volumes=MODELS), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    lines: queue.Queue[str] = queue.Queue(maxsize=1000)
    assert process.stdout is not None
    reader = threading.Thread(target=_hand_over, args=(process.stdout, lines))
    reader.start()
    with ended(process):
        deadline = time.monotonic() + START_S
        while True:
            try:
                said = json.loads(lines.get(timeout=0.2))
            except queue.Empty:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                continue
            if said.get("event") == "ready":
                break
        yield said
    reader.join(timeout=10)


def _hand_over(out: IO[str], lines: queue.Queue[str]) -> None:
    with out:
        for line in out:
            lines.put(line)


def importable(image: Image, *names: str) -> set[str]:
    code = "import importlib.util, sys; print(*[each for each in sys.argv[1:] if importlib.util.find_spec(each)])"
    return set(run(image, ["python", "-c", code, *names], has_entrypoint=False).split())


@pytest.fixture(scope="module")
def for_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("vllm")
    yield build(IMAGES / "vllm.Dockerfile", ROOT, folder, target="files")
    shutil.rmtree(folder)


def test_what_is_copied_beside_vllm_is_all_that_hints_need_beside_its_packages(for_vllm: Image, tmp_path: Path) -> None:
    """This environment has vLLM's packages and more, and on PYTHONPATH what a container has copied from the image."""
    run(for_vllm, ["cp", "-R", "/outrider/.", "/tmp"], has_entrypoint=False)
    shutil.copytree(for_vllm.root.folder / "outrider", tmp_path, dirs_exist_ok=True, symlinks=True)
    assert {path.name for path in tmp_path.iterdir()} == {*("outrider", "protos", "grpc_status"), *(
        path.name for name in ("grpcio_status", "outrider") for path in tmp_path.glob(f"{name}-*.dist-info")
    )}  # fmt: skip
    made = importlib.metadata.distributions(name="outrider", path=[str(tmp_path)])
    (points,) = [each.entry_points.select(group="vllm.general_plugins") for each in made]
    assert [point.value for point in points] == ["outrider.engines.vllm.plugin:register"]
    assert not list(tmp_path.rglob("*.so")), "it does not depend on the version of Python"
    code = """
import sys
import grpc_status, outrider, protos, outrider.engines.hint_server.__main__, outrider.engines.vllm.no_drafts
print(*{module.__file__.rsplit("/", 2)[0] for module in (grpc_status, outrider)})
print("torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert result.stdout.split() == [str(tmp_path), "False"], result.stderr


@pytest.mark.parametrize("role", ["target_worker", "draft_worker"])
def test_the_worker_image_is_both_workers(worker: Image, role: str) -> None:
    assert f"usage: {role}" in run(worker, [role, "--help"])


def test_the_coordinator_image_is_the_coordinator(coordinator: Image) -> None:
    assert "usage: python -m coordinator" in run(coordinator, ["coordinator", "--help"])


def test_torchrun_and_ray_start_where_manifests_look_for_them(worker: Image, coordinator: Image) -> None:
    assert "nproc-per-node" in run(worker, ["torchrun", "--help"], has_entrypoint=False)
    assert "--head" in run(coordinator, ["ray", "start", "--help"], has_entrypoint=False)


def test_the_coordinator_image_has_what_manifests_and_the_guide_call(coordinator: Image) -> None:
    assert "--draft-model" in run(coordinator, ["command_line", "canary", "start", "--help"])
    script = (ROOT / "k8s" / "helm" / "outrider" / "files" / "haproxy.sh").read_text(encoding="utf-8")
    named = [word for word in script.split() if word.startswith(("/app/", "/venv/"))]
    assert len(named) == 2
    for path in named:
        assert evaluated(coordinator, f"import os; print(os.path.isfile({path!r}))") == "True"
    assert "HAProxy version" in run(coordinator, [named[1], "-v"], has_entrypoint=False)


def test_workers_carry_no_ray_and_coordinators_no_torch(worker: Image, coordinator: Image) -> None:
    assert importable(worker, "torch", "ray", "fastapi", "coordinator", "pip") == {"torch"}
    found = importable(coordinator, "ray", "torch", "transformers", "target_worker", "pip")
    assert found == {"ray", "transformers"}


@pytest.mark.parametrize("name", ["worker", "coordinator"])
def test_images_have_no_compiler(request: pytest.FixtureRequest, name: str) -> None:
    image: Image = request.getfixturevalue(name)
    for compiler in ("cc", "gcc", "g++", "c++", "clang", "ld"):
        found = subprocess.run(
            image.command([compiler, "--version"], has_entrypoint=False), capture_output=True, check=False
        )
        assert found.returncode in (126, 127), compiler


@pytest.mark.parametrize("name", ["worker", "coordinator"])
def test_images_run_as_nobody_in_particular_and_write_to_tmp_alone(request: pytest.FixtureRequest, name: str) -> None:
    image: Image = request.getfixturevalue(name)
    assert image.user == "10001:10001"
    assert (
        evaluated(image, "import os, getpass; print(os.getuid(), os.getgid(), getpass.getuser())")
        == "10001 10001 outrider"
    )
    attempt = "import pathlib, sys; pathlib.Path(sys.argv[1], 'file').write_text('x'); print('written')"
    assert run(image, ["python", "-c", attempt, "/tmp"], has_entrypoint=False) == "written\n"
    for folder in ("/", "/app", "/venv/lib", "/etc"):
        with pytest.raises(AssertionError, match=r"Read-only file system|Permission denied"):
            run(image, ["python", "-c", attempt, folder], has_entrypoint=False)


def test_the_compiled_kernels_load_in_the_worker_image(worker: Image) -> None:
    script = "from outrider.engine.compiled.kernels import available; print(available())"
    assert evaluated(worker, script) == "True"


def test_a_worker_is_ready_by_the_probes_of_the_manifests(worker: Image, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ["target_worker", "--model=/models/draft", f"--port={port}"]
    with running(worker, words, tmp_path / "log"), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_ray_node_of_the_coordinator_image_answers_its_probe(coordinator: Image, tmp_path: Path) -> None:
    ports = dict(zip(("port", "dashboard-port", "metrics-export-port", "agent"), free_ports(4), strict=True))
    flags = " ".join(f"--{name.replace('agent', 'dashboard-agent-listen-port')}={port}" for name, port in ports.items())
    # As KubeRay starts a head.
    start = f"ray start --head --block --num-cpus=0 --object-store-memory=100000000 {flags}"
    with (tmp_path / "log").open("w") as log:
        command = coordinator.command(["/bin/bash", "-c", "--", start], has_entrypoint=False)
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with ended(process):
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            try:
                if httpx.get(f"http://127.0.0.1:{ports['agent']}/api/healthz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)


def test_images_serve_together(worker: Image, coordinator: Image, redis_url: str, tmp_path: Path) -> None:
    target_port, draft_port, http_port, grpc_port = free_ports(4)
    redis = f"--redis-url={redis_url}"
    target = ["target_worker", "--model=/models/target", f"--port={target_port}", redis]
    draft = ["draft_worker", "--model=/models/draft", f"--port={draft_port}", redis]
    front = ["coordinator", "--tokenizer=/models/target", f"--port={http_port}", f"--grpc-port={grpc_port}"]
    with (
        running(worker, target, tmp_path / "target"),
        running(worker, draft, tmp_path / "draft"),
        running(coordinator, [*front, redis], tmp_path / "coordinator") as ready,
    ):
        assert httpx.get(f"{ready['http']}/-/healthz", timeout=30).status_code == 200  # what probes ask
        body = {"model": "target", "prompt": "def read_file(path):\n", "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{ready['http']}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 24
