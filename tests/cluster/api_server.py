"""An API server as far as Helm's `lookup` and the chart's Job for certificates need one.

It has secrets and config maps by name, to be read, and secrets to be changed. Some other objects can be read and
listed. Helm may do everything. A pod shows its token, and may do what the rendered roles permit its account.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from helm_python import Config

from k8s.helm.chart import REGISTRY, chart, merged
from tests.cluster.pod_plan import NAMESPACE
from tests.k8s.pods import Object

_KINDS: Final[dict[str, dict[str, str]]] = {
    "/api/v1": {"secrets": "Secret", "configmaps": "ConfigMap", "services": "Service"},
    "/apis/apps/v1": {"deployments": "Deployment"},
    "/apis/networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
"""By group and version: resources, and the kinds of their objects."""
_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/"
_HEAD_BYTES_MAX: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Store:
    """Files by the names of their objects, and objects of other kinds."""

    secrets: MutableMapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    others: Sequence[Object] = ()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    token: str = ""
    body: bytes = b""


May = Callable[[Request], bool]


def answer(request: Request, store: Store) -> tuple[int, dict[str, Any]]:
    """Status and body. A change of a secret (a merge patch) is made in the store."""
    if request.path in _KINDS:
        return 200, _resources(request.path)
    group, _, rest = request.path.partition(f"/namespaces/{NAMESPACE}/")
    resource, _, name = rest.partition("/")
    kind = _KINDS.get(group, {}).get(resource)
    if kind is not None and kind not in ("Secret", "ConfigMap"):
        return _other(request.path, kind, name, store)
    objects = {"secrets": store.secrets, "configmaps": store.config_maps}.get(resource, {})
    if not request.path.startswith(_PATH) or name not in objects:
        return _failure(404, "NotFound", f"there is no {request.path}")
    if request.method == "PATCH":
        patch = json.loads(request.body)
        if patch["metadata"]["resourceVersion"] != _version(objects[name]):
            return _failure(409, "Conflict", "the object has been modified")
        store.secrets[name] = {
            **store.secrets[name],
            **{key: base64.b64decode(value) for key, value in patch["data"].items()},
        }
    files = objects[name]
    meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": _version(files)}
    body = {"kind": kind, "apiVersion": "v1", "metadata": meta}
    if files:  # an empty map is left out
        is_secret = resource == "secrets"
        body["data"] = {
            key: base64.b64encode(value).decode() if is_secret else value.decode() for key, value in files.items()
        }
    return 200, body


def _resources(path: str) -> dict[str, Any]:
    """Returns what there is in a group, as its discovery says."""
    verbs = ["get", "list", "patch"]
    return {
        "kind": "APIResourceList",
        "groupVersion": path.removeprefix("/apis/").removeprefix("/api/"),
        "resources": [
            {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for name, kind in _KINDS[path].items()
        ],
    }


def _other(path: str, kind: str, name: str, store: Store) -> tuple[int, dict[str, Any]]:
    """Returns one object of a kind without files, or all of them where there is no name."""
    found = [each for each in store.others if each["kind"] == kind]
    if not name:
        group = next(path for path, kinds in _KINDS.items() if kind in kinds.values())
        return 200, {
            "kind": f"{kind}List",
            "apiVersion": _resources(group)["groupVersion"],
            "metadata": {},
            "items": found,
        }
    named = [each for each in found if each["metadata"]["name"] == name]
    return (200, dict(named[0])) if named else _failure(404, "NotFound", f"there is no {path}")


def is_permitted(objects: Sequence[Object], account: str, request: Request) -> bool:
    """Whether roles that are bound to the account permit the request for a named object."""
    resource, _, name = request.path.removeprefix(_PATH).partition("/")
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    bound = {
        each["roleRef"]["name"] for each in objects if each["kind"] == "RoleBinding" and subject in each["subjects"]
    }
    return any(
        resource in rule["resources"] and request.method.lower() in rule["verbs"] and name in rule["resourceNames"]
        for each in objects
        if each["kind"] == "Role" and each["metadata"]["name"] in bound
        for rule in each["rules"]
    )


@asynccontextmanager
async def serving(
    store: Callable[[], Store],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    may: May = lambda _: True,
) -> AsyncIterator[int]:
    """Serves until the context ends; its value is the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(reader, writer, store(), may)

    server = await asyncio.start_server(serve, host, port, limit=_HEAD_BYTES_MAX, ssl=tls)
    async with server:
        found: int = server.sockets[0].getsockname()[1]
        yield found


async def rendered(values: Mapping[str, Any], store: Callable[[], Store], *, is_upgrade: bool) -> dict[str, str]:
    """The chart's files, as Helm renders them where these objects are. Raises HelmError."""
    async with serving(store) as port:
        with Config(kube_apiserver=f"http://127.0.0.1:{port}", namespace=NAMESPACE) as config:
            return await asyncio.to_thread(
                config.render,
                chart(),
                merged({"images": {"registry": REGISTRY}}, values),
                name="outrider",
                namespace=NAMESPACE,
                is_install=not is_upgrade,
                is_upgrade=is_upgrade,
            )


def _version(files: Mapping[str, bytes]) -> str:
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def _failure(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return code, status | {"message": message}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, store: Store, may: May) -> None:
    """Answers one request, and closes the connection."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    request = Request(method, path.partition("?")[0], headers.get("authorization", "").removeprefix("Bearer "), body)
    status, found = answer(request, store) if may(request) else _failure(403, "Forbidden", f"no {method} of {path}")
    text = json.dumps(found).encode()
    head = f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + text)
    await writer.drain()
    writer.close()
