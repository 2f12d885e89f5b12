"""An OpenID Connect provider on this machine: discovery, keys that rotate, outages, answers that are late."""

from __future__ import annotations

import functools
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from coordinator.access import identity_provider

AUDIENCE = "outrider"
NONE: Any = object()
"""A claim with this value is left out."""
HANG_MAX_S = 30.0


@functools.cache
def private_key(kind: str, name: str = "") -> Any:
    """A private key; the same for the same arguments, since they take long to make."""
    match kind:
        case "RSA":
            return rsa.generate_private_key(65537, 2048)
        case "weak RSA":
            return rsa.generate_private_key(65537, 1024)
        case "Ed25519":
            return ed25519.Ed25519PrivateKey.generate()
    curves = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
    return ec.generate_private_key(curves[kind])


def jwk(kind: str, kid: str | None, name: str = "", **changes: Any) -> dict[str, Any]:
    """A public key as a key set has it."""
    public = private_key(kind, name).public_key()
    kinds: dict[str, Any] = {"RSA": RSAAlgorithm, "weak RSA": RSAAlgorithm, "Ed25519": OKPAlgorithm}
    entry = dict(json.loads(kinds.get(kind, ECAlgorithm).to_jwk(public)))
    entry |= ({} if kid is None else {"kid": kid}) | changes
    return {name: value for name, value in entry.items() if value is not NONE}


def claims(issuer: str, **changes: Any) -> dict[str, Any]:
    """Claims of a valid token, changed."""
    now_s = int(time.time())
    usual = {"iss": issuer, "aud": AUDIENCE, "sub": "search", "exp": now_s + 600, "iat": now_s}
    return {name: value for name, value in ({**usual, "scope": "openid outrider:generate"} | changes).items()
            if value is not NONE}  # fmt: skip


def signed(payload: Mapping[str, Any], kind: str = "P-256", name: str = "", *, alg: str = "", **header: Any) -> str:
    """A token. The header names the key `kid` unless another, or NONE, is given."""
    algorithm = alg or {"RSA": "RS256", "P-256": "ES256", "P-384": "ES384", "Ed25519": "EdDSA"}[kind]
    given = {key: value for key, value in ({"kid": "kid"} | header).items() if value is not NONE}
    content = json.dumps(payload).encode()  # PyJWT's own `encode` refuses claims that it would refuse to read
    return jwt.PyJWS().encode(content, private_key(kind, name), algorithm, given)


class LocalProvider:
    """A provider whose behaviour tests change while it runs."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.name = "first"  # of the private key that signs
        self.kid = "kid"
        self.keys = [jwk("P-256", "kid", "first")]
        self.status = 200
        self.released = threading.Event()  # answers wait for it
        self.released.set()
        self.discovery: dict[str, Any] = {}  # changes of the document
        self.padding = ""  # more bytes of an answer
        self.asked: list[str] = []  # paths
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                provider.released.wait(HANG_MAX_S)
                document: Any = {"keys": provider.keys}
                if self.path.endswith("/.well-known/openid-configuration"):
                    document = {"issuer": provider.issuer, "jwks_uri": f"{provider.issuer}/keys"} | provider.discovery
                content = (json.dumps(document) + provider.padding).encode()
                self.send_response(provider.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Clients that give up are no error."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.issuer = f"{scheme}://127.0.0.1:{self._server.server_port}/realms/main"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def num_looks(self) -> int:
        """How often the keys were asked for."""
        return sum(path.endswith("/keys") for path in self.asked)

    def rotate(self, name: str = "second") -> None:
        """Signs with a new key from now on, and withdraws the old one."""
        self.name, self.kid = name, f"kid of {name}"
        self.keys = [jwk("P-256", self.kid, name)]

    def token(self, **changes: Any) -> str:
        """A valid token, but for the changes of its claims."""
        return signed(claims(self.issuer, **changes), name=self.name, kid=self.kid)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a coordinator that accepts its tokens."""
        return {"oidc_issuer": self.issuer, "oidc_audience": AUDIENCE}


@contextmanager
def local_provider(tls: ssl.SSLContext | None = None) -> Iterator[LocalProvider]:
    provider = LocalProvider(tls)
    try:
        yield provider
    finally:
        provider.close()


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for the provider as long as a busy machine needs, and asks it again at once."""
    for name in ("START_WAIT_S", "FETCH_TIMEOUT_S", "WAIT_S"):
        monkeypatch.setattr(identity_provider, name, HANG_MAX_S)
    monkeypatch.setattr(identity_provider, "AGAIN_S", 0.02)


def bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}
