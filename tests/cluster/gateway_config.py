"""Configuration of Envoy for a rendered Gateway with its routes, as a gateway's controller makes it. Pure.

Only what the chart renders is understood. Another kind of match or filter raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.k8s.pods import Object
from tests.k8s.route_rules import seconds

_TYPES: Final = "type.googleapis.com/envoy."
_HTTP: Final = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_TLS: Final = "extensions.transport_sockets.tls.v3.DownstreamTlsContext"
_OPTIONS: Final = "extensions.upstreams.http.v3.HttpProtocolOptions"
_ASSIGNMENT: Final = "config.endpoint.v3.ClusterLoadAssignment"


def bootstrap(objects: Sequence[Object], folder: str) -> dict[str, Any]:
    """The bootstrap file. `folder` has tls.crt, tls.key and the files of endpoints, which change while Envoy runs."""
    routes = [each for each in objects if each["kind"] in ("HTTPRoute", "GRPCRoute")]
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    listeners: dict[int, list[Any]] = {}
    for gateway in (each for each in objects if each["kind"] == "Gateway"):
        for listener in gateway["spec"]["listeners"]:
            taken = [each for each in routes if _is_attached(each, gateway, listener)]
            listeners.setdefault(listener["port"], []).append(_filter_chain(listener, taken, folder))
    used = sorted({backend for route in routes for backend in _backends(route)})
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "static_resources": {
            "listeners": [
                {
                    "name": str(port),
                    "address": {"socket_address": {"address": "0.0.0.0", "port_value": port}},
                    "listener_filters": [
                        {
                            "name": "tls_inspector",
                            "typed_config": _typed("extensions.filters.listener.tls_inspector.v3.TlsInspector"),
                        }
                    ],
                    "filter_chains": chains,
                }
                for port, chains in listeners.items()
            ],
            "clusters": [_cluster(name, port, services[name], folder) for name, port in used],
        },
    }


def endpoints(backend: tuple[str, int], port: int, addresses: Sequence[str]) -> dict[str, Any]:
    """The file of a service's endpoints: the ready pods, and their port."""
    found = [{"endpoint": {"address": {"socket_address": {"address": each, "port_value": port}}}} for each in addresses]
    assignment = {**_typed(_ASSIGNMENT), "cluster_name": _name(*backend), "endpoints": [{"lb_endpoints": found}]}
    return {"resources": [assignment]}


def endpoints_file(backend: tuple[str, int]) -> str:
    """Its name. Envoy wants one for each backend."""
    return f"{backend[0]}-{backend[1]}.yaml"


def backends(objects: Sequence[Object]) -> list[tuple[str, int]]:
    """Services and ports that routes lead to."""
    return sorted({pair for each in objects if each["kind"] in ("HTTPRoute", "GRPCRoute") for pair in _backends(each)})


def _is_attached(route: Object, gateway: Object, listener: Object) -> bool:
    kinds = [each["kind"] for each in listener["allowedRoutes"]["kinds"]]
    return (
        route["kind"] in kinds
        and listener["hostname"] in route["spec"]["hostnames"]
        and any(
            parent["name"] == gateway["metadata"]["name"] and parent["sectionName"] == listener["name"]
            for parent in route["spec"]["parentRefs"]
        )
    )


def _backends(route: Object) -> Iterator[tuple[str, int]]:
    for rule in route["spec"]["rules"]:
        for backend in rule["backendRefs"]:
            yield backend["name"], backend["port"]


def _filter_chain(listener: Object, routes: Sequence[Object], folder: str) -> dict[str, Any]:
    host = listener["hostname"]
    certificate = {
        "certificate_chain": {"filename": f"{folder}/tls.crt"},
        "private_key": {"filename": f"{folder}/tls.key"},
    }
    context = {"alpn_protocols": ["h2", "http/1.1"], "tls_certificates": [certificate]}
    router = {"name": "router", "typed_config": _typed("extensions.filters.http.router.v3.Router")}
    manager = {
        **_typed(_HTTP),
        "stat_prefix": listener["name"],
        "normalize_path": True,
        "access_log": [
            {
                "name": "stdout",
                "typed_config": _typed("extensions.access_loggers.stream.v3.StdoutAccessLog"),
            }
        ],
        "http_filters": [router],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": listener["name"],
                    "domains": [host, f"{host}:*"],
                    "routes": [each for _, each in sorted(_all_routes(routes), key=lambda pair: pair[0])],
                }
            ]
        },
    }
    return {
        "filter_chain_match": {"server_names": [host]},
        "transport_socket": {"name": "tls", "typed_config": {**_typed(_TLS), "common_tls_context": context}},
        "filters": [{"name": "http", "typed_config": manager}],
    }


def _all_routes(routes: Sequence[Object]) -> Iterator[tuple[tuple[bool, int], dict[str, Any]]]:
    """Routes of Envoy, each with its rank: exact paths come first, then longer prefixes."""
    for route in routes:
        for rule in route["spec"]["rules"]:
            if unknown := rule.keys() - {"matches", "timeouts", "backendRefs"}:
                raise ValueError(f"fields of a route's rule that are not understood here: {sorted(unknown)}")
            (backend,) = rule["backendRefs"]
            # Without a timeout in the route there is none. Envoy's own would be 15 s.
            limit_s = seconds(rule.get("timeouts", {}).get("request", "0s"))
            action = {"cluster": _name(backend["name"], backend["port"]), "timeout": f"{limit_s:g}s"}
            for match in rule["matches"]:
                path, rank = _match(route["kind"], match)
                yield rank, {"match": path, "route": action}


def _match(kind: str, match: Object) -> tuple[dict[str, Any], tuple[bool, int]]:
    if kind == "GRPCRoute":
        if match["method"].keys() != {"type", "service"} or match["method"]["type"] != "Exact":
            raise ValueError(f"the match {match} is not understood here")
        prefix = f"/{match['method']['service']}/"
        return {"prefix": prefix, "grpc": {}}, (True, -len(prefix))
    if unknown := match.keys() - {"path", "method"}:
        raise ValueError(f"matches that are not understood here: {sorted(unknown)}")
    keys = {"Exact": "path", "PathPrefix": "path_separated_prefix"}
    value = match["path"]["value"]
    found: dict[str, Any] = {keys[match["path"]["type"]]: value}
    if "method" in match:
        found["headers"] = [{"name": ":method", "string_match": {"exact": match["method"]}}]
    return found, (match["path"]["type"] != "Exact", -len(value))


def _cluster(name: str, port: int, service: Object, folder: str) -> dict[str, Any]:
    (declared,) = [each for each in service["ports"] if each["port"] == port]
    protocols = {"http": "http_protocol_options", "kubernetes.io/h2c": "http2_protocol_options"}
    source = {"path": f"{folder}/{endpoints_file((name, port))}", "watched_directory": {"path": folder}}
    return {
        "name": _name(name, port),
        "type": "EDS",
        "connect_timeout": "2s",
        "eds_cluster_config": {"eds_config": {"resource_api_version": "V3", "path_config_source": source}},
        "typed_extension_protocol_options": {
            f"envoy.{_OPTIONS}": {
                **_typed(_OPTIONS),
                "explicit_http_config": {protocols[declared["appProtocol"]]: {}},
            }
        },
    }


def _name(service: str, port: int) -> str:
    return f"{service}:{port}"


def _typed(name: str) -> dict[str, Any]:
    return {"@type": f"{_TYPES}{name}"}
