"""The command of the LeaderWorkerSet, run: two torchrun agents, as on two nodes, become one worker and end as one."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch.distributed.run import config_from_args, parse_args

from outrider.local.free_ports import free_ports
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.k8s.test_manifests import rendered

ROOT = Path(__file__).parents[2]
START_S = 90.0
END_S = 30.0  # well below the shutdown timeout: nobody waits for it in vain


def commands(
    port: int, metrics_port: int, health_port: int, rendezvous_port: int, certificates: Path
) -> list[list[str]]:
    """The command lines of the leader and its follower, with this machine as both nodes."""
    document = next(each for each in rendered("llama-405b") if each["kind"] == "LeaderWorkerSet")
    (container,) = document["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    whole: list[str] = [*container["command"], *container["args"]]
    assert whole[0] == "torchrun"
    here = {
        "--nproc-per-node": "1",
        "--device": "cpu",
        "--master-port": str(rendezvous_port),
        "--model": str(ROOT / "demo" / "target"),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--metrics-port": str(metrics_port),
        "--health-port": str(health_port),
        "--tls-dir": str(certificates),
    }
    # There is no Redis here: nobody hears of the worker.
    names = {word: word.partition("=")[0] for word in whole[1:] if not word.startswith("--redis-url-file=")}
    words = [f"{name}={here[name]}" if name in here else word for word, name in names.items()]
    values = {each["name"]: each.get("value", "x") for each in container["env"]}
    values |= {
        "LWS_GROUP_SIZE": str(document["spec"]["leaderWorkerTemplate"]["size"]),
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "POD_IP": "127.0.0.1",
    }
    agents = []
    for index in ("0", "1"):
        known = values | {"LWS_WORKER_INDEX": index}
        expanded = [expand(word, known) for word in words]
        agents.append([sys.executable, "-m", "torch.distributed.run", *expanded])
    return agents


def expand(word: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does with $(NAME). Raises KeyError for what nobody sets."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)


def is_serving(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_nodes_of_a_group_may_come_hours_apart(tmp_path: Path) -> None:
    command, _ = commands(1, 2, 3, 4, tmp_path)
    given = config_from_args(parse_args(command[3:]))[0]
    assert given.rdzv_configs["timeout"] == "14400"


@pytest.mark.slow
def test_two_nodes_become_one_worker_and_end_together(tmp_path: Path) -> None:
    port, metrics_port, health_port, rendezvous_port = free_ports(4)
    CertificateAuthority.make().issue(tmp_path / "tls", Role.TARGET, valid_for=datetime.timedelta(days=1))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    agents: list[subprocess.Popen[bytes]] = []
    logs = [tmp_path / "leader", tmp_path / "follower"]
    try:
        for command, log in zip(
            commands(port, metrics_port, health_port, rendezvous_port, tmp_path / "tls"), logs, strict=True
        ):
            with log.open("wb") as file:
                agents.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        deadline = time.monotonic() + START_S
        while not is_serving(health_port):
            said = "\n".join(log.read_text()[-2000:] for log in logs)
            assert all(agent.poll() is None for agent in agents), said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        for agent in agents:  # as the cluster ends a group: every pod at once
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait(timeout=END_S)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(timeout=10)
