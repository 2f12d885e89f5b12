"""cert-manager's part: issues the rendered Certificates into the secrets that they name."""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.k8s.pods import Object

FIELDS = {
    *("secretName", "commonName", "isCA", "dnsNames", "duration", "renewBefore", "usages", "privateKey", "issuerRef"),
}
USAGES = ["digital signature", "server auth", "client auth"]


class CertificateIssuer:
    """Authorities by the issuer's name, and what they sign."""

    def __init__(self) -> None:
        self._authorities: dict[str, CertificateAuthority] = {}  # by the secret that has them

    def issue(self, certificate: Object, issuers: Mapping[str, Object]) -> dict[str, bytes] | None:
        """The files of the certificate's secret; None as long as its issuer is not there.

        Raises ValueError for a certificate that is not understood here.
        """
        spec = certificate["spec"]
        if unknown := spec.keys() - FIELDS:
            raise ValueError(f"fields of a Certificate that are not understood here: {sorted(unknown)}")
        issuer = issuers.get(spec["issuerRef"]["name"])
        if issuer is None:
            return None
        if spec.get("isCA"):
            authority = self._authorities.setdefault(spec["secretName"], CertificateAuthority.make())
            return {"ca.crt": authority.certificate.public_bytes(Encoding.PEM)}
        signer = self._authorities.get(issuer["spec"]["ca"]["secretName"])
        if signer is None:
            return None
        if spec["usages"] != USAGES:
            raise ValueError(f"only certificates for {USAGES} are issued here")
        return signed(signer, spec["dnsNames"], _duration(spec["duration"]))


def signed(signer: CertificateAuthority, names: list[str], valid_for: datetime.timedelta) -> dict[str, bytes]:
    """tls.crt, tls.key and ca.crt of a new certificate with exactly these DNS names, the first of which is a role's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        signer.issue(folder, Role(names[0]), names=tuple(names[1:]), valid_for=valid_for)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _duration(text: str) -> datetime.timedelta:
    found = re.fullmatch(r"(\d+)h", text)
    if found is None:
        raise ValueError(f"the duration {text} is not understood here")
    return datetime.timedelta(hours=int(found[1]))
