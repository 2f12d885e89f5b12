"""Accounts of pods that call the API server: their tokens, and the server's certificate."""

from __future__ import annotations

import datetime
import secrets
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import CERTIFICATE, PRIVATE_KEY, Role
from tests.cluster.api_server import Request, is_permitted
from tests.cluster.pod_plan import NAMESPACE
from tests.k8s.pods import Object


class Accounts:
    """Knows whose a token is."""

    def __init__(self, host: str) -> None:
        """host: the address at which the API server has a certificate."""
        self._authority = CertificateAuthority.make()
        self._by_token: dict[str, str] = {}
        self.server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._authority.issue(folder, Role.OPERATOR, names=(host,), valid_for=datetime.timedelta(days=1))
            self.server_tls.load_cert_chain(folder / CERTIFICATE, folder / PRIVATE_KEY)

    def files(self, account: str) -> Mapping[str, bytes]:
        """Files of a pod of this account: a token of its own, the authority of the server, and the namespace."""
        token = secrets.token_hex(16)
        self._by_token[token] = account
        authority = self._authority.certificate.public_bytes(Encoding.PEM)
        return {"token": token.encode(), "ca.crt": authority, "namespace": NAMESPACE.encode()}

    def may(self, objects: Sequence[Object], request: Request) -> bool:
        account = self._by_token.get(request.token)
        return account is not None and is_permitted(objects, account, request)
