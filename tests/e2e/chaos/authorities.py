"""Whom folders of certificates trust, changed in steps while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from outrider.security.tls import AUTHORITY


def trust(folders: Iterable[Path], authorities: Sequence[x509.Certificate]) -> None:
    """Has each folder name these authorities and no other, from one moment to the next."""
    pem = b"".join(each.public_bytes(Encoding.PEM) for each in authorities)
    for folder in folders:
        path = folder / f".{AUTHORITY}.next"
        path.write_bytes(pem)
        os.replace(path, folder / AUTHORITY)
