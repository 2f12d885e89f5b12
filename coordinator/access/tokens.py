"""Tokens of an identity provider: which ones are valid, and which tenant and scopes they name. Pure, but for the clock
that PyJWT reads.

A token is a JSON Web Token (RFC 7519) that the provider has signed with an asymmetric key of its key set (RFC 7517). It
has to name this issuer, this audience, an expiry and a tenant. Keys in a token's header are never used.

    scope, scp, roles      outrider:generate, outrider:metrics; others are ignored
    the tenant's claim     `sub`, or another name, or a JSON Pointer (RFC 6901): /kubernetes.io/namespace
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from coordinator.access.api_keys import Scope

TOKEN_CHARS_MAX: Final = 16 << 10
TENANT_CHARS_MAX: Final = 256  # as for keys
LEEWAY_S: Final = 30.0
"""How far the clocks of the provider and of this machine may differ."""
SCOPE_PREFIX: Final = "outrider:"
KEYS_MAX: Final = 100
"""Keys of a provider that are read; the rest of a longer set is ignored."""
_RSA_BITS_MIN: Final = 2048
_RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_EC_ALGORITHMS: Final = {"secp256r1": ("ES256",), "secp384r1": ("ES384",)}
ALGORITHMS: Final = frozenset({*_RSA_ALGORITHMS, "ES256", "ES384", "EdDSA"})
"""Permitted algorithms: all asymmetric, so that nothing public can sign."""
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""Types of tokens (`typ`) that grant access; a logout token of the same provider does not."""
_FORM: Final = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
_SHOWN_CHARS_MAX: Final = 80


class Reason(StrEnum):
    """Why a token is refused."""

    TOO_LONG = "too_long"
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    CLAIM = "claim"
    TENANT = "tenant"


class TokenRefused(Exception):
    """A token is not valid. `detail` is for the log: it quotes no part of the token but single values."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The contents of a valid token."""

    tenant: str
    scopes: frozenset[Scope]  # empty: the token names none of ours
    expires_s: float  # since 1970


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key of the provider, and the algorithms that it verifies."""

    kid: str | None
    key: RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
    algorithms: tuple[str, ...]


class SigningKeys:
    """The public keys of a provider."""

    def __init__(self, keys: Sequence[SigningKey], fingerprint: str = "") -> None:
        self._keys = tuple(keys)
        self.fingerprint = fingerprint
        """Differs for other keys."""

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def parse(cls, document: Any) -> SigningKeys:
        """Reads a JSON Web Key Set. Keys for other purposes, of other kinds or too weak are left out. Raises ValueError
        if none is left."""
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise ValueError("the key set has no list `keys`")
        entries = entries[:KEYS_MAX]
        keys = [key for each in entries if (key := _signing_key(each)) is not None]
        if not keys:
            raise ValueError("the key set has no key for a permitted signature algorithm")
        return cls(keys, hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest())

    def find(self, kid: str | None, algorithm: str) -> SigningKey:
        """Finds the key that has to verify a token. One without a `kid` needs a set with a single fitting key. Raises
        TokenRefused."""
        named = [key for key in self._keys if kid is None or key.kid == kid]
        fitting = [key for key in named if algorithm in key.algorithms]
        if named and not fitting:
            raise TokenRefused(Reason.ALGORITHM, f"its key is not for {algorithm}")
        if not fitting:
            raise TokenRefused(Reason.UNKNOWN_KEY, f"the provider has no key {_shown(kid)}")
        if kid is None and len(fitting) > 1:
            raise TokenRefused(Reason.UNKNOWN_KEY, "it names no key, and the provider has several")
        return fitting[0]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The claims that a token needs to be valid here."""

    issuer: str
    audience: str
    tenant_claim: str = "sub"

    def verify(self, token: str, keys: SigningKeys) -> VerifiedToken:
        """Verifies a token with the provider's keys. Raises TokenRefused."""
        if len(token) > TOKEN_CHARS_MAX:
            raise TokenRefused(Reason.TOO_LONG, f"it has {len(token)} characters, of at most {TOKEN_CHARS_MAX}")
        try:
            key, algorithm = _key_for(token, keys)
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self.audience,
                issuer=self.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            return VerifiedToken(
                _tenant(claims, self.tenant_claim), scopes_of(claims), float(min(claims["exp"], 1 << 53))
            )
        except jwt.ExpiredSignatureError:
            raise TokenRefused(Reason.EXPIRED, "it has expired") from None
        except jwt.ImmatureSignatureError:
            raise TokenRefused(Reason.NOT_YET_VALID, "it is not valid yet (nbf or iat)") from None
        except jwt.InvalidAudienceError:
            raise TokenRefused(Reason.AUDIENCE, f"its audience is not {self.audience}") from None
        except jwt.InvalidIssuerError:
            raise TokenRefused(Reason.ISSUER, f"its issuer is not {self.issuer}") from None
        except jwt.MissingRequiredClaimError as error:
            raise TokenRefused(Reason.CLAIM, f"it has no claim {error.claim}") from None
        except jwt.InvalidSignatureError:
            raise TokenRefused(Reason.SIGNATURE, "its signature is not that of the key it names") from None
        # PyJWT reads a payload whatever it is: numbers beyond all bounds, lists within lists.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TokenRefused(Reason.MALFORMED, f"it cannot be read ({type(error).__name__})") from None


def is_token(credential: str) -> bool:
    """Whether a bearer credential has the form of a token, three parts in base64url. No API key has it."""
    return _FORM.fullmatch(credential) is not None


def scopes_of(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """The scopes that `scope` (RFC 8693), `scp` (Entra, Okta) and `roles` (Entra, for applications) name."""
    found: set[str] = set()
    for name in ("scope", "scp", "roles"):
        value = claims.get(name)
        words = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
        found.update(each for each in words if isinstance(each, str))
    return frozenset(scope for scope in Scope if SCOPE_PREFIX + scope in found)


def _key_for(token: str, keys: SigningKeys) -> tuple[SigningKey, str]:
    header = jwt.get_unverified_header(token)
    algorithm, kind = header.get("alg"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenRefused(Reason.ALGORITHM, f"its algorithm {_shown(algorithm)} is not permitted")
    if "crit" in header or not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise TokenRefused(Reason.MALFORMED, f"it is a token of another kind: {_shown(kind)}")
    return keys.find(header.get("kid"), algorithm), algorithm


def _tenant(claims: Mapping[str, Any], claim: str) -> str:
    value: Any = claims
    # A claim may be named by a URL, which has slashes, too; but it does not begin with one.
    for part in claim[1:].split("/") if claim.startswith("/") else [claim]:
        name = part.replace("~1", "/").replace("~0", "~") if claim.startswith("/") else part
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        raise TokenRefused(Reason.TENANT, f"its claim {claim} is missing or no text")
    if len(value) > TENANT_CHARS_MAX or not value.isprintable():
        raise TokenRefused(Reason.TENANT, f"its claim {claim} is too long, or has control characters")
    return value


def _signing_key(entry: Any) -> SigningKey | None:
    """A key of a set if it can verify tokens."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    kid = entry.get("kid")
    operations = entry.get("key_ops", ["verify"])
    if not isinstance(kid, str | None) or not isinstance(operations, list) or "verify" not in operations:
        return None
    try:
        key = jwt.PyJWK(entry).key
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    algorithms: Sequence[str] = ()
    if isinstance(key, RSAPublicKey) and key.key_size >= _RSA_BITS_MIN:
        algorithms = _RSA_ALGORITHMS
    elif isinstance(key, EllipticCurvePublicKey):
        algorithms = _EC_ALGORITHMS.get(key.curve.name, ())
    elif isinstance(key, Ed25519PublicKey):
        algorithms = ("EdDSA",)
    else:
        return None
    algorithms = tuple(each for each in algorithms if entry.get("alg", each) == each)
    return SigningKey(kid, key, algorithms) if algorithms else None


def _shown(value: Any) -> str:
    """A value of an unverified token, on one line of bounded length."""
    return ascii(value)[:_SHOWN_CHARS_MAX]
