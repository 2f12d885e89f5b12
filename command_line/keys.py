"""`outrider keys`: makes an API key and appends its hash to a file."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer

from command_line.terminal import TerminalConsole
from coordinator.access.api_keys import KeyFile, Scope, entry, new_key
from outrider.errors import ConfigurationError


def keys(
    file: Annotated[
        Path,
        typer.Argument(
            help="Key file, as given to the coordinator's --api-keys. It is created if it does not exist.",
            show_default=False,
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Tenant that requests with this key belong to.", show_default=False)],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="Permission that the key gives; may be repeated.", show_default="generate"),
    ] = None,
    expires_days: Annotated[
        int | None, typer.Option(min=1, help="Days until the key expires.", show_default="never")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that the key is for, by the name that /v1/models lists; may be repeated. All others do not "
            "exist for it.",
            show_default="all",
        ),
    ] = None,
    shares_prefixes: Annotated[
        bool,
        typer.Option(
            "--shares-prefixes",
            help="Share cached prompt KV with all keys that have this option. Their tenants can then find out about "
            "each other's prompts.",
        ),
    ] = False,
    note: Annotated[str, typer.Option(help="Comment for people who read the file.")] = "",
) -> None:
    """Make an API key, print it, and append its hash to a file.

    The key itself is printed once and stored nowhere. Coordinators load the change within seconds. To revoke a key,
    delete its entry. Write a tenant's limits into the file by hand:

        [tenants.search]
        requests_per_minute = 600
        tokens_per_minute = 200000
        max_concurrent_sequences = 64

    With --oidc-issuer coordinators accept tokens of an identity provider as well; the limits hold for both.
    """
    expires = None
    if expires_days is not None:
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=expires_days)
    if file.exists():
        KeyFile(file)  # an unreadable file must not be appended to
    key = new_key()
    try:
        scopes = frozenset(scope or [Scope.GENERATE])
        text = entry(key, tenant, scopes, expires, note, models=model or (), shares_prefixes=shares_prefixes)
        # Readable by the owner only: the file names the tenants.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
            opened.write(f"\n{text}" if opened.tell() else text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot take the key: {error}") from error
    TerminalConsole().print(key, soft_wrap=True)
