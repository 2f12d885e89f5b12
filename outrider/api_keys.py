"""API keys: who may ask, on whose behalf, and how much. Pure but for reading the file.

    [tenants.search]                      # limits are optional, and hold for all keys of a tenant together
    requests_per_minute = 600
    tokens_per_minute = 200000            # prompts and output
    max_concurrent_sequences = 64         # at once, waiting or running; a request of n (best_of) sequences counts n
    priority_min = -5                     # lower goes first, before other tenants; without it nobody goes below 0

    [[keys]]
    tenant = "search"
    sha256 = "5f3c..."                    # of the key, in hexadecimal
    scopes = ["generate"]                 # what is left out is ["generate"]; "metrics" reads /metrics
    expires = 2027-06-30T00:00:00Z        # optional
    shares_prefixes = false               # true: KV of prompts is shared with all keys that say so, see below
    note = "ranking service"              # optional, for people

A prompt whose beginning is cached is answered sooner, and its `cached_tokens` say so: tenants whose keys have
`shares_prefixes` can find out what prompts the others of them sent. Without it each tenant shares with itself alone.

A key is 256 random bits, so its plain SHA-256 tells nothing about it: slow hashes are for passwords that people choose.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import ConfigurationError, Forbidden, Unauthenticated
from outrider.watched_files import WatchedFiles

KEY_PREFIX: Final = "or-"
KEY_CHARS_MAX: Final = 128
_FILE_BYTES_MAX: Final = 4 << 20


class Scope(StrEnum):
    """What a key is good for."""

    GENERATE = "generate"
    METRICS = "metrics"


class TenantLimits(BaseModel):
    """What a tenant may use, all its keys and all coordinators together; None: as much as there is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    max_concurrent_sequences: Annotated[int, Field(ge=1)] | None = None
    priority_min: Annotated[int, Field(le=0)] = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str | None  # None: nobody knows, so the request may say
    scopes: frozenset[Scope]
    limits: TenantLimits = field(default_factory=TenantLimits)
    shares_prefixes: bool = False  # its prompts' KV, with all other keys that say so

    def check(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(f"this API key is not good for {scope}; its scopes are {_listed(self.scopes)}")


ANYBODY: Final = Caller(None, frozenset(Scope))
"""Everybody, where keys are not in use."""


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Annotated[str, Field(min_length=1, max_length=256)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scopes: frozenset[Scope] = frozenset({Scope.GENERATE})
    expires: AwareDatetime | None = None
    shares_prefixes: bool = False
    note: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenants: dict[str, TenantLimits] = Field(default_factory=dict)
    keys: list[_Key] = Field(default_factory=list)


class KeyRing:
    """The keys of one file."""

    def __init__(self, keys: Mapping[str, _Key], tenants: Mapping[str, TenantLimits]) -> None:
        self._keys = keys
        self._tenants = tenants

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, which says what is wrong and quotes no key."""
        try:
            parsed = _File.model_validate(tomllib.loads(text))
        except ValidationError as error:
            raise ValueError(_described(error)) from None
        keys = {key.sha256: key for key in parsed.keys}
        if len(keys) < len(parsed.keys):
            raise ValueError("a key is listed twice")
        return cls(keys, parsed.tenants)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: str, now: datetime.datetime) -> Caller:
        """Whose key it is. Raises Unauthenticated."""
        key = self._keys.get(digest(token)) if len(token) <= KEY_CHARS_MAX else None
        if key is None:
            raise Unauthenticated("this API key is not known")
        if key.expires is not None and now >= key.expires:
            raise Unauthenticated(f"this API key expired at {key.expires:%Y-%m-%d %H:%M} UTC")
        limits = self._tenants.get(key.tenant, TenantLimits())
        return Caller(key.tenant, key.scopes, limits, key.shares_prefixes)


class KeyFile:
    """A file of keys, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError."""
        self._files = WatchedFiles([path], lambda: _read(path))

    def authenticate(self, authorization: str | None) -> Caller:
        """By the value of an `Authorization` header. Raises Unauthenticated."""
        if authorization is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("the Authorization header has to be: Bearer KEY")
        return self._files.current().find(token.strip(), datetime.datetime.now(datetime.UTC))


def digest(token: str) -> str:
    """As the file has it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """A key to hand out; 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def entry(
    token: str,
    tenant: str,
    scopes: frozenset[Scope],
    expires: datetime.datetime | None,
    note: str,
    *,
    shares_prefixes: bool = False,
) -> str:
    """The key's part of a file, to be appended. Raises ValueError for what the file could not hold."""
    lines = ["[[keys]]", f"tenant = {_quoted(tenant)}", f'sha256 = "{digest(token)}"']
    lines.append(f"scopes = [{', '.join(_quoted(scope) for scope in sorted(scopes))}]")
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}")
    if shares_prefixes:
        lines.append("shares_prefixes = true")
    if note:
        lines.append(f"note = {_quoted(note)}")
    text = "\n".join(lines) + "\n"
    KeyRing.parse(text)
    return text


def _read(path: Path) -> KeyRing:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise ValueError(f"it is longer than {_FILE_BYTES_MAX} bytes")
        return KeyRing.parse(text.decode())
    except OSError as error:
        raise ConfigurationError(
            f"the file of API keys {path} cannot be read ({error.strerror}); `outrider keys` makes one"
        ) from error
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8, included
        raise ConfigurationError(f"the file of API keys {path} is not valid: {error}") from None


def _quoted(text: str) -> str:
    """A basic string of TOML, which JSON's are but for characters beyond the first plane."""
    return json.dumps(text, ensure_ascii=False)


def _described(error: ValidationError) -> str:
    """Without the values, which may be secrets in the wrong place."""
    details: list[dict[str, Any]] = [
        dict(each) for each in error.errors(include_input=False, include_url=False)
    ]
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details[:5])


def _listed(scopes: frozenset[Scope]) -> str:
    return ", ".join(sorted(scopes)) or "none"
