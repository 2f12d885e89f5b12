"""API keys: each names a tenant, its scopes and its limits. Pure but for reading the file.

    [tenants.search]                      # limits are optional and apply to all keys of a tenant together
    requests_per_minute = 600
    tokens_per_minute = 200000            # prompts and output
    max_concurrent_sequences = 64         # waiting or running; a request with n (best_of) sequences counts n
    priority_min = -5                     # lower goes first, before other tenants; default 0
    token_scopes = ["generate"]           # for tokens of an identity provider that name no scope; default none

    [[keys]]
    tenant = "search"
    sha256 = "5f3c..."                    # digest of the key, in hexadecimal
    scopes = ["generate"]                 # the default; "metrics" reads /metrics
    expires = 2027-06-30T00:00:00Z        # optional
    models = ["small"]                    # optional: the only ones it is for, by the names that /v1/models lists
    shares_prefixes = false               # true: prompts' KV is shared with all such keys, see below
    note = "ranking service"              # optional, for people

A damaged file that is read again revokes keys rather than keep them. Each readable entry counts. A key whose entry is
missing or unreadable is refused. A new key is refused if its tenant's limits may be part of the damage. If nothing can
be read, the previous keys work for GRACE_S; after that nobody is admitted until the file is readable.

A prompt with a cached prefix is answered sooner, and `cached_tokens` reports the prefix. So tenants whose keys set
`shares_prefixes` can find out which prompts the others of them sent. Without it a tenant shares only with itself.

To a key that names its models all others do not exist: not in a list, a batch, a stored response or a tokenizer's call
(`coordinator.service.model_catalog`).

A key is 256 random bits, so a plain SHA-256 does not reveal it. Slow hashes are for passwords that people choose.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
import secrets
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import ConfigurationError, Forbidden, Unauthenticated, Unavailable
from outrider.security.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

GRACE_S: Final = 900.0
"""How long keys keep working after their file became unreadable. A key that should be revoked works as long, so the
period is no longer than people need to answer an alert. Until then a secret applied by mistake stops nobody."""
KEY_PREFIX: Final = "or-"
KEY_CHARS_MAX: Final = 128
_FILE_BYTES_MAX: Final = 4 << 20
_RETRY_AFTER_S: Final = 30.0


class Scope(StrEnum):
    """A permission that a key grants."""

    GENERATE = "generate"
    METRICS = "metrics"


class TenantLimits(BaseModel):
    """Limits of one tenant, over all its keys, tokens and all coordinators; None: unlimited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    max_concurrent_sequences: Annotated[int, Field(ge=1)] | None = None
    priority_min: Annotated[int, Field(le=0)] = 0
    token_scopes: frozenset[Scope] = frozenset()
    """Scopes of the tenant's tokens that name none of ours (`coordinator.access.tokens`)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request."""

    tenant: str | None  # None: keys are not in use, so the request may name it
    scopes: frozenset[Scope]
    limits: TenantLimits = field(default_factory=TenantLimits)
    shares_prefixes: bool = False  # shares its prompts' KV with all other such keys
    models: frozenset[str] | None = None  # names of those that it may use; None: all

    def may_use(self, model: str) -> bool:
        """Whether the model that targets serve under this name is there for the caller."""
        return self.models is None or model in self.models

    def check(self, scope: Scope) -> None:
        """Requires a scope. Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(f"this credential is not good for {scope}; its scopes are {_listed(self.scopes)}")


ANYBODY: Final = Caller(None, frozenset(Scope))
"""The caller of every request when keys are not in use."""


ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Annotated[str, Field(min_length=1, max_length=256)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scopes: frozenset[Scope] = frozenset({Scope.GENERATE})
    expires: AwareDatetime | None = None
    models: Annotated[frozenset[ModelName], Field(min_length=1)] | None = None
    shares_prefixes: bool = False
    note: str = ""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenants: dict[str, TenantLimits] = Field(default_factory=dict)
    keys: list[_Key] = Field(default_factory=list)


class KeyRing:
    """The API keys and tenant limits of one file."""

    def __init__(
        self,
        keys: Mapping[str, _Key],
        tenants: Mapping[str, TenantLimits],
        damage: Sequence[str] = (),
        *,
        has_lost_limits: bool = False,
    ) -> None:
        self._keys = keys
        self._tenants = tenants
        self._has_lost_limits = has_lost_limits  # of tenants that are not known
        self.damage = tuple(damage)
        """Describes each unreadable part of the file in one sentence."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an undamaged file. Raises ValueError, whose message quotes no key."""
        try:
            parsed = _File.model_validate(tomllib.loads(text))
        except ValidationError as error:
            raise ValueError(_described(error)) from None
        keys = {key.sha256: key for key in parsed.keys}
        if len(keys) < len(parsed.keys):
            raise ValueError("a key is listed twice")
        return cls(keys, parsed.tenants)

    @classmethod
    def salvage(cls, text: str, before: KeyRing) -> Self:
        """Reads the intact parts of a damaged file; `before` is the last ring read. Raises ValueError if no key can be
        read."""
        found = _Salvage()
        for block in _blocks(text):
            found.take(block)
        tenants = {**before._tenants, **found.tenants}
        keys = {
            digest: key
            for digest, key in found.keys.items()
            if digest not in found.closed
            and (digest in before._keys or key.tenant in tenants or not found.has_lost_limits)
        }
        if not keys:
            raise ValueError(f"no key of it can be read: {'; '.join(found.damage[:5])}")
        return cls(keys, tenants, found.damage, has_lost_limits=found.has_lost_limits)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: str, now: datetime.datetime) -> Caller:
        """Finds the owner of a key. Raises Unauthenticated."""
        key = self._keys.get(digest(token)) if len(token) <= KEY_CHARS_MAX else None
        if key is None:
            raise Unauthenticated("this API key is not known")
        if key.expires is not None and now >= key.expires:
            raise Unauthenticated(f"this API key expired at {key.expires:%Y-%m-%d %H:%M} UTC")
        limits = self._tenants.get(key.tenant, TenantLimits())
        return Caller(key.tenant, key.scopes, limits, key.shares_prefixes, key.models)

    def limits_of(self, tenant: str) -> TenantLimits:
        """The limits of a tenant that a token names. Raises Unavailable if they may be part of the damage."""
        limits = self._tenants.get(tenant)
        if limits is None and self._has_lost_limits:
            raise Unavailable("the limits of this tenant cannot be read here at the moment", _RETRY_AFTER_S)
        return limits or TenantLimits()


class _Salvage:
    """Collects the readable entries of a damaged key file."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        self.tenants: dict[str, TenantLimits] = {}
        self.closed: set[str] = set()  # digests named by an unreadable entry or by two entries
        self.damage: list[str] = []
        self.has_lost_limits = False

    def take(self, block: str) -> None:
        """Reads one part of the file, which need not be valid TOML."""
        try:
            tables = tomllib.loads(block)
        except (ValueError, RecursionError) as error:
            self._lose("", error)
            self.closed.update(re.findall("[0-9a-f]{64}", block))
            self.has_lost_limits |= not block.lstrip().startswith("[[keys]]")
            return
        entries, limits = tables.pop("keys", []), tables.pop("tenants", {})
        for name in tables:
            self._lose(name, ValueError("there is no such table"))
        for number, each in enumerate(entries if isinstance(entries, list) else [entries]):
            try:
                key = _Key.model_validate(each)
            except ValidationError as error:
                self._lose(f"keys.{number}", error)
                self.closed.update(re.findall("[0-9a-f]{64}", str(each)))
                continue
            if key.sha256 in self.keys:
                self._lose(f"keys.{number}", ValueError("a key is listed twice"))
                self.closed.add(key.sha256)
            self.keys[key.sha256] = key
        for name, each in (limits if isinstance(limits, dict) else {"": limits}).items():
            try:
                self.tenants[name] = TenantLimits.model_validate(each)
            except ValidationError as error:
                self._lose(f"tenants.{name}", error)
                self.has_lost_limits = True

    def _lose(self, where: str, error: Exception) -> None:
        what = _described(error) if isinstance(error, ValidationError) else str(error)
        self.damage.append(f"{where}: {what}" if where else what)


def _blocks(text: str) -> list[str]:
    """Splits a file that is not TOML at its table headers, so that one error spoils one entry."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return [block for block in re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE) if block.strip()]
    return [text]


class KeyFile:
    """A file of API keys, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises ConfigurationError for any damage, because no client is served yet."""
        self._path = path
        self._ring: KeyRing | None = None
        self._files = WatchedFiles([path], self._read)

    @property
    def is_degraded(self) -> bool:
        """Whether any part of the file cannot be read."""
        return self._files.refused_for_s() is not None or bool(self._files.current().damage)

    def _read(self) -> KeyRing:
        self._ring = _read(self._path, self._ring)
        if self._ring.damage:
            logger.error(
                "the file of API keys %s has damage; keys whose entries cannot be read are closed: %s",
                self._path,
                "; ".join(self._ring.damage[:5]),
            )
        return self._ring

    def authenticate(self, authorization: str | None) -> Caller:
        """Finds the caller by an `Authorization` header. Raises Unauthenticated, or Unavailable once the file has been
        unreadable for GRACE_S."""
        key = bearer_of(authorization, "an API key is needed: Authorization: Bearer KEY")
        return self._current().find(key, datetime.datetime.now(datetime.UTC))

    def limits_of(self, tenant: str) -> TenantLimits:
        """The limits of a tenant that a token names. Raises Unavailable if they cannot be read."""
        return self._current().limits_of(tenant)

    def _current(self) -> KeyRing:
        if (self._files.refused_for_s() or 0.0) > GRACE_S:
            raise Unavailable("the API keys cannot be read here at the moment; try again later", _RETRY_AFTER_S)
        return self._files.current()


def bearer_of(authorization: str | None, what_is_needed: str) -> str:
    """The credential of an `Authorization` header. Raises Unauthenticated."""
    if authorization is None:
        raise Unauthenticated(what_is_needed)
    scheme, _, credential = authorization.partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise Unauthenticated("the Authorization header has to be: Bearer KEY")
    return credential.strip()


def digest(token: str) -> str:
    """Hashes a key as the file stores it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def new_key() -> str:
    """Generates a key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def entry(
    token: str,
    tenant: str,
    scopes: frozenset[Scope],
    expires: datetime.datetime | None,
    note: str,
    *,
    models: Collection[str] = (),
    shares_prefixes: bool = False,
) -> str:
    """Formats a key as an entry to append to a file; without `models` it is for all. Raises ValueError for values that
    a file cannot represent."""
    lines = ["[[keys]]", f"tenant = {_quoted(tenant)}", f'sha256 = "{digest(token)}"']
    lines.append(f"scopes = [{', '.join(_quoted(scope) for scope in sorted(scopes))}]")
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}")
    if models:
        lines.append(f"models = [{', '.join(_quoted(model) for model in sorted(set(models)))}]")
    if shares_prefixes:
        lines.append("shares_prefixes = true")
    if note:
        lines.append(f"note = {_quoted(note)}")
    text = "\n".join(lines) + "\n"
    KeyRing.parse(text)
    return text


def _read(path: Path, before: KeyRing | None) -> KeyRing:
    """Reads a file of keys. `before` is the last ring read; None: damage is refused. Raises ConfigurationError."""
    grace = "" if before is None else f"; keys that were read before work for {GRACE_S / 60:.0f} minutes"
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise ValueError(f"it is longer than {_FILE_BYTES_MAX} bytes")
        decoded = text.decode()
        try:
            return KeyRing.parse(decoded)
        except (ValueError, RecursionError):
            if before is None:
                raise
            return KeyRing.salvage(decoded, before)
    except OSError as error:
        raise ConfigurationError(
            f"the file of API keys {path} cannot be read ({error.strerror}); `outrider keys` makes one{grace}"
        ) from error
    except (ValueError, RecursionError) as error:  # also for bytes that are not TOML or not UTF-8
        raise ConfigurationError(f"the file of API keys {path} is not valid: {error}{grace}") from None


def _quoted(text: str) -> str:
    """Quotes a basic string of TOML, which equals JSON's except for characters beyond the first plane."""
    return json.dumps(text, ensure_ascii=False)


def _described(error: ValidationError) -> str:
    """Describes an error without its values, which may be misplaced secrets."""
    details: list[dict[str, Any]] = [dict(each) for each in error.errors(include_input=False, include_url=False)]
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details[:5])


def _listed(scopes: frozenset[Scope]) -> str:
    return ", ".join(sorted(scopes)) or "none"
