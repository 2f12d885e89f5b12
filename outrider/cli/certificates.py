"""`outrider certificates`: an authority of our own, and a certificate for each part."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.certificate_authority import CertificateAuthority
from outrider.errors import ConfigurationError
from outrider.tls import Role, worker_name
from outrider.worker_record import POOLS


def certificates(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Gets ca.crt and ca.key, which are made the first time, and a folder for each part, to be "
            "given as its --tls-dir.",
            show_default=False,
        ),
    ],
    days: Annotated[int, typer.Option(min=1, max=825, help="How long the certificates hold.")] = 90,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Further DNS name or IP address of the coordinator, by which clients dial it; may be repeated.",
            show_default=False,
        ),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="target=ID|draft=ID",
            help="A worker with a certificate of its own, which is good for this --worker-id alone; may be repeated. "
            "Its folder is FOLDER/target-ID or FOLDER/draft-ID.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make certificates for all parts, or new ones in place of those that are there.

    Running parts take new ones up within seconds, without a restart: have this run by a timer. On Kubernetes
    cert-manager does it (k8s/components/mtls). ca.key signs whoever may join: keep it off the machines that serve, and
    copy only its own folder to each part.

    The folders `target` and `draft` are good for workers of any id: whoever takes one of those over can announce as
    many as it likes, and draw requests to itself. Give workers on machines of their own --worker, and coordinators
    --require-worker-ids.
    """
    authority = CertificateAuthority.open(folder)
    here = ("localhost", "127.0.0.1")
    names = {Role.COORDINATOR: (*here, *(name or ())), Role.REDIS: (*here, "redis")}
    console = Console()
    workers = [_worker(each) for each in worker or ()]
    for role in Role:
        part = role.name.lower()
        authority.issue(
            folder / part, role, names=names.get(role, ()), valid_for=datetime.timedelta(days=days)
        )
        console.print(f"{folder / part}: {role.value}", highlight=False, soft_wrap=True)
    for role, worker_id in workers:
        name_of_it = worker_name(role, worker_id)
        own = folder / f"{role.name.lower()}-{name_of_it.partition('.')[0]}"
        authority.issue(own, role, worker_ids=(worker_id,), valid_for=datetime.timedelta(days=days))
        console.print(f"{own}: {name_of_it}", highlight=False, soft_wrap=True)


def _worker(text: str) -> tuple[Role, str]:
    """Its role and id. Raises ConfigurationError."""
    pool, _, worker_id = text.partition("=")
    if pool not in POOLS or not 1 <= len(worker_id) <= 64:
        raise ConfigurationError(
            f"--worker {text} is neither target=ID nor draft=ID, with 1 to 64 characters for ID"
        )
    return Role[pool.upper()], worker_id
