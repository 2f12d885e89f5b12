"""HAProxy, with its file of `k8s/load_balancers`, where no coordinator is ready: all are asked, and errors are theirs.

The coordinators are stand-ins: what they are asked is what the test is about.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from outrider.local.free_ports import free_ports
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.certificates import Authority
from tests.e2e.load_balancers import Backend, HAProxy
from tests.e2e.system import eventually

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(HAProxy.program() is None, reason=f"no HAProxy here: {HAProxy.how_to_get}"),
]


@dataclass
class Unready(generation_pb2_grpc.GenerationServicer):
    """A coordinator without a target: it says so at /health, and answers all the same."""

    num_health_checks: int = 0
    num_asked: int = 0

    def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        self.num_asked += 1
        return generation_pb2.ListModelsResponse()

    @contextmanager
    def serving(self) -> Iterator[Backend]:
        coordinator = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                is_check = self.path == "/health"
                if is_check:
                    coordinator.num_health_checks += 1
                else:
                    coordinator.num_asked += 1
                self.send_response(503 if is_check else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """HAProxy resets the connections of its checks."""

        http_server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        grpc_server = grpc.server(ThreadPoolExecutor(2))
        generation_pb2_grpc.add_GenerationServicer_to_server(self, grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        grpc_server.start()
        try:
            yield Backend(http_server.server_port, port)
        finally:
            grpc_server.stop(grace=None)
            http_server.shutdown()
            http_server.server_close()
            thread.join()


@contextmanager
def taken_ports(num: int) -> Iterator[list[int]]:
    """Ports that nobody else gets meanwhile, where connections are refused."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in taken]


@contextmanager
def balanced(folder: Path, *backends: Backend) -> Iterator[HAProxy]:
    authority = Authority(folder)
    haproxy = HAProxy(folder, free_ports(1)[0], backends, authority)
    haproxy.start()
    try:
        yield haproxy
    finally:
        haproxy.stop()


def models_over_grpc(haproxy: HAProxy) -> grpc.RpcError | None:
    """The error that a call for the list of models ended with; None if it was answered."""
    credentials = grpc.ssl_channel_credentials(haproxy.authority.path.read_bytes())
    with grpc.secure_channel(haproxy.address, credentials) as channel:
        try:
            generation_pb2_grpc.GenerationStub(channel).ListModels(generation_pb2.ListModelsRequest(), timeout=20)
        except grpc.RpcError as error:
            return error
    return None


def models_over_http(haproxy: HAProxy) -> httpx.Response:
    with httpx.Client(verify=haproxy.trusted(), trust_env=False, timeout=20) as client:
        return client.get(f"{haproxy.url}/v1/models")


def is_down(haproxy: HAProxy) -> bool:
    servers = (f"{backend}/coordinator-{index}" for backend in ("http", "grpc") for index in range(2))
    return all(f"Server {server} is DOWN" in haproxy.log for server in servers)


def test_coordinators_that_are_not_ready_are_asked_when_no_other_is(tmp_path: Path) -> None:
    """Coordinators that are not ready know what is missing. Found: HAProxy refused all requests at once while targets
    started again."""
    one, other = Unready(), Unready()
    with one.serving() as first, other.serving() as second, balanced(tmp_path, first, second) as haproxy:
        eventually(partial(is_down, haproxy), bool, "both are known not to be ready", 30.0)
        for _ in range(4):
            assert models_over_http(haproxy).status_code == 200, haproxy.log
            assert models_over_grpc(haproxy) is None, haproxy.log
    assert min(one.num_health_checks, other.num_health_checks) > 0
    assert one.num_asked + other.num_asked == 8


def test_an_error_of_its_own_is_in_the_words_of_who_asks(tmp_path: Path) -> None:
    """Found: a gRPC client got JSON for an answer, and knew no more than UNKNOWN, "Stream removed"."""
    with taken_ports(4) as ports, balanced(tmp_path, Backend(*ports[:2]), Backend(*ports[2:])) as haproxy:
        eventually(partial(is_down, haproxy), bool, "nobody is there", 30.0)
        answer = models_over_http(haproxy)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("no coordinator is ready")
        error: Any = models_over_grpc(haproxy)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        assert error.details().startswith("no coordinator is ready"), error
