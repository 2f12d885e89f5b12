"""`python -m command_line.certificates.cluster PREFIX PART …`: keeps the certificates of a release in its secrets.

The Helm chart runs it, once as a Job and then daily as a CronJob. The secret PREFIX-ca has the authority and its key,
PREFIX-PART-tls what the pods of a part mount. The chart has made these secrets without data, and their account may read
and change these alone. Kubelets bring what is new to the pods, which load it while they run.

Invariant: a certificate that serves for more than half of its days is left as it is, so that running it again, or
twice at once, changes nothing.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import http.client
import json
import os
import ssl
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from command_line.terminal import print_line
from outrider.errors import ConfigurationError, OutriderError
from outrider.security.certificate_authority import AUTHORITY_KEY, CertificateAuthority
from outrider.security.tls import AUTHORITY, CERTIFICATE, PRIVATE_KEY, KeyMaterial, Role, read_folder

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 20.0
ANSWER_BYTES_MAX: Final = 2 << 20  # a secret has 1 MiB at most

Files = Mapping[str, bytes]


class ApiError(OutriderError):
    """The API server refused a request, or did not answer. The next run tries again."""


@dataclass(frozen=True, slots=True)
class Part:
    """Role, names and days of the certificate of a part."""

    role: Role
    names: tuple[str, ...] = ()  # further ones
    days: int = 30


def part_of(name: str, prefix: str) -> Part:
    """Raises ConfigurationError for a part that there is not."""
    if name == "engine":  # attaches requests as a coordinator does, and receives hints as a target does
        return Part(Role.TARGET, (Role.COORDINATOR.value,))
    if name == "redis":  # reads its certificate at its start only
        return Part(Role.REDIS, (f"{prefix}-redis",), days=365)
    if name.upper() not in Role.__members__:
        raise ConfigurationError(f"there is no part {name}; there are engine, {', '.join(Role.__members__).lower()}")
    return Part(Role[name.upper()])


def is_due(found: KeyMaterial | None, part: Part, authority: x509.Certificate, now: datetime.datetime) -> bool:
    """Whether a part needs a new certificate: it has none of this authority with its names, or half of its days are
    over. Pure."""
    if found is None or not {part.role.value, *part.names} <= found.names:
        return True
    own = x509.load_pem_x509_certificate(found.certificate_chain)
    try:
        own.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return True
    if x509.load_pem_x509_certificate(found.authorities) != authority:
        return True
    return now >= own.not_valid_before_utc + (own.not_valid_after_utc - own.not_valid_before_utc) / 2


class Secrets:
    """The secrets of the pod's namespace, by the API that every pod is told of."""

    def __init__(self, address: tuple[str, int], account: Path = ACCOUNT) -> None:
        """Raises ConfigurationError if the account cannot be read."""
        try:
            self._token = (account / "token").read_text(encoding="ascii").strip()
            self._namespace = (account / "namespace").read_text(encoding="ascii").strip()
            self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ConfigurationError(
                f"{account} cannot be read: {error}; the pod needs automountServiceAccountToken"
            ) from error
        self._address = address

    def get(self, name: str) -> tuple[dict[str, bytes], str]:
        """The files of a secret, and its version. Raises ApiError."""
        secret = self._ask("GET", name)
        files = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
        return files, secret["metadata"]["resourceVersion"]

    def put(self, name: str, files: Files, version: str) -> None:
        """Changes files of a secret that still has this version. Raises ApiError."""
        data = {key: base64.b64encode(value).decode() for key, value in files.items()}
        self._ask("PATCH", name, {"metadata": {"resourceVersion": version}, "data": data})

    def _ask(self, method: str, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{self._namespace}/secrets/{name}"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/merge-patch+json"}
        host, port = self._address
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=self._tls)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found: dict[str, Any] = json.loads(answer.read(ANSWER_BYTES_MAX))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(
                f"{method} {path}: {error or type(error).__name__}; network policies have to permit the API server's "
                "own port (networkPolicy.apiServerPorts)"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise ApiError(f"{method} {path}: {answer.status}, {found.get('message', '')}")
        return found


def renew(secrets: Secrets, prefix: str, parts: Sequence[str], now: datetime.datetime | None = None) -> list[str]:
    """Makes what is due; returns the names of the parts that have new certificates.

    Raises ConfigurationError for a secret of another issuer, ApiError if a secret cannot be read or written.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = _authority(secrets, f"{prefix}-ca", folder)
        renewed = []
        for each in parts:
            part, secret, own = part_of(each, prefix), f"{prefix}-{each}-tls", folder / each
            files, version = secrets.get(secret)
            if is_due(_material(own, files), part, authority.certificate, now or datetime.datetime.now(datetime.UTC)):
                valid_for = datetime.timedelta(days=part.days)
                authority.issue(own, part.role, names=part.names, valid_for=valid_for, now=now)
                secrets.put(
                    secret, {file: (own / file).read_bytes() for file in (CERTIFICATE, PRIVATE_KEY, AUTHORITY)}, version
                )
                renewed.append(each)
        return renewed


def _authority(secrets: Secrets, name: str, folder: Path) -> CertificateAuthority:
    """The authority that the secret has, or a new one. Two runs at once do not make two: the second's change fails."""
    files, version = secrets.get(name)
    if files and not {AUTHORITY, AUTHORITY_KEY} <= files.keys():
        raise ConfigurationError(
            f"the secret {name} has {', '.join(sorted(files))} and no {AUTHORITY_KEY}: its authority is another "
            "issuer's, such as cert-manager's (tls.issuer). To begin with a new one, delete the data of the secret"
        )
    for file, content in files.items():
        (folder / file).write_bytes(content)
    authority = CertificateAuthority.open(folder)
    if not files:
        secrets.put(name, {file: (folder / file).read_bytes() for file in (AUTHORITY, AUTHORITY_KEY)}, version)
    return authority


def _material(folder: Path, files: Files) -> KeyMaterial | None:
    """Reads the files of a secret; None if they are incomplete or damaged."""
    folder.mkdir()
    for file in (CERTIFICATE, PRIVATE_KEY, AUTHORITY):
        (folder / file).write_bytes(files.get(file, b""))
    try:
        return read_folder(folder)
    except ConfigurationError:
        return None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m command_line.certificates.cluster")
    parser.add_argument("prefix", help="of the secrets' names")
    parser.add_argument("parts", nargs="+", help="such as target")
    given = parser.parse_args(words)
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
        renewed = renew(Secrets((host, port)), given.prefix, given.parts)
    except KeyError as error:
        print_line(f"certificates: {error} is not set: this runs in a pod of Kubernetes", stderr=True)
        return 2
    except OutriderError as error:
        print_line(f"certificates: {error}", stderr=True)
        return 1
    print_line(f"new certificates: {', '.join(renewed) or 'none is due'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
