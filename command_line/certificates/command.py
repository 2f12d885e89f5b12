"""`outrider certificates`: makes a certificate authority and a certificate for each part."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from command_line.terminal import TerminalConsole
from outrider.errors import ConfigurationError
from outrider.registry.worker_record import POOLS
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, worker_name


def certificates(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for ca.crt and ca.key, made the first time, and for one folder per part. Give each part its "
            "folder as --tls-dir.",
            show_default=False,
        ),
    ],
    days: Annotated[int, typer.Option(min=1, max=825, help="Days until the certificates expire.")] = 90,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Further DNS name or IP address by which clients reach the coordinator; may be repeated.",
            show_default=False,
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="target=ID|draft=ID",
            help="Also make a certificate that is valid for this --worker-id only; may be repeated. Its folder is "
            "FOLDER/target-ID or FOLDER/draft-ID.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make or renew the certificates of all parts.

    Running parts load new certificates within seconds, without a restart: let a timer run this command. On Kubernetes
    the Helm chart does it. ca.key can sign a certificate for anyone: keep it off the machines
    that serve, and copy only its own folder to each part.

    The certificates in `target` and `draft` are valid for workers of any id. Whoever steals one can register as many
    workers as it likes and attract requests to itself. For workers on machines of their own use --worker, and start
    the coordinators with --require-worker-ids.
    """
    authority = CertificateAuthority.open(folder)
    here = ("localhost", "127.0.0.1")
    names = {Role.COORDINATOR: (*here, *(name or ())), Role.REDIS: (*here, "redis")}
    console = TerminalConsole()
    workers = [_worker(each) for each in worker or ()]
    for role in Role:
        part = role.name.lower()
        authority.issue(folder / part, role, names=names.get(role, ()), valid_for=datetime.timedelta(days=days))
        console.print(f"{folder / part}: {role.value}", soft_wrap=True)
    for role, worker_id in workers:
        name_of_it = worker_name(role, worker_id)
        own = folder / f"{role.name.lower()}-{name_of_it.partition('.')[0]}"
        authority.issue(own, role, worker_ids=(worker_id,), valid_for=datetime.timedelta(days=days))
        console.print(f"{own}: {name_of_it}", soft_wrap=True)


def _worker(text: str) -> tuple[Role, str]:
    """Role and id of a --worker value. Raises ConfigurationError."""
    pool, _, worker_id = text.partition("=")
    if pool not in POOLS or not 1 <= len(worker_id) <= 64:
        raise ConfigurationError(f"--worker {text} is neither target=ID nor draft=ID, with 1 to 64 characters for ID")
    return Role[pool.upper()], worker_id
