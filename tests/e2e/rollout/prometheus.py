"""A real Prometheus, configured as `k8s/monitoring` has it, beside a secured system."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from outrider.local.free_ports import free_ports
from outrider.security.tls import Role
from tests.e2e.secured import SecuredSystem

START_TIMEOUT_S: Final = 30.0
K8S: Final = Path(__file__).resolve().parents[3] / "k8s"
_INTERVALS: Final = ("scrape_interval: 15s", "scrape_timeout: 10s", "evaluation_interval: 15s")


class Prometheus:
    """One server, with our rules; `tell` it again whenever processes come or go."""

    def __init__(self, program: str, system: SecuredSystem, folder: Path, scrape_s: int = 2) -> None:
        """`folder` exists and is ours."""
        self._system = system
        self._folder = folder
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        shutil.copytree(system.folder(Role.OPERATOR), folder / "tls")
        shutil.copy(K8S / "helm" / "outrider" / "files" / "rules.yaml", folder / "rules.yaml")
        config = (K8S / "monitoring" / "prometheus.yaml").read_text(encoding="utf-8")
        for interval in _INTERVALS:
            assert interval in config
            config = config.replace(interval, f"{interval.partition(':')[0]}: {scrape_s}s")
        (folder / "prometheus.yaml").write_text(config, encoding="utf-8")
        self.tell()
        words = [
            *(program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
        ]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def tell(self) -> None:
        """Writes the list of processes that are to be scraped from now on."""
        folder = self._folder / "targets"
        folder.mkdir(exist_ok=True)
        for part in ("target", "draft", "coordinator"):
            ports = [self._system.ready(name)["metrics_port"] for name in self._system.names(part)]
            draft = folder / f".{part}"
            draft.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}" for port in ports]}]))
            draft.replace(folder / f"{part}.yaml")

    async def until_ready(self) -> None:
        """Waits until Prometheus is ready. Raises AssertionError with its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while True:
                try:
                    if (await client.get("/-/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                assert time.monotonic() < deadline, self.log[-2000:]

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    async def get(self, path: str, **words: str) -> Any:
        """Returns the data that Prometheus' API answers with. Raises AssertionError with its own message."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=20) as client:
            answer = await client.get(f"/api/v1/{path}", params=words)
        assert answer.status_code == 200, f"{words}: {answer.text}"
        return answer.json()["data"]

    async def ask(self, query: str) -> Mapping[str, float]:
        """Values of a query by the series' labels; the key of a sum without any is empty."""
        return {
            ",".join(f"{name}={value}" for name, value in sorted(each["metric"].items())): float(each["value"][1])
            for each in (await self.get("query", query=query))["result"]
        }

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
