"""The metrics port: what it serves, to whom, and that nobody can keep it busy."""

from __future__ import annotations

import datetime
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from outrider.observability import metrics_server
from outrider.observability.metrics_server import serve_metrics
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, TlsFiles
from tests.ipv6 import needs_ipv6

DAY = datetime.timedelta(days=1)


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("outrider_things", "Things", registry=made).inc(3)
    return made


def test_metrics_are_served_in_the_clear_where_there_are_no_certificates(registry: CollectorRegistry) -> None:
    port = serve_metrics(registry, "127.0.0.1", 0)
    assert "outrider_things_total 3.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_metrics_are_served_on_ipv6(registry: CollectorRegistry, host: str) -> None:
    port = serve_metrics(registry, host, 0)
    assert "outrider_things_total 3.0" in httpx.get(f"http://[::1]:{port}/metrics").text
    if host == "::":
        assert "outrider_things_total 3.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_with_certificates_metrics_are_for_those_who_have_one(registry: CollectorRegistry, tmp_path: Path) -> None:
    authority = CertificateAuthority.make()
    for role in (Role.TARGET, Role.OPERATOR):
        authority.issue(tmp_path / role.name, role, names=("127.0.0.1",), valid_for=DAY)
    port = serve_metrics(registry, "127.0.0.1", 0, TlsFiles(tmp_path / "TARGET"))
    url = f"https://127.0.0.1:{port}/metrics"
    context = ssl.create_default_context(cafile=str(tmp_path / "TARGET" / "ca.crt"))
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=context)
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"))
    context.load_cert_chain(tmp_path / "OPERATOR" / "tls.crt", tmp_path / "OPERATOR" / "tls.key")
    assert "outrider_things_total 3.0" in httpx.get(url, verify=context).text


@pytest.mark.thorough
def test_clients_that_say_nothing_keep_nobody_waiting_for_long(
    registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_TIMEOUT_S", 0.3)
    CertificateAuthority.make().issue(tmp_path, Role.TARGET, names=("127.0.0.1",), valid_for=DAY)
    port = serve_metrics(registry, "127.0.0.1", 0, TlsFiles(tmp_path))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        transport = httpx.HTTPTransport(verify=context, retries=0)
        with httpx.Client(transport=transport, timeout=10) as client:
            for attempt in range(100):  # the room is full until their time is up
                try:
                    assert client.get(f"https://127.0.0.1:{port}/metrics").status_code == 200
                    break
                except httpx.TransportError:
                    assert attempt < 99, "never let in"
                    time.sleep(0.1)
    finally:
        for each in silent:
            each.close()


def test_a_lack_of_memory_passes(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than there are threads, first where connections are taken, then where they are answered."""
    accept, answer = WSGIServer.get_request, WSGIServer.finish_request
    in_accepting, in_answering = iter(range(40)), iter(range(40))

    def get_request(self: WSGIServer) -> object:
        if next(in_accepting, None) is not None:
            raise MemoryError
        return accept(self)

    def finish_request(self: WSGIServer, request: Any, client_address: Any) -> None:
        if next(in_answering, None) is not None:
            raise MemoryError
        answer(self, request, client_address)

    monkeypatch.setattr(metrics_server, "_PAUSE_S", 0.01)
    monkeypatch.setattr(WSGIServer, "get_request", get_request)
    monkeypatch.setattr(WSGIServer, "finish_request", finish_request)
    port = serve_metrics(registry, "127.0.0.1", 0)
    for _ in range(40):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/metrics")
    assert "outrider_things_total 3.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
