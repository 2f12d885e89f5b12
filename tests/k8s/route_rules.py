"""Mistakes in the routes of the Gateway API. Pure: rendered objects in, sentences out.

A route may name what is not there and the cluster says nothing. It then goes nowhere, ends what it carries too soon, or
opens more than was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coordinator.api.http.openapi import openapi_document

Object = Mapping[str, Any]

CLOSED_PATHS: Final = (
    "/",
    "/metrics",
    "/health",
    "/livez",
    "/load",
    "/-/routes",
    "/-/healthz",
    "/api/serve/applications/",
)
LONG_PATHS: Final = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/streams/some-id"),
    *("/v1/files", "/v1/files/some-id/content"),
)
OPERATORS_PATHS: Final = frozenset({"/metrics", "/health", "/livez", "/load"})
"""Paths of the API that are for operators, and not reachable from outside."""
PUBLIC_SERVICE: Final = "outrider.v1.Generation"
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def routes(objects: Sequence[Object]) -> Iterator[Object]:
    return (each for each in objects if each["kind"] in ("HTTPRoute", "GRPCRoute"))


def name_of(route: Object) -> str:
    return f"{route['kind']}/{route['metadata']['name']}"


def backends_that_are_not_there(objects: Sequence[Object]) -> Iterator[str]:
    """Services that nobody makes, or that have no such port; KubeRay makes one for each RayService."""
    ports: dict[str, set[int]] = {}
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "Service":
            ports[name] = {port["port"] for port in spec["ports"]}
        elif each["kind"] == "RayService":
            made = spec.get("serveService", {}).get("spec", {}).get("ports", ())
            ports[f"{name}-serve-svc"] = {port["port"] for port in made}
    for route in routes(objects):
        for rule in route["spec"]["rules"]:
            for backend in rule.get("backendRefs", ()):
                if backend.get("port") not in ports.get(backend["name"], ()):
                    yield f"{name_of(route)}: no service {backend['name']} has port {backend.get('port')}"


def gateways_that_are_not_there(objects: Sequence[Object]) -> Iterator[str]:
    """Listeners that nobody has, or that are for another host."""
    listeners = {
        (each["metadata"]["name"], listener["name"]): listener
        for each in objects
        if each["kind"] == "Gateway"
        for listener in each["spec"]["listeners"]
    }
    for route in routes(objects):
        for parent in route["spec"]["parentRefs"]:
            listener = listeners.get((parent["name"], parent.get("sectionName", "")))
            if listener is None:
                yield f"{name_of(route)}: there is no listener {parent.get('sectionName')} of {parent['name']}"
            elif route["spec"].get("hostnames") != [listener["hostname"]]:
                yield f"{name_of(route)} is for other hosts than the listener {listener['name']}"


def routes_that_shut_each_other_out(objects: Sequence[Object]) -> Iterator[str]:
    """A gateway accepts routes of one kind for a listener and host name: of the older one, or of the first by name.

    https://gateway-api.sigs.k8s.io/reference/spec/#grpcroute
    """
    taken: dict[tuple[str, str, str], Object] = {}
    for route in routes(objects):
        for parent in route["spec"]["parentRefs"]:
            for host in route["spec"].get("hostnames", ["*"]):
                other = taken.setdefault((parent["name"], parent.get("sectionName", ""), host), route)
                if other["kind"] != route["kind"]:
                    yield f"{name_of(route)} and {name_of(other)} share the host name {host} of one listener"


def certificates_that_nobody_declares(objects: Sequence[Object], secrets: Sequence[str]) -> Iterator[str]:
    """secrets: that whoever installs it makes. A listener without one is open to who listens on the way."""
    for each in objects:
        if each["kind"] != "Gateway":
            continue
        for listener in each["spec"]["listeners"]:
            name = f"Gateway/{each['metadata']['name']}: {listener['name']}"
            named = listener.get("tls", {}).get("certificateRefs", ())
            if listener["protocol"] != "HTTPS" or not named:
                yield f"{name} has no certificate"
            for reference in named:
                if reference["name"] not in secrets:
                    yield f"{name}: there is no Secret {reference['name']}"


def public_operations() -> list[tuple[str, str]]:
    """Methods and paths of the API that clients use, with `some-id` for each parameter."""
    return [
        (method.upper(), re.sub(r"\{\w+\}", "some-id", path))
        for path, operations in openapi_document()["paths"].items()
        if path not in OPERATORS_PATHS
        for method in operations
    ]


def paths_without_a_route(objects: Sequence[Object]) -> Iterator[str]:
    rules = [rule for route in routes(objects) if route["kind"] == "HTTPRoute" for rule in route["spec"]["rules"]]
    for method, path in public_operations() if rules else ():
        if not any(is_reached(path, rule, method) for rule in rules):
            yield f"no HTTPRoute takes {method} {path}"


def routes_that_open_too_much(objects: Sequence[Object]) -> Iterator[str]:
    for route in routes(objects):
        for rule in route["spec"]["rules"]:
            if route["kind"] == "GRPCRoute":
                methods = [match.get("method", {}) for match in rule.get("matches", [{}])]
                for method in methods:
                    if method.get("type", "Exact") != "Exact" or method.get("service") != PUBLIC_SERVICE:
                        yield f"{name_of(route)} opens more than {PUBLIC_SERVICE}: {method}"
            else:
                for path in CLOSED_PATHS:
                    if is_reached(path, rule):
                        yield f"{name_of(route)} opens {path}"


def routes_that_end_too_soon(objects: Sequence[Object], longest_s: float) -> Iterator[str]:
    """longest_s: the longest generation. A route that does not say has the implementation's bound, often 15 s."""
    for route in routes(objects):
        if route["kind"] != "HTTPRoute":
            continue
        for rule in route["spec"]["rules"]:
            if not any(is_reached(path, rule) for path in LONG_PATHS):
                continue
            for kind in ("request", "backendRequest"):
                permitted = rule.get("timeouts", {}).get(kind)
                if permitted is None or 0 < seconds(permitted) <= longest_s:
                    yield f"{name_of(route)}: timeout {kind} is {permitted}, and a text may take {longest_s:g} s"


def is_reached(path: str, rule: Object, method: str | None = None) -> bool:
    """Whether a rule of an HTTPRoute takes requests for the path, with this method or with any."""
    return any(
        _matches(path, match.get("path", {})) and (method is None or match.get("method", method) == method)
        for match in rule.get("matches", [{}])
    )


def _matches(path: str, match: Object) -> bool:
    value = match.get("value", "/")
    match match.get("type", "PathPrefix"):
        case "Exact":
            return bool(path == value)
        case "PathPrefix":  # whole elements
            return f"{path.rstrip('/')}/".startswith(f"{value.rstrip('/')}/")
        case _:
            return re.fullmatch(value, path) is not None


def seconds(duration: str) -> float:
    """The seconds of a duration of the Gateway API, such as 1h30m."""
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+)(h|ms|m|s)", duration))
