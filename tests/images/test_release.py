"""The release script, with stand-ins for docker, cosign and helm that write down how they were called."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.helm.chart import PRESETS, merged, preset, render
from tests.k8s.pods import pods

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "0" * 64
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
while [ $# -gt 0 ]; do
  case $1 in
    --metadata-file) echo '{ "containerimage.digest": "DIGEST" }' > "$2" ;;
    package) cp "$2/values.yaml" "$CALLS.values" ;;
  esac
  shift
done
""".replace("DIGEST", DIGEST)


class Release:
    """A clone of the script's own files, and the programs that it calls."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.root = folder / "repository"
        programs = folder / "bin"
        programs.mkdir()
        for name in ("docker", "cosign", "helm", "make"):
            (programs / name).write_text(STAND_IN)
            (programs / name).chmod(0o755)
        self.audit = self.root / ".venv" / "bin" / "python"
        self.audit.parent.mkdir(parents=True)
        self.set_audit(0)
        (self.root / ".gitignore").write_text(".venv/\n")
        (self.root / "k8s" / "images").mkdir(parents=True)
        (self.root / "k8s" / "helm" / "outrider").mkdir(parents=True)
        for name in ("k8s/images/release.sh", "k8s/helm/outrider/values.yaml"):
            (self.root / name).write_bytes((ROOT / name).read_bytes())
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(self.calls), "HOME": str(folder)}
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "a"]):
            subprocess.run(["git", *words], cwd=self.root, check=True, env=self.environment)

    def set_audit(self, status: int) -> None:
        """An audit with this exit status."""
        self.audit.write_text(f'#!/bin/sh\necho "python $*" >> "$CALLS"\nexit {status}\n')
        self.audit.chmod(0o755)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "k8s/images/release.sh", *words]
        return subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def test_every_image_is_published_and_signed_by_its_digest_and_the_chart_names_them(release: Release) -> None:
    done = release.run("registry.example.com/team", "1.2.3")
    assert done.returncode == 0, done.stderr
    calls = release.calls.read_text()
    published = set(re.findall(r"name=registry\.example\.com/team/([^,]+),push=true", calls))
    assert published == {
        *(f"outrider-worker:1.2.3-{variant}" for variant in ("cuda", "cpu", "demo")),
        *("outrider-coordinator:1.2.3", "outrider-coordinator:1.2.3-demo"),
        "outrider-vllm:1.2.3",
    }
    assert len(re.findall(rf"cosign sign --yes registry\.example\.com/team/outrider-\w+@{DIGEST}", calls)) == 6
    assert re.search(r"vllm\.Dockerfile .*--target files", calls), "not vLLM's own image"
    assert "helm push" in calls
    assert "oci://registry.example.com/team/charts" in calls
    values = yaml.safe_load(Path(f"{release.calls}.values").read_text())
    objects = render({"images": {"registry": values["images"]["registry"], "tag": "1.2.3"}})
    used = set(re.findall(r"registry\.example\.com/team/(outrider-[\w.:-]+)", str(objects)))
    assert used <= published
    assert used
    assert set(values["images"]["digests"]) == {each.replace(":1.2.3", "") for each in published}
    assert set(values["images"]["digests"].values()) == {DIGEST}
    digests = values["images"]["digests"]
    for given in ({}, *map(preset, PRESETS)):
        objects = render(merged(given, {"images": {"registry": "registry.example.com/team", "digests": digests}}))
        for pod in pods(objects):
            for container in pod.containers:
                assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"]), f"{container['image']} may change"


@pytest.mark.parametrize(("status", "reason"), [(1, "vulnerable"), (69, "not audited")])
def test_packages_that_were_not_audited_are_not_released(release: Release, status: int, reason: str) -> None:
    release.set_audit(status)
    assert release.run("registry.example.com/team", "1.2.3").returncode == status, reason
    calls = release.calls.read_text()
    assert "python -m k8s.images.audit\n" in calls, "without leave to be offline"
    assert "docker" not in calls


def test_digests_are_those_of_the_charts_own_version_alone() -> None:
    """Another tag is another image."""
    given = {"images": {"registry": "r", "digests": {"outrider-worker-demo": DIGEST}}}
    assert f"-demo@{DIGEST}" in str(render(given))
    assert DIGEST not in str(render(merged(given, {"images": {"tag": "9.9.9"}})))


@pytest.mark.parametrize(("words", "reason"), [(["a"], "VERSION"), (["a", "v1;rm"], "not a version")])
def test_bad_arguments_are_refused(release: Release, words: list[str], reason: str) -> None:
    done = release.run(*words)
    assert done.returncode == 2
    assert reason in done.stderr
    assert not release.calls.exists()


def test_changes_that_are_not_committed_are_not_released(release: Release) -> None:
    (release.root / "new").write_text("a")
    done = release.run("registry.example.com/team", "1.2.3")
    assert done.returncode == 1
    assert "a release is of a commit" in done.stderr


def test_actions_of_the_workflow_are_pinned() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yaml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.search(r"@[0-9a-f]{40}$", each) for each in used)
    assert "k8s/images/release.sh" in text
    assert yaml.safe_load(text)["jobs"]
