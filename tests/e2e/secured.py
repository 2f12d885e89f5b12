"""A system with certificates and API keys, every part a process of its own: what operators run, on one machine.

clients ── TLS, keys ──► coordinator-0, -1 ── mutual TLS ──► target-0, -1 ◄── mutual TLS ── draft-0, -1
                                 └──────── TLS with certificates ──► Redis (behind HAProxy) ◄────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import grpc
import httpx
import redis
import redis.asyncio
from cryptography import x509

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET, ROOT, module
from command_line.start.deployment import flatten
from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.hosting.ingress import find_haproxy
from coordinator.settings import Hosting
from outrider.local.child import Child, StartError
from outrider.local.child_log import ChildLog
from outrider.local.child_spec import ChildEvent, ChildSpec, Phase, RestartPolicy
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import CERTIFICATE, Role

READY_TIMEOUT_S = 120.0
RAY_STARTS_MAX = 3
NEVER = RestartPolicy(first_delay_s=0.1, delay_s_max=0.1)


@dataclass(frozen=True)
class SecuredOptions:
    num_targets: int = 1
    num_drafts: int = 1
    num_coordinators: int = 1
    drain_grace_s: float = 60.0
    limits: str = ""  # TOML, before the keys
    needs_client_certificates: bool = False
    hosting: Hosting = Hosting.RAY_SERVE  # plain: the public ports have no TLS
    otlp_endpoint: str | None = None
    log_format: str = "text"
    oidc_issuer: str | None = None
    oidc_audience: str | None = None
    max_model_len: int = 512
    target: Path = DEMO_TARGET
    draft: Path = DEMO_DRAFT


class SecuredSystem:
    """A whole system with TLS and keys, from `async with` on. `ends` names the processes that ended without having been
    asked."""

    def __init__(self, options: SecuredOptions, log_dir: Path) -> None:
        """Output of all processes goes to files of `log_dir`."""
        self.options = options
        self.log_dir = log_dir
        self.scratch = Path(tempfile.mkdtemp(prefix="sec-", dir="/tmp"))  # sockets' names are bounded
        self.certificates = self.scratch / "certificates"
        self.authority = CertificateAuthority.open(self.certificates)
        self.keys_file = self.scratch / "keys.toml"
        self.key, self.other_key, self.bounded_key, self.metrics_key = (new_key() for _ in range(4))
        self.ends: list[str] = []
        self.children: dict[str, Child] = {}
        self._redis = EmbeddedRedis(self.scratch)
        self._redis_front: subprocess.Popen[bytes] | None = None
        self._redis_port = 0
        self._num_started: Counter[str] = Counter()  # by role
        self._is_stopping = False

    def issue(self, role: Role, valid_for: datetime.timedelta = datetime.timedelta(days=1)) -> Path:
        """Issues a new certificate for the role and returns its folder."""
        folder = self.certificates / role.name.lower()
        names = ("localhost", "127.0.0.1") if role in (Role.COORDINATOR, Role.REDIS) else ()
        self.authority.issue(folder, role, names=names, valid_for=valid_for)
        return folder

    def folder(self, role: Role) -> Path:
        """The folder of the role's current certificate."""
        return self.certificates / role.name.lower()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping = True
        await asyncio.gather(*(child.stop() for child in self.children.values()))
        if self._redis_front is not None:
            self._redis_front.kill()
            await asyncio.to_thread(self._redis_front.wait)
        self._redis.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _start(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for role in Role:
            self.issue(role)
        generate, metrics = frozenset({Scope.GENERATE}), frozenset({Scope.METRICS})
        entries = [
            entry(self.key, "search", generate, None, ""),
            entry(self.other_key, "ads", generate, None, ""),
            entry(self.bounded_key, "bounded", generate, None, ""),
            entry(self.metrics_key, "prometheus", metrics, None, ""),
        ]
        self.keys_file.write_text("\n".join([self.options.limits, *entries]))
        # All at once: what nobody listens at yet could be chosen again.
        self._redis_port, *ports = free_ports(1 + 3 * self.options.num_coordinators)
        self._start_redis()
        for kind, count in (("target", self.options.num_targets), ("draft", self.options.num_drafts)):
            for index in range(count):
                self._add(f"{kind}-{index}", kind, self._worker_words(kind, f"{kind}-{index}"))
        for index in range(self.options.num_coordinators):
            self._add(
                f"coordinator-{index}",
                "coordinator",
                self._coordinator_words(index, ports.pop(), ports.pop(), ports.pop()),
            )
        # Ray gives up after half a minute, and torch is long to load beside it: one after the other, then the workers.
        for name in self.names("coordinator"):
            await self._start_coordinator(name)
        workers = self.names("target") + self.names("draft")
        await asyncio.gather(*(self.children[name].start() for name in workers))
        for name in self.names("coordinator"):
            await self.until_healthy(name)

    async def _start_coordinator(self, name: str) -> None:
        for attempt in range(RAY_STARTS_MAX):
            try:
                await self.children[name].start()
                return
            except StartError:  # on a busy machine half a minute is not much
                if attempt == RAY_STARTS_MAX - 1:
                    raise
                await self.children[name].stop()  # which closes its log
                self._add(name, "coordinator", self.children[name].spec.command)

    def _add(self, name: str, role: str, words: tuple[str, ...]) -> None:
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        spec = ChildSpec(name, role, words, environment, READY_TIMEOUT_S, self.options.drain_grace_s + 15.0)
        self.children[name] = Child(spec, ChildLog(name, self.log_dir), NEVER, self._hear)
        self._num_started[role] += 1

    def _worker_words(self, role: str, name: str, other: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ...]:
        flags: dict[str, Any] = {
            "--model": self.options.target if role == "target" else self.options.draft,
            "--port": 0,
            "--health-port": 0,
            "--tls-dir": self.folder(Role[role.upper()]),
            "--redis-url-file": self.redis_url_file(Role[role.upper()]),
            "--worker-id": name,
            "--max-model-len": self.options.max_model_len,
            "--kv-cache-gib": 0.25,
            "--num-threads": 1,
            "--otlp-endpoint": self.options.otlp_endpoint,
            "--log-format": self.options.log_format,
            "--drain-grace-s": self.options.drain_grace_s,
        }
        return (*module(f"{role}_worker"), *flatten({**flags, **other}))

    def _coordinator_words(self, index: int, http_port: int, grpc_port: int, metrics_port: int) -> tuple[str, ...]:
        flags = {
            "--tokenizer": self.options.target,
            "--port": http_port,
            "--grpc-port": grpc_port,
            "--metrics-port": metrics_port,
            "--tls-dir": self.folder(Role.COORDINATOR),
            "--redis-url-file": self.redis_url_file(Role.COORDINATOR),
            "--api-keys": self.keys_file,
            "--oidc-issuer": self.options.oidc_issuer,
            "--oidc-audience": self.options.oidc_audience,
            "--otlp-endpoint": self.options.otlp_endpoint,
            "--log-format": self.options.log_format,
            "--hosting": self.options.hosting,
            "--ray-temp-dir": self.scratch / f"r{index}" if self.options.hosting is Hosting.RAY_SERVE else None,
            "--batch-files": self.scratch / "batches",
        }
        words = (*module("coordinator"), *flatten(flags), "--log-requests")
        return (*words, "--require-client-certificates") if self.options.needs_client_certificates else words

    def _start_redis(self) -> None:
        """Its own program has no TLS, so HAProxy speaks it in front."""
        plain = self._redis.start()
        self._make_redis_users(plain)
        folder = self.folder(Role.REDIS)
        (self.scratch / "redis.cfg").write_text(
            "global\n    ssl-load-extra-del-ext\n    ssl-load-extra-files key\n"
            "defaults\n    mode tcp\n    timeout connect 1s\n    timeout client 1h\n    timeout server 1h\n"
            f"frontend f\n    bind 127.0.0.1:{self._redis_port} ssl crt {folder}/tls.crt "
            f"ca-file {folder}/ca.crt verify required\n    default_backend b\n"
            f"backend b\n    server redis {plain.rpartition('@')[2].partition('/')[0]}\n"
        )
        words = [str(find_haproxy(self.scratch)), "-f", str(self.scratch / "redis.cfg"), "-db"]
        with (self.log_dir / "redis-front.log").open("wb") as log:
            self._redis_front = subprocess.Popen(words, stdout=log, stderr=log)

    def redis_url_file(self, role: Role) -> Path:
        """The file with the URL of Redis for a coordinator, a target or a draft worker."""
        return self.scratch / "redis" / f"url-{role.name.lower()}"

    def _make_redis_users(self, plain: str) -> None:
        """Creates the Redis users of the script for operators, with certificates where they are here."""
        words = ["sh", str(ROOT / "k8s" / "redis_users.sh"), str(self.scratch / "redis")]
        subprocess.run([*words, f"rediss://127.0.0.1:{self._redis_port}"], check=True)
        for role in (Role.COORDINATOR, Role.TARGET, Role.DRAFT):
            path = self.redis_url_file(role)
            path.write_text(path.read_text().replace("/etc/outrider/tls", str(self.folder(role))))
        with redis.Redis.from_url(plain) as client:
            for line in (self.scratch / "redis" / "users.conf").read_text().splitlines():
                _, name, *rules = line.split()
                if name != "default":  # which the server was started with
                    client.execute_command("ACL", "SETUSER", name, *rules)

    def _hear(self, event: ChildEvent) -> None:
        if event.phase is Phase.DIED and not self._is_stopping:
            self.ends.append(f"{event.name} {event.detail}")

    # Addresses.

    def names(self, role: str) -> list[str]:
        """Names of the processes of a role."""
        return [name for name, child in self.children.items() if child.spec.role == role]

    def ready(self, name: str) -> Mapping[str, Any]:
        """The fields that the process reported when it became ready."""
        return self.children[name].ready_line

    def url(self, index: int = 0) -> str:
        """https://host:port of a coordinator."""
        return str(self.ready(f"coordinator-{index}")["http"])

    def grpc_address(self, index: int = 0) -> str:
        return str(self.ready(f"coordinator-{index}")["grpc"])

    def context(self, role: Role | None = None) -> ssl.SSLContext:
        """A TLS context that trusts our authority; `role` shows a certificate."""
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.crt"))
        if role is not None:
            context.load_cert_chain(self.folder(role) / "tls.crt", self.folder(role) / "tls.key")
        return context

    def http(
        self, key: str | None = None, index: int = 0, timeout_s: float = 60.0, role: Role | None = None
    ) -> httpx.AsyncClient:
        """A client of a coordinator; `role` shows a certificate."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            base_url=self.url(index), headers=headers, verify=self.context(role), timeout=timeout_s
        )

    def credentials(self, role: Role | None = None) -> grpc.ChannelCredentials:
        """Credentials for gRPC that trust our authority; `role` shows a certificate."""
        authority = (self.certificates / "ca.crt").read_bytes()
        if role is None:
            return grpc.ssl_channel_credentials(authority)
        folder = self.folder(role)
        return grpc.ssl_channel_credentials(
            authority, (folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes()
        )

    def channel(self, address: str, name: str | None = None, role: Role | None = None) -> grpc.aio.Channel:
        """A channel to any process; `name` is the one that its certificate must have."""
        options = [] if name is None else [("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, self.credentials(role), options=options)

    async def metrics(self, name: str) -> str:
        """The metrics that a process exports, read from its metrics port, past everything that serves its clients."""
        context = self.context(Role.OPERATOR)
        context.check_hostname = False  # the certificate names the part, not the machine
        address = f"https://127.0.0.1:{self.ready(name)['metrics_port']}/metrics"
        async with httpx.AsyncClient(verify=context, timeout=10.0, trust_env=False) as client:
            return (await client.get(address)).raise_for_status().text

    def redis_client(self) -> redis.asyncio.Redis:
        """A client of Redis with all permissions; the caller closes it."""
        return redis.asyncio.Redis.from_url(self._redis.url, decode_responses=True)

    def pids(self) -> dict[str, int]:
        """Ids of the processes that the system started itself, by name."""
        return {name: int(child.ready_line["pid"]) for name, child in self.children.items()}

    async def until_healthy(self, name: str, timeout_s: float = 60.0) -> None:
        """Waits until this coordinator has a target."""
        index = int(name.rpartition("-")[2])
        async with asyncio.timeout(timeout_s), self.http(index=index, role=Role.CLIENT) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def until_certificates_are_shown(self, timeout_s: float = 30.0) -> None:
        """Waits until every process shows the certificate that lies in its folder now."""
        for name, child in self.children.items():
            path = self.folder(Role[child.spec.role.upper()]) / CERTIFICATE
            serial = x509.load_pem_x509_certificate(path.read_bytes()).serial_number
            until_s = time.monotonic() + timeout_s
            while (shown := await asyncio.to_thread(self._shown_serial, name)) != serial:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"{name} shows certificate {shown:x} and not its new one, {serial:x}")
                await asyncio.sleep(0.1)

    def _shown_serial(self, name: str) -> int:
        ready = self.ready(name)
        address = str(ready.get("address") or ready["http"]).removeprefix("https://")
        context = self.context(Role.OPERATOR)
        context.check_hostname = False  # the certificate names the part
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
            assert shown is not None
            return x509.load_der_x509_certificate(shown).serial_number

    # Changes.

    async def start_another(self, role: str, flags: Mapping[str, Any] | None = None) -> str:
        """One more worker, with these flags instead of the usual ones; returns its name when it is ready."""
        name = f"{role}-{self._num_started[role]}"
        self._add(name, role, self._worker_words(role, name, flags or {}))
        await self.children[name].start()
        return name

    async def retire(self, name: str) -> None:
        """Asks a process to end, as Kubernetes does, and waits until it has finished what it had."""
        await self.children.pop(name).stop()

    async def restart_coordinator(self, index: int) -> None:
        """Ends it and starts it anew, at the same address."""
        name = f"coordinator-{index}"
        old = self.children[name]
        await old.stop()
        self._add(name, "coordinator", old.spec.command)
        await self._start_coordinator(name)
        await self.until_healthy(name)
