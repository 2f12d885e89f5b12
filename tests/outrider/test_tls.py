"""Mutual TLS: who is believed, who may call what, and what a change of certificates does."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtensionOID, NameOID

from outrider.errors import ConfigurationError
from outrider.security import watched_files
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import (
    ANY_ROLE,
    PLAINTEXT,
    Dialer,
    Role,
    RoleCheck,
    TlsFiles,
    check_role,
    check_worker_id,
    names_of_certificate,
    worker_name,
)

DAY = datetime.timedelta(days=1)
SECRET = "/test.Service/Secret"
STREAM = "/test.Service/Stream"
OPEN = "/test.Service/Open"
UNNAMED = "/test.Service/Unnamed"
PERMITTED = {SECRET: frozenset({Role.COORDINATOR}), STREAM: frozenset({Role.DRAFT}), OPEN: ANY_ROLE}


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(watched_files, "SETTLED_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.open(tmp_path / "ca")


def folder_of(authority: CertificateAuthority, tmp_path: Path, role: Role) -> Path:
    folder = tmp_path / role.name.lower()
    authority.issue(folder, role, valid_for=DAY)
    return folder


@asynccontextmanager
async def serving(files: TlsFiles) -> AsyncIterator[str]:
    """A service with a call for coordinators, a stream for drafts, a call for everybody and one that no rule
    names; its address."""

    async def answer(request: bytes, context: Any) -> bytes:
        return b"answer to " + request

    async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(interceptors=(RoleCheck(PERMITTED),))
    handlers = {
        "Secret": grpc.unary_unary_rpc_method_handler(answer),
        "Open": grpc.unary_unary_rpc_method_handler(answer),
        "Unnamed": grpc.unary_unary_rpc_method_handler(answer),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_secure_port("127.0.0.1:0", files.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(dialer: Dialer, address: str, method: str = SECRET, role: Role = Role.TARGET) -> bytes:
    async with cast(Any, dialer.open(address, role, ())) as channel:
        if method == STREAM:
            async for message in channel.stream_stream(STREAM)(iter([b"x"]), timeout=10):
                return bytes(message)
        return bytes(await channel.unary_unary(method)(b"x", timeout=10))


async def code_of(dialer: Dialer, address: str, **arguments: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(dialer, address, **arguments)
    return caught.value.code()


@pytest.mark.parametrize(
    ("role", "method", "may"),
    [
        (Role.COORDINATOR, SECRET, True),
        (Role.DRAFT, SECRET, False),
        (Role.TARGET, SECRET, False),
        (Role.OPERATOR, SECRET, False),
        (Role.CLIENT, SECRET, False),
        (Role.DRAFT, STREAM, True),
        (Role.COORDINATOR, STREAM, False),
        (Role.OPERATOR, OPEN, True),
    ],
)
async def test_a_call_is_for_the_roles_that_may_make_it(
    authority: CertificateAuthority, tmp_path: Path, role: Role, method: str, may: bool
) -> None:
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        dialer = Dialer(TlsFiles(folder_of(authority, tmp_path, role)))
        if may:
            assert b"x" in await call(dialer, address, method)
        else:
            assert await code_of(dialer, address, method=method) is grpc.StatusCode.PERMISSION_DENIED


def other_names() -> dict[str, tuple[x509.Name, list[x509.GeneralName]]]:
    """Subjects and alternative names that are nearly a coordinator's, each with another fault."""
    name, of_draft = Role.COORDINATOR.value, x509.DNSName(Role.DRAFT.value)
    nobody = x509.Name([])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return {
        "an e-mail address": (nobody, [x509.RFC822Name(name), of_draft]),
        "an address of the web": (nobody, [x509.UniformResourceIdentifier(name), of_draft]),
        "a directory name": (nobody, [x509.DirectoryName(subject), of_draft]),
        "a registered id": (nobody, [x509.RegisteredID(NameOID.COMMON_NAME), of_draft]),
        "a NUL": (nobody, [x509.DNSName(f"{name}\0.example.com"), of_draft]),
        "a NUL before it": (nobody, [x509.DNSName(f"example.com\0{name}"), of_draft]),
        "a final dot": (nobody, [x509.DNSName(f"{name}."), of_draft]),
        "a blank": (nobody, [x509.DNSName(f"{name} "), of_draft]),
        "capitals": (nobody, [x509.DNSName(name.upper()), of_draft]),
        "a wildcard": (nobody, [x509.DNSName(f"*.{name.partition('.')[2]}"), of_draft]),
        "a name below": (nobody, [x509.DNSName(f"x.{name}"), of_draft]),
        "the subject": (subject, [of_draft]),
        "the subject alone": (subject, []),
        "several in one": (nobody, [x509.DNSName(f"{name},{name}"), of_draft]),
    }


def issue_named(authority: CertificateAuthority, folder: Path, subject: x509.Name, names: list[Any]) -> None:
    """Writes a certificate with these names, which `CertificateAuthority.issue` would not make."""
    authority.issue(folder, Role.DRAFT, valid_for=DAY)  # its key and the authority
    key: Any = load_pem_private_key((folder / "tls.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(authority.certificate.subject, subject, key.public_key(), 1, now - DAY, now + DAY)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority.private_key, SHA256())
    (folder / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


@pytest.mark.parametrize("fault", other_names())
async def test_a_role_is_a_dns_name_letter_for_letter_and_nothing_else(
    authority: CertificateAuthority, tmp_path: Path, fault: str
) -> None:
    """Found: gRPC lists names of every kind, as far as their first NUL, and so did we."""
    issue_named(authority, tmp_path / "other", *other_names()[fault])
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        dialer = Dialer(TlsFiles(tmp_path / "other"))
        assert await code_of(dialer, address) is grpc.StatusCode.PERMISSION_DENIED
        # What else the certificate names counts as ever.
        if len(other_names()[fault][1]) > 1:
            assert await call(dialer, address, STREAM) == b"x"


@pytest.mark.parametrize("value", [b"", b"\x30", b"\x30\x05\x82\xff", b"\x04\x01x"], ids=bytes.hex)
def test_a_certificate_whose_names_cannot_be_read_has_none(authority: CertificateAuthority, value: bytes) -> None:
    key, now = authority.private_key, datetime.datetime.now(datetime.UTC)
    name = authority.certificate.subject
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - DAY, now + DAY)
    names = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, value)
    certificate = builder.add_extension(names, critical=False).sign(key, SHA256())
    assert names_of_certificate(certificate.public_bytes(Encoding.DER)) == frozenset()


async def test_a_channel_insists_on_the_name_of_one_worker(authority: CertificateAuthority, tmp_path: Path) -> None:
    authority.issue(tmp_path / "t0", Role.TARGET, worker_ids=("t0", "T 0"), valid_for=DAY)
    dialer = Dialer(TlsFiles(folder_of(authority, tmp_path, Role.COORDINATOR)))
    async with serving(TlsFiles(tmp_path / "t0")) as address:
        for worker_id, code in (("t0", "OK"), ("T 0", "OK"), ("t1", "UNAVAILABLE"), ("T0", "UNAVAILABLE")):
            name = worker_name(Role.TARGET, worker_id)
            async with cast(Any, dialer.open(address, Role.TARGET, (), name)) as channel:
                called = channel.unary_unary(SECRET)(b"x", timeout=20)
                assert (await called.code()).name == code, worker_id
        assert b"x" in await call(dialer, address)


def test_a_worker_does_not_start_under_an_id_that_its_certificate_does_not_name(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    authority.issue(tmp_path / "t0", Role.TARGET, worker_ids=("t0",), valid_for=DAY)
    authority.issue(tmp_path / "any", Role.TARGET, valid_for=DAY)
    for folder in ("t0", "any"):
        check_worker_id(TlsFiles(tmp_path / folder).current(), Role.TARGET, "t0")
    check_worker_id(TlsFiles(tmp_path / "any").current(), Role.TARGET, "t1")
    with pytest.raises(ConfigurationError, match=r"is of t0\.target.*id is t1.*--worker-id"):
        check_worker_id(TlsFiles(tmp_path / "t0").current(), Role.TARGET, "t1")


@pytest.mark.parametrize("role", list(Role))
async def test_a_method_that_no_rule_names_is_for_nobody(
    authority: CertificateAuthority, tmp_path: Path, role: Role
) -> None:
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        dialer = Dialer(TlsFiles(folder_of(authority, tmp_path, role)))
        assert await code_of(dialer, address, method=UNNAMED) is grpc.StatusCode.PERMISSION_DENIED
        absent = "/test.Service/Absent"
        assert await code_of(dialer, address, method=absent) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_certificate_of_another_authority_opens_nothing(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    other = CertificateAuthority.make()
    other.issue(tmp_path / "forged", Role.COORDINATOR, valid_for=DAY)
    # It knows the right authority, so that it believes the server: the server is to refuse it.
    (tmp_path / "forged" / "ca.crt").write_bytes((tmp_path / "ca" / "ca.crt").read_bytes())
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        for method in (SECRET, OPEN):
            code = await code_of(Dialer(TlsFiles(tmp_path / "forged")), address, method=method)
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_opens_nothing(authority: CertificateAuthority, tmp_path: Path) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - 3 * DAY
    authority.issue(tmp_path / "old", Role.COORDINATOR, valid_for=DAY, now=long_ago)
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        assert await code_of(Dialer(TlsFiles(tmp_path / "old")), address, method=OPEN) is grpc.StatusCode.UNAVAILABLE


async def test_without_a_certificate_nothing_answers(authority: CertificateAuthority, tmp_path: Path) -> None:
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.TARGET))) as address:
        assert await code_of(PLAINTEXT, address, method=OPEN) is grpc.StatusCode.UNAVAILABLE
        believing = grpc.ssl_channel_credentials((tmp_path / "ca" / "ca.crt").read_bytes())
        named = [("grpc.ssl_target_name_override", Role.TARGET.value)]
        async with cast(Any, grpc.aio.secure_channel(address, believing, options=named)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(OPEN)(b"x", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_role_is_not_talked_to(authority: CertificateAuthority, tmp_path: Path) -> None:
    """A draft worker's certificate does not make a target: a stolen one cannot take prompts in."""
    dialer = Dialer(TlsFiles(folder_of(authority, tmp_path, Role.COORDINATOR)))
    async with serving(TlsFiles(folder_of(authority, tmp_path, Role.DRAFT))) as address:
        assert await code_of(dialer, address, role=Role.TARGET) is grpc.StatusCode.UNAVAILABLE
        assert b"x" in await call(dialer, address, role=Role.DRAFT)


async def test_new_certificates_are_used_from_the_next_connection_on(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """An authority that has changed is the proof: only whoever has read all files anew believes the other side."""
    server_folder = folder_of(authority, tmp_path, Role.TARGET)
    client_folder = folder_of(authority, tmp_path, Role.COORDINATOR)
    files, dialer = TlsFiles(server_folder), Dialer(TlsFiles(client_folder))
    async with (
        serving(files) as address,
        cast(Any, dialer.open(address, Role.TARGET, ())) as standing,
    ):
        assert await standing.unary_unary(SECRET)(b"x", timeout=10)
        version = dialer.version
        other = CertificateAuthority.make()
        for folder, role in ((server_folder, Role.TARGET), (client_folder, Role.COORDINATOR)):
            other.issue(folder, role, valid_for=DAY)
        assert dialer.version != version
        assert b"x" in await call(dialer, address)
        # Connections that there are go on with what they were made with.
        assert await standing.unary_unary(SECRET)(b"x", timeout=10)


def test_a_change_that_is_half_done_leaves_what_was_there(authority: CertificateAuthority, tmp_path: Path) -> None:
    folder = folder_of(authority, tmp_path, Role.TARGET)
    files = TlsFiles(folder)
    before = files.current()
    new = folder_of(authority, tmp_path, Role.DRAFT)
    (folder / "tls.key").write_bytes((new / "tls.key").read_bytes())
    assert files.current() == before
    (folder / "tls.crt").write_bytes((new / "tls.crt").read_bytes())
    assert files.current().names == {Role.DRAFT}


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("contents", [None, b"", b"not PEM"])
def test_files_that_are_no_good_are_named_at_the_start(
    authority: CertificateAuthority, tmp_path: Path, name: str, contents: bytes | None
) -> None:
    folder = folder_of(authority, tmp_path, Role.TARGET)
    (folder / name).unlink()
    if contents is not None:
        (folder / name).write_bytes(contents)
    with pytest.raises(ConfigurationError, match=name):
        TlsFiles(folder)


def test_a_key_of_another_certificate_is_refused_at_the_start(authority: CertificateAuthority, tmp_path: Path) -> None:
    folder, other = (folder_of(authority, tmp_path, role) for role in (Role.TARGET, Role.DRAFT))
    (folder / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(ConfigurationError, match="is not the key of"):
        TlsFiles(folder)


def test_a_part_does_not_start_with_the_certificate_of_another(authority: CertificateAuthority, tmp_path: Path) -> None:
    material = TlsFiles(folder_of(authority, tmp_path, Role.DRAFT)).current()
    check_role(material, Role.DRAFT)
    with pytest.raises(ConfigurationError, match=r"target\.outrider\.internal is not among them"):
        check_role(material, Role.TARGET)


def test_private_keys_are_for_their_owner_alone(authority: CertificateAuthority, tmp_path: Path) -> None:
    folder = folder_of(authority, tmp_path, Role.TARGET)
    for path in (folder / "tls.key", tmp_path / "ca" / "ca.key"):
        assert path.stat().st_mode & 0o077 == 0


def test_an_authority_is_kept_and_used_again(tmp_path: Path) -> None:
    first, second = (CertificateAuthority.open(tmp_path / "ca") for _ in range(2))
    assert first.certificate == second.certificate
    (tmp_path / "ca" / "ca.key").write_text("not a key")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        CertificateAuthority.open(tmp_path / "ca")
