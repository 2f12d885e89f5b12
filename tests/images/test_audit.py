"""An audit finds what is known, says when nobody could be asked, and never takes that for a clean answer."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from k8s.images import audit
from k8s.images.audit import (
    EXIT_UNASKED,
    EXIT_VULNERABLE,
    Finding,
    Unasked,
    ask,
    findings_of,
    public_versions,
)
from k8s.images.locks import Pin
from outrider.local.free_ports import free_ports

ADVISORY = {
    "id": "PYSEC-2024-0001",
    "summary": "A sandbox that can be left.",
    "affected": [
        {
            "package": {"name": "jinja2", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.6"}]}],
        }
    ],
}


class Advisories(http.server.BaseHTTPRequestHandler):
    """OSV's query endpoint, which knows of one vulnerable version; `broken` answers with errors."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_known = query["package"]["name"] == "jinja2" and query["version"] == "3.1.4"
        body = json.dumps({"vulns": [ADVISORY]} if is_known else {}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/query"
        server.shutdown()
        thread.join()


def test_a_known_vulnerability_is_found(service_url: str) -> None:
    assert ask(["jinja2==3.1.4", "numpy==2.4.6"], service_url) == [
        Finding("jinja2==3.1.4", "PYSEC-2024-0001", ("3.1.6",))
    ]


def test_versions_without_one_pass(service_url: str) -> None:
    assert ask(["jinja2==3.1.6", "numpy==2.4.6"], service_url) == []


def test_the_images_are_asked_about_with_what_they_carry(
    service_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["--service-url", service_url]) == 0
    monkeypatch.setattr(audit, "ROLES", {"coordinator": "coordinator"})
    monkeypatch.setattr(audit, "read_lock", lambda name: [Pin("jinja2", "3.1.4", (), is_direct=True)])
    assert audit.main(["--service-url", service_url]) == EXIT_VULNERABLE
    assert "jinja2==3.1.4: PYSEC-2024-0001, fixed in 3.1.6" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["nobody", "/broken"])
def test_a_service_that_does_not_answer_is_no_clean_answer(
    path: str, service_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/" if path == "nobody" else service_url.replace("/query", path)
    assert audit.main(["--service-url", url]) == EXIT_UNASKED
    assert "NOT AUDITED" in capsys.readouterr().err
    assert audit.main(["--service-url", url, "--may-be-offline"]) == 0
    assert "NOT AUDITED" in capsys.readouterr().err


def test_packages_that_pip_audit_skips_are_not_clean() -> None:
    report = {"dependencies": [{"name": "jinja2", "skip_reason": "Dependency not found on PyPI"}]}
    with pytest.raises(Unasked, match=r"1 of 1 packages.*not found on PyPI"):
        findings_of(report, ["jinja2==3.1.4"])


def test_packages_of_which_nothing_is_said_are_not_clean() -> None:
    with pytest.raises(Unasked, match="no word of jinja2"):
        findings_of({"dependencies": []}, ["jinja2==3.1.4"])


def test_a_build_of_a_version_is_asked_about_as_the_version() -> None:
    pins = [Pin("torch", version, (), is_direct=True) for version in ("2.13.0+cpu", "2.13.0")]
    assert public_versions(pins) == ["torch==2.13.0"]
