"""`outrider certificates`: an authority of our own, and a certificate for each part."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.certificate_authority import CertificateAuthority
from outrider.tls import Role


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
) -> None:
    """Make certificates for all parts, or new ones in place of those that are there.

    Running parts take new ones up within seconds, without a restart: have this run by a timer. On Kubernetes
    cert-manager does it (k8s/components/mtls). ca.key signs whoever may join: keep it off the machines that serve, and
    copy only its own folder to each part.
    """
    authority = CertificateAuthority.open(folder)
    here = ("localhost", "127.0.0.1")
    names = {Role.COORDINATOR: (*here, *(name or ())), Role.REDIS: (*here, "redis")}
    console = Console()
    for role in Role:
        part = role.name.lower()
        authority.issue(
            folder / part, role, names=names.get(role, ()), valid_for=datetime.timedelta(days=days)
        )
        console.print(f"{folder / part}: {role.value}", highlight=False, soft_wrap=True)
