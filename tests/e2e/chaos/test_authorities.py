"""An authority is changed without a moment at which two parts do not trust each other."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, TlsFiles
from tests.e2e.chaos.authorities import trust
from tests.e2e.chaos.certificates import Certificates


def meet(server: Path, client: Path) -> None:
    """A handshake between the owners of two folders as they are. Raises ssl.SSLError, ConnectionError."""
    context = TlsFiles(client).client_context()
    context.check_hostname = False
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                with TlsFiles(server).server_context().wrap_socket(connection, server_side=True) as secure:
                    secure.sendall(b"x")
            except OSError:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=10) as plain,
                context.wrap_socket(plain) as secure,
            ):
                if secure.recv(1) != b"x":
                    raise ConnectionError("the server has refused the client's certificate")
        finally:
            thread.join()


def test_parts_meet_at_every_step_of_a_change_and_not_without_the_first(tmp_path: Path) -> None:
    old, new = CertificateAuthority.make(), CertificateAuthority.make()
    folders, day = [tmp_path / "one", tmp_path / "other"], datetime.timedelta(days=1)

    def issue(folder: Path, authority: CertificateAuthority) -> None:
        authority.issue(folder, Role.TARGET, valid_for=day)

    for folder in folders:
        issue(folder, old)
    meet(*folders)
    issue(folders[0], new)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        meet(*folders)
    for num_changed in range(3):
        for folder in folders[:num_changed]:
            issue(folder, new)
        trust(folders, [old.certificate, new.certificate])
        meet(*folders)
        meet(*reversed(folders))
    trust(folders[:1], [new.certificate])
    meet(*folders)
    meet(*reversed(folders))
    trust(folders, [new.certificate])
    meet(*folders)


def test_whoever_joins_while_the_authority_changes_meets_the_others(tmp_path: Path) -> None:
    """Found: a worker that started in the middle of a change trusted the old authority alone, and could not."""
    certificates, new = Certificates(tmp_path), CertificateAuthority.make()
    old = certificates.authority.certificate
    names = ["redis", "target-0"]

    def joins(name: str) -> None:
        certificates.issue(name)
        names.append(name)
        for other in names:
            meet(certificates.folder(other), certificates.folder(name))

    for name in names:
        certificates.issue(name)
    certificates.trust([old, new.certificate])
    joins("target-1")
    certificates.authority = new
    joins("target-2")
    for name in names:
        certificates.issue(name)
    certificates.trust([new.certificate])
    joins("target-3")


@pytest.mark.parametrize("name", [None, "operator"], ids=["without a certificate", "with one"])
def test_clients_that_are_open_while_the_authority_changes_believe_the_new_one(
    tmp_path: Path, name: str | None
) -> None:
    """Found after 299 faults: a client without a certificate went on with the old authority alone."""
    certificates = Certificates(tmp_path)
    certificates.issue("operator")
    context = certificates.context(name)
    new = CertificateAuthority.make()
    certificates.authority = new
    certificates.issue("operator")
    trust([certificates.authority_path.parent], [new.certificate])
    certificates.refresh_contexts()
    serials = {int(str(each["serialNumber"]), 16) for each in context.get_ca_certs()}
    assert new.certificate.serial_number in serials
