"""The certificates and API keys of the system under test: one certificate for each process, by its name."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509

from coordinator.access.api_keys import Scope, entry, new_key
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import AUTHORITY, CERTIFICATE, PRIVATE_KEY, Role
from tests.e2e.chaos.authorities import trust

TENANTS: Final = ("search", "ads", "stranger")
OPERATOR: Final = "operator"
_DAY: Final = datetime.timedelta(days=1)
_AGE: Final = datetime.timedelta(hours=2)
"""Age of every certificate and authority when it is made: for a process whose clock is late, a new one is not valid
yet."""


class Certificates:
    """Folders with `tls.crt`, `tls.key` and `ca.crt`. The name of a process tells its role: `target-0`, `redis`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is ours; a new authority is made in it."""
        self._folder = folder
        self.authority = CertificateAuthority.open(folder, now=some_time_ago())
        self._trusted: Sequence[x509.Certificate] = [self.authority.certificate]
        self._contexts: list[tuple[str | None, ssl.SSLContext]] = []  # and whose certificate each shows

    @property
    def authority_path(self) -> Path:
        return self._folder / AUTHORITY

    def folder(self, name: str) -> Path:
        """The folder of this process' current certificate."""
        return self._folder / name

    def issue(self, name: str, valid_for: datetime.timedelta = _DAY) -> Path:
        """A new certificate for the process, in its folder, which is returned; valid for so long from now on."""
        role = role_of(name)
        is_worker = role in (Role.TARGET, Role.DRAFT)
        self.authority.issue(
            self.folder(name),
            role,
            names=("localhost", "127.0.0.1") if role in (Role.COORDINATOR, Role.REDIS) else (),
            worker_ids=(name,) if is_worker else (),
            valid_for=valid_for + _AGE,
            now=some_time_ago(),
        )
        trust([self.folder(name)], self._trusted)
        return self.folder(name)

    def trust(self, authorities: Sequence[x509.Certificate]) -> None:
        """Has every process that has a certificate, or gets one later, trust these and no other."""
        self._trusted = authorities
        trust([path.parent for path in self._folder.glob(f"*/{CERTIFICATE}")], authorities)

    def context(self, name: str | None = OPERATOR) -> ssl.SSLContext:
        """That believes our authority and shows the certificate of this process, or none."""
        context = ssl.create_default_context(cafile=str(self.authority_path))
        self._contexts.append((name, context))
        self._refresh(name, context)
        return context

    def refresh_contexts(self) -> None:
        """Has our own connections to come show the newest certificates, and believe whom the newest file names."""
        for name, context in self._contexts:
            self._refresh(name, context)

    def _refresh(self, name: str | None, context: ssl.SSLContext) -> None:
        context.load_verify_locations(self.authority_path)
        if name is not None:
            context.load_cert_chain(self.folder(name) / CERTIFICATE, self.folder(name) / PRIVATE_KEY)

    def credentials(self, name: str | None = None) -> grpc.ChannelCredentials:
        """For gRPC, likewise."""
        authority = self.authority_path.read_bytes()
        if name is None:
            return grpc.ssl_channel_credentials(authority)
        key, certificate = ((self.folder(name) / each).read_bytes() for each in (PRIVATE_KEY, CERTIFICATE))
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def channel(self, address: str, name: str, role: Role) -> grpc.aio.Channel:
        """From the process `name` to somebody who has to be of this role."""
        options = [("grpc.ssl_target_name_override", role.value)]
        return grpc.aio.secure_channel(address, self.credentials(name), options=options)


def some_time_ago() -> datetime.datetime:
    """When certificates and authorities were made, if one asks them."""
    return datetime.datetime.now(datetime.UTC) - _AGE


def role_of(name: str) -> Role:
    """`target-0` is a target."""
    return Role[name.partition("-")[0].upper()]


def make_keys(path: Path) -> dict[str, str]:
    """Writes a key file; returns the keys by tenant, and under OPERATOR one that is good for everything: who may
    generate is told more by /health."""
    keys = {tenant: new_key() for tenant in (*TENANTS, OPERATOR)}
    scopes = {OPERATOR: frozenset(Scope)}
    path.write_text(
        "\n".join(
            entry(key, tenant, scopes.get(tenant, frozenset({Scope.GENERATE})), None, "")
            for tenant, key in keys.items()
        )
    )
    return keys
