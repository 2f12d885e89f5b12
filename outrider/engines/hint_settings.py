"""Settings of the hints of an engine that others have written. Pure.

An engine passes them on in a mapping of its own configuration, such as vLLM's `--additional-config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.addresses import is_unspecified, split_address, with_port
from outrider.errors import ConfigurationError
from outrider.security.tls import LOOPBACK_HOSTS
from outrider.settings import NETWORK, SECURITY, SPECULATION, SettingError, check, from_mapping, setting

MAX_DRAFT_WORKERS = 256


@dataclass(frozen=True, slots=True)
class HintSettings:
    """Addresses of draft workers, and of the port for their hints. Raises ConfigurationError, naming the key."""

    draft_workers: tuple[str, ...] = setting(
        (), "addresses of the draft workers that draft for this engine; each request is attached to the one with the "
        "fewest", NETWORK, "host:port", flag=None,
    )  # fmt: skip
    host: str = setting("127.0.0.1", "address on which hints are received", NETWORK, "address", flag=None)
    port: int = setting(
        0, "port on which hints are received; 0 picks a free one; engine n of a data-parallel group adds n",
        NETWORK, "port", at_least=0, at_most=65535, flag=None,
    )  # fmt: skip
    announce: str | None = setting(
        None, "host at which draft workers reach this engine", NETWORK, "host",
        shows="host; if that is all addresses, the one on the way to a draft worker", flag=None,
    )  # fmt: skip
    metrics_port: int | None = setting(
        None, "HTTP port of Outrider's own /metrics; 0 picks a free one; engine n of a data-parallel group adds n",
        NETWORK, "port", at_least=0, at_most=65535, shows="none", flag=None,
    )  # fmt: skip
    tls_dir: str | None = setting(
        None, "with tls.crt, tls.key and ca.crt, in the names of a target and a coordinator: mutual TLS with draft "
        "workers",
        SECURITY, "folder", flag=None,
    )  # fmt: skip
    is_insecure: bool = setting(
        False, "receive hints on another host than this machine's own without tls_dir", SECURITY, flag=None
    )
    hint_wait_ms: float = setting(
        10.0, "longest that a step waits for hints; 0: never", SPECULATION, "milliseconds", at_least=0, at_most=1000,
        flag=None, is_advanced=True,
    )  # fmt: skip
    may_pause: bool = setting(
        True, "pause draft workers whose hints cost more than they gain", SPECULATION, flag=None, is_advanced=True
    )

    def __post_init__(self) -> None:
        for name, each in asdict(self).items():
            self._check_kind(name, each)
        check(self)
        if not self.draft_workers:
            raise SettingError("draft_workers", "draft_workers is empty; name at least one draft worker as HOST:PORT")
        if len(self.draft_workers) > MAX_DRAFT_WORKERS:
            raise SettingError("draft_workers", f"draft_workers has more than {MAX_DRAFT_WORKERS} addresses")
        for address in self.draft_workers:
            try:
                split_address(address)
            except ValueError as error:
                raise SettingError("draft_workers", f"draft_workers: {error}") from error
        try:
            if self.reached_at is not None:
                with_port(self.reached_at, self.port or 1)
        except ValueError as error:
            raise SettingError("announce", f"draft workers cannot reach {self.reached_at}: {error}") from error
        if self.tls_dir is None and self.host not in LOOPBACK_HOSTS and not self.is_insecure:
            raise SettingError(
                "host",
                f"host {self.host} without tls_dir lets whoever reaches it in; give tls_dir, or is_insecure where the "
                "network itself keeps strangers out",
            )

    def _check_kind(self, name: str, value: Any) -> None:
        """Raises SettingError where JSON has another type than the field."""
        if name == "draft_workers":
            is_right = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        elif name in ("port", "metrics_port"):
            is_right = value is None or (isinstance(value, int) and not isinstance(value, bool))
        elif name == "hint_wait_ms":
            is_right = isinstance(value, (int, float)) and not isinstance(value, bool)
        elif name in ("is_insecure", "may_pause"):
            is_right = isinstance(value, bool)
        else:
            is_right = value is None or isinstance(value, str)
        if not is_right or (value is None and name in ("host", "port")):
            raise SettingError(name, f"{name} is {value!r}, which is of the wrong type")

    @property
    def reached_at(self) -> str | None:
        """The host that draft workers are told; None: this machine's own address on the way to each."""
        return None if self.announce is None and is_unspecified(self.host) else self.announce or self.host

    @property
    def tls_folder(self) -> Path | None:
        return None if self.tls_dir is None else Path(self.tls_dir)

    @classmethod
    def from_mapping(cls, given: Any) -> HintSettings:
        """The settings in an engine's own configuration. Raises ConfigurationError."""
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"the settings of hints are {given!r}; an object is required")
        return cls(**from_mapping(cls, given, "setting of hints"))
