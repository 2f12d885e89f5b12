"""The compose file for vLLM: valid, closed but for vLLM, with commands that start and find each other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jsonschema
import pytest
import yaml

from outrider.addresses import split_address
from outrider.engines.hint_settings import HintSettings
from outrider.engines.vllm.checks import CONFIG_KEY, SPECULATIVE_CONFIG
from tests.images.dockerfile import parse
from tests.images.test_compose import FOLDER, SERVICE, TEXT, TRUE, closed, named, started

PATH: Final = FOLDER / "compose.vllm.yaml"
SPECIFIED: Final = yaml.safe_load(PATH.read_text(encoding="utf-8"))
WHOLE: Final = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
# vLLM's image runs as root, and writes caches into its home.
OPEN_OF_VLLM: Final = frozenset({"read_only", "cap_drop", "tmpfs", "mem_limit"})
PROPERTIES: Final = SERVICE["properties"] | {"gpus": {"const": "all"}, "scale": {"type": ["string", "integer"]}}
SCHEMA: Final = closed(
    {
        "name": TEXT,
        "services": closed(
            {
                "vllm": closed(PROPERTIES, *sorted(set(SERVICE["required"]) - OPEN_OF_VLLM)),
                "draft": closed(PROPERTIES, *SERVICE["required"]),
            },
            *("vllm", "draft"),
        ),
        "networks": named(closed({"internal": TRUE})),
    },
    *("name", "services", "networks"),
)


def mistakes(compose: Mapping[str, Any]) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(compose):
        yield f"{error.json_path}: {error.message}"
    services = compose["services"]
    if "ports" in services["draft"] or services["draft"]["networks"] != ["inside"]:
        yield "draft workers are open to others"
    for service in services.values():
        yield from (f"no network {name}" for name in service["networks"] if name not in compose["networks"])
    if not compose["networks"]["inside"].get("internal"):
        yield "draft workers have a way out"
    if "depends_on" in services["vllm"]:
        yield "vLLM waits for draft workers, which may come and go"


def flags_of_vllm() -> dict[str, str]:
    model, *words = SPECIFIED["services"]["vllm"]["command"]
    assert model == "/models/target"
    return dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)


def test_the_file_is_valid_and_closed() -> None:
    assert list(mistakes(SPECIFIED)) == []


def publish_drafts(services: dict[str, Any]) -> None:
    services["draft"]["ports"] = ["50051:50051"]


def misspell(services: dict[str, Any]) -> None:
    services["vllm"]["gpu"] = "all"


def be_writable(services: dict[str, Any]) -> None:
    del services["draft"]["read_only"]


def let_drafts_out(services: dict[str, Any]) -> None:
    services["draft"]["networks"] = ["inside", "outside"]


def wait_for_drafts(services: dict[str, Any]) -> None:
    services["vllm"]["depends_on"] = {"draft": {"condition": "service_healthy"}}


@pytest.mark.parametrize(
    "mistake",
    [publish_drafts, misspell, be_writable, let_drafts_out, wait_for_drafts],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_is_found(mistake: Callable[[dict[str, Any]], None]) -> None:
    spoilt = copy.deepcopy(SPECIFIED)
    mistake(spoilt["services"])
    assert list(mistakes(spoilt))


def test_a_draft_worker_starts_without_redis() -> None:
    service = SPECIFIED["services"]["draft"]
    given = started("draft", service, FOLDER)
    assert (given.redis_url, given.announce) == (None, None)
    assert given.drain_grace_s < int(service["stop_grace_period"].removesuffix("s"))
    assert service["healthcheck"]["test"] == WHOLE["services"]["draft"]["healthcheck"]["test"]
    assert f'"127.0.0.1:{given.port}"' in service["healthcheck"]["test"][-1]


def test_vllm_finds_all_draft_workers_by_the_name_of_their_service() -> None:
    settings = HintSettings.from_mapping(json.loads(flags_of_vllm()["additional-config"])[CONFIG_KEY])
    (address,) = map(split_address, settings.draft_workers)
    assert address == ("draft", started("draft", SPECIFIED["services"]["draft"], FOLDER).port)
    assert settings.reached_at is None, "each draft worker is told the address on their network"


def test_vllm_is_given_what_its_scheduler_class_asks_for() -> None:
    flags = flags_of_vllm()
    assert json.loads(flags["speculative-config"]) == json.loads(SPECULATIVE_CONFIG)
    module, _, name = flags["scheduler-cls"].rpartition(".")
    source = (FOLDER.parents[1] / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert f"class {name}(" in source
    assert "--no-async-scheduling" in SPECIFIED["services"]["vllm"]["command"]


def test_images_are_built_by_dockerfiles_that_are_there() -> None:
    for service in SPECIFIED["services"].values():
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    default = parse((FOLDER / "vllm.Dockerfile").read_text(encoding="utf-8"))[-1].base
    assert SPECIFIED["services"]["vllm"]["build"]["args"] == {"VLLM": f"${{OUTRIDER_VLLM:-{default}}}"}
