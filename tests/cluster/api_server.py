"""An API server as far as Helm's `lookup` goes: secrets by name, to be read. Helm renders an upgrade with it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from helm_python import Config

from k8s.helm.chart import REGISTRY, chart, merged, objects_of
from tests.cluster.pod_plan import NAMESPACE

_RESOURCES: Final = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [
        {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    ],
}
_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets/"
_HEAD_BYTES_MAX: Final = 16 << 10

Secrets = Mapping[str, Mapping[str, bytes]]


def answer(path: str, secrets: Secrets) -> tuple[int, dict[str, Any]]:
    """Status and body for a path. Pure."""
    if path == "/api/v1":
        return 200, _RESOURCES
    name = path.removeprefix(_PATH)
    if path.startswith(_PATH) and name in secrets:
        data = {key: base64.b64encode(value).decode() for key, value in secrets[name].items()}
        meta = {"name": name, "namespace": NAMESPACE}
        return 200, {"kind": "Secret", "apiVersion": "v1", "metadata": meta, "data": data}
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
    return 404, status | {"message": f"there is no {path}"}


async def rendered(
    values: Mapping[str, Any], secrets: Callable[[], Secrets], *, is_upgrade: bool
) -> list[dict[str, Any]]:
    """The chart's objects, as Helm renders them where these secrets are. Raises HelmError."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(reader, writer, secrets())

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with Config(kube_apiserver=f"http://127.0.0.1:{port}", namespace=NAMESPACE) as config:
            files = await asyncio.to_thread(
                config.render,
                chart(),
                merged({"images": {"registry": REGISTRY}}, values),
                name="outrider",
                namespace=NAMESPACE,
                is_install=not is_upgrade,
                is_upgrade=is_upgrade,
            )
    return objects_of(files)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secrets: Secrets) -> None:
    """Answers one request, and closes the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    path = head.split(b" ")[1].decode().partition("?")[0]
    status, body = answer(path, secrets)
    text = json.dumps(body).encode()
    lines = f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"{lines}Connection: close\r\n\r\n".encode() + text)
    await writer.drain()
    writer.close()
