"""The pages for operators name what is there: tests, flags, files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_line import app
from k8s.helm.chart import render
from tests.k8s.test_manifests import SECURED

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations"
THREATS = OPERATIONS / "threat-model.md"
GUIDE = OPERATIONS / "kubernetes.md"
CANARY = OPERATIONS / "canary.md"
SECRETS = ("outrider-api-keys", "outrider-redis", "outrider-ray-redis")
TEST = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+(?:\.py)?)(?:::(?:Test\w+::)?(test_\w+))?`")


def named_tests() -> list[tuple[str, str]]:
    rows = [line for line in THREATS.read_text().splitlines() if line.startswith("|")]
    last_cells = [row.split("|")[-2] for row in rows]
    return [found for cell in last_cells for found in TEST.findall(cell)]


@pytest.mark.parametrize(("path", "name"), named_tests())
def test_a_threat_names_tests_that_exist(path: str, name: str) -> None:
    found = ROOT / "tests" / path
    assert found.exists()
    if name:
        assert re.search(rf"def {name}\(", found.read_text()), f"{path} has no {name}"


def test_every_threat_names_a_test_or_says_that_it_is_not_stopped() -> None:
    rows = [line for line in THREATS.read_text().splitlines() if line.startswith("|")]
    for row in rows:
        if not row.startswith(("| Could", "|---")):
            assert TEST.search(row.split("|")[-2]) or "not stopped" in row, row


@pytest.mark.parametrize("page", sorted(OPERATIONS.glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_guide_says_what_to_make_and_whom_to_let_in() -> None:
    text = GUIDE.read_text()
    labels = {
        name
        for policy in render(SECURED | {"coordinator": {"hosting": "ray"}})
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"].get("ingress", ())
        for peer in rule["from"]
        for name in peer.get("namespaceSelector", {}).get("matchLabels", {})
    }
    assert len(labels) == 3
    for label in labels:
        assert re.search(rf"kubectl label namespace \w+ {re.escape(label)}=true", text), label
    for secret in ("hugging-face", *SECRETS):
        assert f"create secret generic {secret} " in text, secret


def test_canary_commands_of_the_guide_have_the_flags_that_it_gives_them() -> None:
    commands = re.findall(r"`(?:outrider )?canary ([a-z]+)((?: --?[^`]*)?)`", CANARY.read_text())
    assert {name for name, _ in commands} == {"start", "status", "promote", "abort", "clear"}
    for name, flags in commands:
        shown = CliRunner().invoke(app, ["canary", name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        for flag in re.findall(r"--[a-z-]+", flags):
            assert flag in shown.output, flag
