"""HAProxy of `k8s/load_balancers` in front of coordinators that speak TLS, with a socket to take one out of service.

That is what a cluster does by the endpoints of a Service: who is to go gets no new requests, and finishes what it has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.e2e.certificates import Authority
from tests.e2e.load_balancers import Backend, HAProxy

_CHECKED: Final = ("http", "grpc")
_UNCHECKED: Final = (
    "http_unready",
    "grpc_unready",
)  # backends that ask coordinators whatever their health is
_ENDED_S: Final = 60.0


class SecuredHAProxy(HAProxy):
    """Encrypts again behind itself, and knows coordinators by their certificate."""

    def __init__(
        self,
        folder: Path,
        port: int,
        backends: Sequence[Backend],
        authority: CertificateAuthority,
        authority_path: Path,
    ) -> None:
        """Everybody's certificates, its own among them, are signed by `authority`; its own file is `authority_path`."""
        super().__init__(folder, port, backends, Authority(folder, authority))
        self._authority_path = authority_path
        self._socket = folder / "admin"

    def configure(self) -> list[str]:
        words = super().configure()
        path = self.folder / "haproxy.cfg"
        name, authority = Role.COORDINATOR.value, self._authority_path
        tls = f"ssl verify required ca-file {authority} sni str({name})"
        text = re.sub(r"^(    server .*) proto h2(.*)$", rf"\1 alpn h2 {tls}\2", path.read_text(), flags=re.M)
        text = re.sub(r"^(    server \S+ \S+)$", rf"\1 {tls} check-sni {name}", text, flags=re.M)
        path.write_text(text.replace("global\n", f"global\n    stats socket {self._socket} level admin\n", 1))
        return words

    async def drain(self, index: int) -> None:
        """Sends no new requests to this coordinator; returns when it has none left. Raises TimeoutError."""
        for backend in (*_CHECKED, *_UNCHECKED):
            await self._ask(f"set server {backend}/coordinator-{index} state drain")
        async with asyncio.timeout(_ENDED_S):
            while True:
                if not any(int(row["scur"]) for row in await self._rows(index)):
                    return
                await asyncio.sleep(0.2)

    async def undrain(self, index: int) -> None:
        """Sends requests to this coordinator again; returns when it gets them. Raises TimeoutError."""
        for backend in (*_CHECKED, *_UNCHECKED):
            await self._ask(f"set server {backend}/coordinator-{index} state ready")
        async with asyncio.timeout(_ENDED_S):
            while True:  # its health was last asked for while it was away
                rows = [row for row in await self._rows(index) if row["pxname"] in _CHECKED]
                if all(row["status"].startswith("UP") for row in rows):
                    return
                await asyncio.sleep(0.2)

    async def _rows(self, index: int) -> list[dict[str, str]]:
        """HAProxy's statistics of this coordinator, one row for each backend."""
        stat = await self._ask("show stat")
        header, *lines = [line.removeprefix("# ").split(",") for line in stat.strip().splitlines()]
        rows = [dict(zip(header, line, strict=False)) for line in lines]
        return [row for row in rows if row["svname"] == f"coordinator-{index}"]

    async def _ask(self, command: str) -> str:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        writer.write(f"{command}\n".encode())
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer.decode()
