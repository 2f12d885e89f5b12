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

A file that has damage when it is read again takes keys away rather than leave them: each entry that can be read counts,
a key whose entry is gone or cannot be read is closed, and no new key is let in whose tenant's limits may be among the
damage. Where nothing can be read, the keys of before work for GRACE_S, and then nobody is let in until there is a file.

A prompt whose beginning is cached is answered sooner, and its `cached_tokens` say so: tenants whose keys have
`shares_prefixes` can find out what prompts the others of them sent. Without it each tenant shares with itself alone.

A key is 256 random bits, so its plain SHA-256 tells nothing about it: slow hashes are for passwords that people choose.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import ConfigurationError, Forbidden, Unauthenticated, Unavailable
from outrider.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

GRACE_S: Final = 900.0
"""How long keys work on when nothing of their file can be read any more. A key that was to be revoked works on for as
long, so it is no longer than people need to answer an alert; a secret that was applied by mistake stops nobody until
then."""
KEY_PREFIX: Final = "or-"
KEY_CHARS_MAX: Final = 128
_FILE_BYTES_MAX: Final = 4 << 20
_RETRY_AFTER_S: Final = 30.0


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

    def __init__(
        self, keys: Mapping[str, _Key], tenants: Mapping[str, TenantLimits], damage: Sequence[str] = ()
    ) -> None:
        self._keys = keys
        self._tenants = tenants
        self.damage = tuple(damage)
        """What of the file could not be read, a sentence each."""

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

    @classmethod
    def salvage(cls, text: str, before: KeyRing) -> Self:
        """What can be read of a file with damage, where `before` is what was read last. Raises ValueError where no key
        can be read."""
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
        return cls(keys, tenants, found.damage)

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


class _Salvage:
    """What has been found in a file with damage so far."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        self.tenants: dict[str, TenantLimits] = {}
        self.closed: set[str] = set()  # digests that an unreadable entry names, or two entries
        self.damage: list[str] = []
        self.has_lost_limits = False

    def take(self, block: str) -> None:
        """A part of the file that may be TOML."""
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
    """All of it where it is TOML; else from each header to the next, so that one slip spoils one entry."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return [block for block in re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE) if block.strip()]
    return [text]


class KeyFile:
    """A file of keys, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError for a file with any damage: nobody is being served yet."""
        self._path = path
        self._ring: KeyRing | None = None
        self._files = WatchedFiles([path], self._read)

    @property
    def is_degraded(self) -> bool:
        """Whether the file cannot be read, or not all of it."""
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
        """By the value of an `Authorization` header. Raises Unauthenticated, and Unavailable where there has been no
        file for too long."""
        if authorization is None:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("the Authorization header has to be: Bearer KEY")
        if (self._files.refused_for_s() or 0.0) > GRACE_S:
            raise Unavailable("the API keys cannot be read here at the moment; come back", _RETRY_AFTER_S)
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


def _read(path: Path, before: KeyRing | None) -> KeyRing:
    """Raises ConfigurationError. `before` is what was read last; None: there has to be no damage."""
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
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8, included
        raise ConfigurationError(f"the file of API keys {path} is not valid: {error}{grace}") from None


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
