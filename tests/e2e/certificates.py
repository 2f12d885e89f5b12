"""Certificates of this machine, which replace each other while they are in use."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import CERTIFICATE, Role


class Authority:
    """Signs for 127.0.0.1 and localhost. `path` is what clients trust, PEM."""

    def __init__(self, folder: Path, authority: CertificateAuthority | None = None) -> None:
        """`folder` exists. `authority` None: a new one."""
        self._authority = authority or CertificateAuthority.make()
        self.path = folder / "authority.crt"
        self.path.write_bytes(self._authority.certificate.public_bytes(Encoding.PEM))

    def issue(self, folder: Path) -> int:
        """A new `tls.crt` and `tls.key`, moved into the folder as a whole each; returns the serial number."""
        names, day = ("localhost", "127.0.0.1"), datetime.timedelta(days=1)
        self._authority.issue(folder, Role.CLIENT, names=names, valid_for=day)
        return x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes()).serial_number
