"""A certificate authority for machines without cert-manager: creates a key and signs the parts' certificates.

Files: `FOLDER/ca.crt` and `FOLDER/ca.key`, the latter only for the issuer; below `FOLDER/ROLE/` the files that
`outrider.security.tls.TlsFiles` reads.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import ConfigurationError
from outrider.security.tls import AUTHORITY, CERTIFICATE, PRIVATE_KEY, Role, worker_name

AUTHORITY_KEY: Final = "ca.key"
_AUTHORITY_DAYS: Final = 3650
_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)  # between the machines that verify


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """An authority that signs certificates; only its owner may read its key file."""

    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, now: datetime.datetime | None = None) -> Self:
        """Creates an authority that is valid for ten years."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Outrider")])
        builder = _builder(name, name, key, now, datetime.timedelta(days=_AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(is_authority=True), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def open(cls, folder: Path, now: datetime.datetime | None = None) -> Self:
        """Opens the authority in `folder`, which the first call creates. Raises ConfigurationError."""
        certificate_path, key_path = folder / AUTHORITY, folder / AUTHORITY_KEY
        try:
            if not key_path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                made = cls.make(now)
                _write(key_path, _pem_key(made.private_key), mode=0o600)
                _write(certificate_path, made.certificate.public_bytes(Encoding.PEM))
                return made
            key = load_pem_private_key(key_path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"the authority in {folder} cannot be used: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{key_path} is of another kind than this command creates")
        return cls(certificate, key)

    def issue(
        self,
        folder: Path,
        role: Role,
        *,
        names: tuple[str, ...] = (),
        worker_ids: tuple[str, ...] = (),
        valid_for: datetime.timedelta,
        now: datetime.datetime | None = None,
    ) -> None:
        """Writes a new certificate and key for `role` into `folder`, one file after the other: readers wait until they
        belong together. `names`: further DNS names and IP addresses, of a machine that outsiders dial. `worker_ids`:
        those that a worker may announce; without any it may announce every one."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role.value)])
        builder = _builder(subject, self.certificate.subject, key, now, valid_for)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(is_authority=False), critical=True)
        both_ways = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(both_ways, critical=False)
        workers = (worker_name(role, each) for each in worker_ids)
        alternatives = [x509.DNSName(role.value), *(_general_name(name) for name in (*workers, *names))]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.private_key.public_key()), critical=False
        )
        certificate = builder.sign(self.private_key, hashes.SHA256())
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / AUTHORITY, self.certificate.public_bytes(Encoding.PEM))
        _write(folder / PRIVATE_KEY, _pem_key(key), mode=0o600)
        _write(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime | None,
    valid_for: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = now or datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + valid_for)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, contents: bytes, mode: int = 0o644) -> None:
    """Writes a file atomically: readers find the old file or the new one."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)  # left by an interrupted write, perhaps readable by others
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(contents)
    os.chmod(draft, mode)
    draft.replace(path)
