"""The page for operators of vLLM servers: its YAML is valid, and what engines are told is what the chart installs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from command_line import app
from k8s.helm.chart import merged, preset, render
from outrider.engines.hint_settings import HintSettings
from outrider.engines.hints_variable import VARIABLE, settings_in
from outrider.engines.vllm.checks import CONFIG_KEY, SPECULATIVE_CONFIG
from outrider.security.tls import Role, TlsFiles, check_role
from tests.docs.pages import fences, read
from tests.images.dockerfile import parse
from tests.k8s.test_manifests import KUBERNETES_VERSION, first

ROOT = Path(__file__).parents[2]
PAGE = "docs/operations/draft-pools.md"
BLOCKS: list[dict[str, Any]] = [
    yaml.safe_load(fence.content) for fence in fences(read(PAGE)) if fence.language == "yaml"
]


def the(key: str) -> dict[str, Any]:
    """The first block with this key."""
    return next(block for block in BLOCKS if key in block)


def flags() -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in the("args")["args"] if "=" in word)


def told() -> HintSettings:
    return HintSettings.from_mapping(json.loads(flags()["additional-config"])[CONFIG_KEY])


def test_the_variable_says_what_the_flags_say() -> None:
    (variable,) = the("env")["env"]
    assert variable["name"] == VARIABLE
    given = settings_in({VARIABLE: variable["value"]})
    assert given is not None
    assert HintSettings.from_mapping(given) == told()


def test_engines_are_told_the_service_that_the_preset_installs() -> None:
    objects = render(preset("draft-pool"))
    (service,) = [each for each in objects if each["kind"] == "Service"]
    port = next(each["port"] for each in service["spec"]["ports"] if each["name"] == "grpc")
    assert told().draft_workers == (f"{service['metadata']['name']}:{port}",)


def test_draft_workers_may_send_hints_to_the_port_that_engines_are_given() -> None:
    policy = first(render(preset("draft-pool")), "NetworkPolicy", "draft")["spec"]
    (ports,) = policy["egress"][0]["ports"]
    assert ports["port"] == told().port
    label = the("spec")["spec"]["template"]["metadata"]["labels"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": label}}]


def test_the_flags_are_those_that_the_scheduler_class_asks_for() -> None:
    assert json.loads(flags()["speculative-config"]) == json.loads(SPECULATIVE_CONFIG)
    assert flags()["scheduler-cls"] == "outrider.engines.vllm.scheduler.HintScheduler"
    assert "--no-async-scheduling" in the("args")["args"]
    assert f"{flags()['scheduler-cls']} " in read("docs/guides/vllm.md"), "as in the guide"


def test_a_deployment_with_what_is_added_is_valid_and_vllm_finds_the_class() -> None:
    added = the("spec")["spec"]["template"]
    labels = {"app": "vllm", **added["metadata"]["labels"]}
    pod = merged(added["spec"], {})
    pod["containers"] = [merged(pod["containers"][0], {"image": "vllm/vllm-openai:v0.32.0"})]
    pod["containers"][0]["env"] += the("env")["env"]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    kubernetes_validate.validate(deployment, KUBERNETES_VERSION, strict=True)
    (container,), (init,) = pod["containers"], pod["initContainers"]
    (mount,), (copied,) = container["volumeMounts"], init["volumeMounts"]
    assert container["env"][0] == {"name": "PYTHONPATH", "value": mount["mountPath"]}
    assert mount["name"] == copied["name"] == pod["volumes"][0]["name"]
    (files,) = [
        stage
        for stage in parse((ROOT / "k8s/images/vllm.Dockerfile").read_text(encoding="utf-8"))
        if stage.name == "files"
    ]
    assert files.of("CMD")[0].words[-1] == copied["mountPath"], "where the image copies the class to"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if "attach" in block], ids=lambda block: str(sorted(block))
)
def test_the_chart_takes_the_values_of_the_page(block: dict[str, Any]) -> None:
    objects = render(merged(preset("draft-pool"), block))
    assert first(objects, "NetworkPolicy", "draft")["spec"]["ingress"][0]["from"]


def test_certificates_are_made_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = [
        fence.content.split()
        for fence in fences(read(PAGE))
        if fence.language == "sh" and fence.marker.startswith("run: ")
    ]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, result.output
    engine = TlsFiles(tmp_path / "certs" / "coordinator").current()
    for role in (Role.TARGET, Role.COORDINATOR):
        check_role(engine, role)
    check_role(TlsFiles(tmp_path / "certs" / "draft").current(), Role.DRAFT)


def test_the_page_names_the_preset_and_files_that_are_there() -> None:
    for name in (
        "k8s/helm/outrider/presets/draft-pool.yaml",
        "k8s/images/compose.vllm.yaml",
        "k8s/images/vllm.Dockerfile",
    ):
        assert name in read(PAGE)
        assert (ROOT / name).is_file()
