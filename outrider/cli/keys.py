"""`outrider keys`: a new API key, of which the file keeps the hash alone."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.api_keys import KeyFile, Scope, entry, new_key
from outrider.errors import ConfigurationError


def keys(
    file: Annotated[
        Path,
        typer.Argument(
            help="As the coordinator's --api-keys; it is made where there is none.", show_default=False
        ),
    ],
    tenant: Annotated[
        str, typer.Option(help="On whose behalf requests with the key are.", show_default=False)
    ],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="What the key is good for; may be repeated.", show_default="generate"),
    ] = None,
    expires_days: Annotated[
        int | None, typer.Option(min=1, help="Days until it expires.", show_default="never")
    ] = None,
    shares_prefixes: Annotated[
        bool,
        typer.Option(
            "--shares-prefixes",
            help="Share the KV of prompts with all keys that have this, whose tenants can then find out about each "
            "other's prompts.",
        ),
    ] = False,
    note: Annotated[str, typer.Option(help="For people who read the file.")] = "",
) -> None:
    """Make an API key, print it, and append its hash to a file.

    The key itself is printed this once and kept nowhere. Coordinators take the change up within seconds. To revoke a
    key delete its entry; limits of a tenant are written into the file by hand:

        [tenants.search]
        requests_per_minute = 600
        tokens_per_minute = 200000
        max_concurrent_sequences = 64
    """
    expires = None
    if expires_days is not None:
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=expires_days)
    if file.exists():
        KeyFile(file)  # what cannot be read must not be added to
    key = new_key()
    try:
        scopes = frozenset(scope or [Scope.GENERATE])
        text = entry(key, tenant, scopes, expires, note, shares_prefixes=shares_prefixes)
        # Not to be read by others: it tells who the tenants are.
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as opened:
            opened.write(f"\n{text}" if opened.tell() else text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot take the key: {error}") from error
    Console().print(key, highlight=False, soft_wrap=True)
