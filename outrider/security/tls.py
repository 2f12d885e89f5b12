"""Mutual TLS between processes: certificates in a folder, reloaded when they change, and permissions per role.

A folder holds `tls.crt`, `tls.key` and `ca.crt`, as in cert-manager and Kubernetes' secrets. The authority is
Outrider's alone, so that everything it signed belongs to the system; a certificate's DNS name states its part (`Role`).
Addresses come from the registry and change often, so names are checked instead of them: a client expects
`target.outrider.internal` wherever it dials a target.

A worker's certificate may name the ids that it may announce, each as one more DNS name (`worker_name`); the coordinator
then accepts no other.

Invariant: files in use are only ever replaced by files that belong together. An incomplete or failed rotation leaves
the previous ones in use, and is logged.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from outrider.errors import ConfigurationError, Forbidden
from outrider.security.call_admission import Read, admitted
from outrider.security.watched_files import WatchedFiles

CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
AUTHORITY: Final = "ca.crt"
_LABEL: Final = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HASHED: Final = "id--"  # prefix of the label of an id that is not a DNS label
LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Hosts that no other machine can reach."""
_FILE_BYTES_MAX: Final = 1 << 20
_PEERS_MAX: Final = 1024
"""Callers' certificates whose names are remembered: reading them takes longer than most calls."""


class Role(StrEnum):
    """A part of the system, identified by the DNS name in its certificate."""

    COORDINATOR = "coordinator.outrider.internal"
    TARGET = "target.outrider.internal"
    DRAFT = "draft.outrider.internal"
    REDIS = "redis.outrider.internal"
    CLIENT = "client.outrider.internal"  # a load balancer or a service that calls the coordinator
    OPERATOR = "operator.outrider.internal"  # people, and monitoring


ANY_ROLE: Final = frozenset(Role)
"""All parts of the system: for calls that reveal nothing about requests."""


@dataclass(frozen=True, slots=True)
class KeyMaterial:
    """Contents of a certificate folder; all of it PEM."""

    certificate_chain: bytes
    private_key: bytes
    authorities: bytes
    names: frozenset[str]  # DNS names of the certificate
    expires_at_s: float  # since the epoch

    @property
    def version(self) -> int:
        """Changes whenever a reading found something new."""
        return hash((self.certificate_chain, self.authorities))


class TlsFiles:
    """The certificates in one folder, kept up to date. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads the folder; raises ConfigurationError, which names the file."""
        self.folder = folder
        paths = [folder / name for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY)]
        self._files = WatchedFiles(paths, lambda: read_folder(folder))
        self._lock = threading.Lock()
        self._contexts: dict[int, tuple[int, ssl.SSLContext]] = {}  # by protocol: the version it was made from

    def current(self) -> KeyMaterial:
        """The newest complete contents."""
        return self._files.current()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server that admits only clients signed by the authority and presents the current
        certificate on every connection."""
        told = [self.current().version]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            material = self.current()
            if material.version == told[0]:
                return None  # unchanged
            told[0] = material.version
            return _server_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(self.current()),
            cast(Callable[[], grpc.ServerCertificateConfiguration], fetch),  # the stubs do not permit None
            require_client_authentication=True,
        )

    def server_context(self) -> ssl.SSLContext:
        """The same for servers other than gRPC's; must be called for every connection."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For connections to gRPC servers of other parts without gRPC's client; must be called for every one."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        material = self.current()
        with self._lock:
            known = self._contexts.get(protocol)
            if known is not None and known[0] == material.version:
                return known[1]
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            if protocol == ssl.PROTOCOL_TLS_CLIENT:
                context.set_alpn_protocols(["h2"])
            try:
                context.load_cert_chain(self.folder / CERTIFICATE, self.folder / PRIVATE_KEY)
                # Comments between certificates may be in any language.
                context.load_verify_locations(cadata=material.authorities.decode("ascii", "ignore"))
            except (OSError, ValueError):  # in the middle of a rotation
                if known is None:
                    raise
                return known[1]
            self._contexts[protocol] = material.version, context
            return context


@dataclass(frozen=True, slots=True)
class Dialer:
    """Opens channels to other parts: over mutual TLS, or in plaintext where there are no certificates."""

    files: TlsFiles | None

    @property
    def version(self) -> int:
        """Changes when channels should be reopened, before the certificates of the current ones expire."""
        return 0 if self.files is None else self.files.current().version

    def open(
        self, address: str, role: Role, options: Iterable[tuple[str, int]], name: str | None = None
    ) -> grpc.aio.Channel:
        """Opens a channel to the part at `address`, host:port, whose certificate must have `name`, by default the
        role's."""
        if self.files is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        material = self.files.current()
        credentials = grpc.ssl_channel_credentials(
            material.authorities, material.private_key, material.certificate_chain
        )
        named: list[tuple[str, Any]] = [*options, ("grpc.ssl_target_name_override", name or role.value)]
        return grpc.aio.secure_channel(address, credentials, options=named)


PLAINTEXT: Final = Dialer(None)


class RoleCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Permits a call only if the caller's certificate names a role that may make it.

    A method without a rule is refused to everybody, so that a new one stays closed until it is given roles.
    """

    def __init__(self, permitted: Mapping[str, frozenset[Role]]) -> None:
        """`permitted` by method, /package.Service/Method; `ANY_ROLE` for what every part may call."""
        self._permitted = permitted

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # unknown method
            return cast(Any, handler)
        method = handler_call_details.method
        roles = self._permitted.get(method, frozenset())

        @asynccontextmanager
        async def admission(context: Any, read: Read) -> AsyncGenerator[Any]:
            names = names_of_peer(context)
            if not names & roles:
                expected, found = " or ".join(sorted(roles)) or "nobody", ", ".join(sorted(names)) or "none"
                raise Forbidden(f"{method} is for {expected}; the certificate of the caller names {found}")
            yield await read()

        return cast(Any, admitted(handler, admission))


def worker_name(role: Role, worker_id: str) -> str:
    """The DNS name that stands for a worker in a certificate. An id that is not a DNS label is hashed."""
    label = worker_id
    if not _LABEL.fullmatch(worker_id) or worker_id.startswith(_HASHED):
        label = _HASHED + hashlib.sha256(worker_id.encode()).hexdigest()[:40]
    return f"{label}.{role.value}"


def workers_named(names: Iterable[str], role: Role) -> frozenset[str]:
    """The DNS names of a certificate that stand for workers, without wildcards."""
    return frozenset(name for name in names if name.endswith(f".{role.value}") and not name.startswith("*"))


def names_of_certificate(der: bytes) -> frozenset[str]:
    """The DNS names of a certificate; none if they cannot be read."""
    return _dns_names(x509.load_der_x509_certificate(der))


def names_of_peer(context: grpc.aio.ServicerContext[Any, Any]) -> frozenset[str]:
    """The DNS names in the caller's certificate; empty without one."""
    # Not gRPC's own list of names: it has those of every kind, as far as their first NUL.
    return _names_in(b"".join(context.auth_context().get("x509_pem_cert", ())))


@lru_cache(maxsize=_PEERS_MAX)
def _names_in(pem: bytes) -> frozenset[str]:
    return _dns_names(x509.load_pem_x509_certificate(pem)) if pem else frozenset()


def _server_configuration(material: KeyMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.private_key, material.certificate_chain)], root_certificates=material.authorities
    )


def read_folder(folder: Path) -> KeyMaterial:
    """Reads a folder. Raises ConfigurationError for files that are missing, are not PEM or do not belong together."""
    chain, key, authorities = (_contents(folder / name) for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY))
    own = _certificates(folder / CERTIFICATE, chain)[0]
    _certificates(folder / AUTHORITY, authorities)
    try:
        private_key = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{folder / PRIVATE_KEY} is no unencrypted PEM private key") from error
    if private_key.public_key() != own.public_key():
        raise ConfigurationError(
            f"{folder / PRIVATE_KEY} is not the key of {folder / CERTIFICATE}; both must be of one issue"
        )
    return KeyMaterial(chain, key, authorities, _dns_names(own), own.not_valid_after_utc.timestamp())


def _dns_names(certificate: x509.Certificate) -> frozenset[str]:
    """The alternative names of the kind DNS, letter for letter."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):  # absent, or malformed
        return frozenset()
    return frozenset(extension.value.get_values_for_type(x509.DNSName))


def check_role(material: KeyMaterial, role: Role) -> None:
    """Raises ConfigurationError if peers would reject the certificate for this role."""
    if role not in material.names:
        found = ", ".join(sorted(material.names)) or "none"
        raise ConfigurationError(
            f"the certificate's DNS names are {found}, and {role} is not among them: nobody would accept it here"
        )


def check_worker_id(material: KeyMaterial, role: Role, worker_id: str) -> None:
    """Raises ConfigurationError if the certificate names worker ids but not this one."""
    named = workers_named(material.names, role)
    if named and worker_name(role, worker_id) not in named:
        raise ConfigurationError(
            f"the certificate is of {', '.join(sorted(named))}, and the worker's id is {worker_id}: no coordinator "
            "would use it; name the right --worker-id, or give it a certificate of its own"
        )


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no PEM certificate") from error


def _contents(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}); --tls-dir is a folder with {CERTIFICATE}, {PRIVATE_KEY} and "
            f"{AUTHORITY} (`outrider certificates` makes such folders)"
        ) from error
