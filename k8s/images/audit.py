"""Checks the images' packages for known vulnerabilities (`make audit`), through pip-audit and OSV.

There are three results: none known, some known, or not checked. pip-audit alone reports the third as clean if a
package index answers in place of an advisory service and knows no package.

Exit status: 0 none known, 1 some are, 69 not checked (0 with --may-be-offline, and a warning).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k8s.images.locks import ROLES, Pin, read_lock

EXIT_VULNERABLE: Final = 1
EXIT_UNASKED: Final = 69  # EX_UNAVAILABLE
ANSWER_TIMEOUT_S: Final = 15
AUDIT_TIMEOUT_S: Final = 300


class Unasked(Exception):
    """The check was not possible; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A known vulnerability of a package in our images."""

    package: str  # name==version
    identifier: str
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.package}: {self.identifier}, fixed in {' or '.join(self.fixed_in) or 'no version yet'}"


def public_versions(pins: Iterable[Pin]) -> list[str]:
    """name==version of each package, once. Builds of a version (`2.13.0+cpu`) have the advisories of the version."""
    return sorted({f"{pin.name}=={pin.version.partition('+')[0]}" for pin in pins})


def findings_of(report: Mapping[str, Any], asked: Sequence[str]) -> list[Finding]:
    """Vulnerabilities in pip-audit's JSON. Raises Unasked if it does not answer for every package."""
    found: list[Finding] = []
    answered: set[str] = set()
    skipped: list[str] = []
    for each in report["dependencies"]:
        if "skip_reason" in each:
            skipped.append(f"{each['name']}: {each['skip_reason']}")
            continue
        package = f"{each['name']}=={each['version']}"
        answered.add(package)
        found += [Finding(package, one["id"], tuple(one["fix_versions"])) for one in each["vulns"]]
    if missing := set(asked) - answered:
        reason = skipped[0] if skipped else f"no word of {min(missing)}"
        raise Unasked(f"no answer for {len(missing)} of {len(asked)} packages ({reason})")
    return found


def ask(packages: Sequence[str], service_url: str | None) -> list[Finding]:
    """Runs pip-audit. Raises Unasked."""
    with tempfile.TemporaryDirectory() as folder:
        listed, answer = Path(folder) / "packages.txt", Path(folder) / "answer.json"
        listed.write_text("\n".join(packages), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "pip_audit", "--requirement", str(listed), "--no-deps", "--disable-pip"),
            *("--format", "json", "--output", str(answer), "--progress-spinner", "off"),
            *("--timeout", str(ANSWER_TIMEOUT_S), "--cache-dir", folder, "--vulnerability-service", "osv"),
            *(("--osv-url", service_url) if service_url else ()),
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Unasked(f"pip-audit had no answer after {AUDIT_TIMEOUT_S} s") from None
        if not answer.exists():
            said = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise Unasked(said[-1][:500])
        return findings_of(json.loads(answer.read_text(encoding="utf-8")), packages)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description="Looks for known vulnerabilities.")
    parser.add_argument("--service-url", metavar="URL", help="OSV's query endpoint, or a compatible one")
    parser.add_argument("--may-be-offline", action="store_true", help="succeed even if the check is not possible")
    given = parser.parse_args(arguments)
    packages = public_versions(pin for name in ROLES for pin in read_lock(name))
    try:
        findings = ask(packages, given.service_url)
    except Unasked as error:
        print(
            f"NOT AUDITED: {error}. Nothing is known about {len(packages)} packages of the images. Run `make audit` "
            "where api.osv.dev can be reached, or name a mirror: make audit AUDIT_ARGS='--service-url URL'",
            file=sys.stderr,
        )
        return 0 if given.may_be_offline else EXIT_UNASKED
    for finding in findings:
        print(finding)
    print(f"{len(findings)} known vulnerabilities in {len(packages)} packages")
    return EXIT_VULNERABLE if findings else 0


if __name__ == "__main__":
    sys.exit(main())
