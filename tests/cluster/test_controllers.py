"""Small parts of the node and its controllers: certificates, Helm's lookup, probes, connections."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from k8s.helm.chart import objects_of, render
from tests.cluster.api_server import Request, Store, answer, is_permitted, rendered
from tests.cluster.certificate_issuer import CertificateIssuer
from tests.cluster.dial import dial
from tests.cluster.images import write_programs
from tests.cluster.pod import write_files
from tests.cluster.pod_plan import Volume
from tests.cluster.probes import ProbeCount

OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each for each in render({"tls": {"enabled": True}}) if "metadata" in each
}
ISSUERS = {name: each for (kind, name), each in OBJECTS.items() if kind == "Issuer"}


def certificate(issuer: CertificateIssuer, name: str) -> dict[str, bytes] | None:
    return issuer.issue(OBJECTS["Certificate", name], ISSUERS)


def test_certificates_have_the_names_that_are_asked_for_and_wait_for_their_authority() -> None:
    issuer = CertificateIssuer()
    assert certificate(issuer, "outrider-redis") is None
    authority = certificate(issuer, "outrider-ca")
    files = certificate(issuer, "outrider-redis")
    assert authority is not None
    assert files is not None
    assert files["ca.crt"] == authority["ca.crt"]
    made = x509.load_pem_x509_certificate(files["tls.crt"])
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["redis.outrider.internal", "outrider-redis"]
    usages = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_a_certificate_waits_for_its_issuer() -> None:
    assert CertificateIssuer().issue(OBJECTS["Certificate", "outrider-ca"], {}) is None


async def made_secrets(kept: Mapping[str, Mapping[str, bytes]], *, is_upgrade: bool) -> dict[str, dict[str, bytes]]:
    files = await rendered({}, lambda: Store({**kept}), is_upgrade=is_upgrade)
    return {
        each["metadata"]["name"]: {key: text.encode() for key, text in each["stringData"].items()}
        for each in objects_of(files)
        if each["kind"] == "Secret" and "stringData" in each
    }


async def test_an_upgrade_keeps_the_passwords_and_keys_that_are_there() -> None:
    """Helm's own `lookup` asks an API server for them."""
    first = await made_secrets({}, is_upgrade=False)
    again = await made_secrets(first, is_upgrade=False)
    assert again == first
    assert await made_secrets({}, is_upgrade=False) != first


SECRETS = "/api/v1/namespaces/outrider/secrets/"


def test_a_secret_that_is_not_there_is_not_found() -> None:
    status, body = answer(Request("GET", f"{SECRETS}none"), Store())
    assert (status, body["reason"]) == (404, "NotFound")


def test_the_account_of_the_certificates_may_change_them_and_nothing_else() -> None:
    objects = render()

    def may(method: str, name: str, account: str = "outrider-certificates") -> bool:
        return is_permitted(objects, account, Request(method, f"{SECRETS}{name}"))

    for name in ("outrider-ca", "outrider-target-tls"):
        assert may("GET", name)
        assert may("PATCH", name)
        assert not may("DELETE", name)
        assert not may("GET", name, "outrider-target")
    for name in ("outrider-redis", "outrider-api-keys", "another"):
        assert not may("GET", name)
        assert not may("PATCH", name)


def test_a_probe_has_to_fail_and_succeed_often_enough() -> None:
    count = ProbeCount(num_failures_max=3, num_successes_min=2)
    assert [count.put(each) for each in (True, True, False, False, True, False, False, False, True, True)] == [
        *(None, True, True, True, True, True, True, False, False, True)
    ]


def test_connections_that_are_refused_are_answered_and_others_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = listener.getsockname()[1], gone.getsockname()[1]
        gone.close()
        assert dial([("127.0.0.1", port) for port in ports], 5) == [True, True]
    # Nobody has an address of this block (RFC 5737), or there is no way to it.
    assert dial([("192.0.2.254", 9)], 0.2) == [False]


def test_files_of_a_volume_are_links_into_a_folder_that_can_be_replaced(tmp_path: Path) -> None:
    write_files(tmp_path, Volume("a", {"url": (b"text", 0o400)}), tmp_path.stat().st_gid)
    assert (tmp_path / "url").is_symlink()
    assert (tmp_path / "url").read_bytes() == b"text"
    assert (tmp_path / "url").stat().st_mode & 0o777 == 0o440


def test_changed_files_of_a_volume_replace_all_earlier_ones(tmp_path: Path) -> None:
    group = tmp_path.stat().st_gid
    write_files(tmp_path, Volume("a", {"kept": (b"old", 0o400), "gone": (b"old", 0o400)}), group)
    write_files(tmp_path, Volume("a", {"kept": (b"new", 0o400), "come": (b"new", 0o400)}), group)
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("..")}
    assert names == {"kept", "come"}
    assert {(tmp_path / name).read_bytes() for name in names} == {b"new"}
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("..")]) == 2, "earlier folders are left"


def test_scripts_of_packages_name_the_python_of_the_image(tmp_path: Path) -> None:
    write_programs(tmp_path / "bin")
    assert (tmp_path / "bin" / "ray").read_text().startswith("#!/venv/bin/python\n")
    assert (tmp_path / "bin" / "python").is_symlink()


@pytest.mark.parametrize("change", [{"usages": ["signing"]}, {"duration": "90d"}, {"uris": []}])
def test_certificates_that_are_not_understood_are_refused(change: dict[str, object]) -> None:
    issuer = CertificateIssuer()
    certificate(issuer, "outrider-ca")
    asked = OBJECTS["Certificate", "outrider-redis"]
    with pytest.raises(ValueError, match="here"):
        issuer.issue({**asked, "spec": asked["spec"] | change}, ISSUERS)
