"""Envoy's configuration from the chart's routes."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.helm.chart import render
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.cluster.gateway import program
from tests.cluster.gateway_config import backends, bootstrap, endpoints, endpoints_file

OBJECTS = render({"gateway": {"enabled": True, "className": "any"}})


def chains() -> dict[str, Any]:
    (listener,) = bootstrap(OBJECTS, "/folder")["static_resources"]["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == 443
    return {
        chain["filter_chain_match"]["server_names"][0]: chain["filters"][0]["typed_config"]["route_config"]
        for chain in listener["filter_chains"]
    }


def routes(host: str) -> list[dict[str, Any]]:
    (virtual,) = chains()[host]["virtual_hosts"]
    found: list[dict[str, Any]] = virtual["routes"]
    return found


def test_each_host_name_has_the_routes_of_its_own_listener() -> None:
    assert set(chains()) == {"outrider.example.com", "grpc.outrider.example.com"}
    assert [each["match"] for each in routes("grpc.outrider.example.com")] == [
        {"prefix": "/outrider.v1.Generation/", "grpc": {}}
    ]
    assert all("grpc" not in each["match"] for each in routes("outrider.example.com"))


def test_routes_have_their_methods_timeouts_and_services() -> None:
    (completions,) = [each for each in routes("outrider.example.com") if each["match"].get("path") == "/v1/completions"]
    assert completions["match"]["headers"] == [{"name": ":method", "string_match": {"exact": "POST"}}]
    assert completions["route"] == {"cluster": "outrider-coordinator:8000", "timeout": "3660s"}
    (call,) = routes("grpc.outrider.example.com")
    assert call["route"] == {"cluster": "outrider-coordinator:9000", "timeout": "0s"}


def test_exact_paths_come_before_prefixes_and_long_ones_before_short_ones() -> None:
    matches = [each["match"] for each in routes("outrider.example.com")]
    kinds = ["path" in match for match in matches]
    assert kinds == sorted(kinds, reverse=True)
    lengths = [len(match["path_separated_prefix"]) for match in matches if "path" not in match]
    assert lengths == sorted(lengths, reverse=True)


def test_backends_speak_the_protocol_that_the_service_declares() -> None:
    clusters = {each["name"]: each for each in bootstrap(OBJECTS, "/folder")["static_resources"]["clusters"]}
    explicit = {
        name: list(next(iter(cluster["typed_extension_protocol_options"].values()))["explicit_http_config"])
        for name, cluster in clusters.items()
    }
    assert explicit == {
        "outrider-coordinator:8000": ["http_protocol_options"],
        "outrider-coordinator:9000": ["http2_protocol_options"],
    }
    assert backends(OBJECTS) == [("outrider-coordinator", 8000), ("outrider-coordinator", 9000)]


def test_what_is_not_understood_is_refused() -> None:
    changed = render({"gateway": {"enabled": True, "className": "any"}})
    route = next(each for each in changed if each["kind"] == "HTTPRoute")
    route["spec"]["rules"][0]["filters"] = []
    with pytest.raises(ValueError, match="filters"):
        bootstrap(changed, "/folder")


@pytest.mark.skipif(program() is None, reason="there is no envoy")
def test_envoy_takes_it(tmp_path: Path) -> None:
    CertificateAuthority.make().issue(
        tmp_path, Role.CLIENT, names=("outrider.example.com",), valid_for=datetime.timedelta(days=1)
    )
    for backend in backends(OBJECTS):
        (tmp_path / endpoints_file(backend)).write_text(yaml.safe_dump(endpoints(backend, 8000, ("10.244.0.5",))))
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(bootstrap(OBJECTS, str(tmp_path))))
    words = [str(program()), "--mode", "validate", "-c", str(tmp_path / "bootstrap.yaml"), "-l", "error"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr


def test_endpoints_are_the_ready_pods() -> None:
    (assignment,) = endpoints(("outrider-coordinator", 8000), 8000, ("10.244.0.5",))["resources"]
    assert assignment["cluster_name"] == "outrider-coordinator:8000"
    (locality,) = assignment["endpoints"]
    assert [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]] == [
        {"address": "10.244.0.5", "port_value": 8000}
    ]
