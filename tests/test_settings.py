"""Settings are declared once: flags, variables, files, other processes' command lines and the reference follow."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line.start.deployment import Deployment, coordinator_spec, worker_specs
from command_line.start.options import ServeOptions
from coordinator.__main__ import SETTINGS as COORDINATOR
from coordinator.settings import CoordinatorSettings, Listen
from draft_worker.__main__ import KIND as DRAFT
from draft_worker.__main__ import parse_arguments as parse_draft
from draft_worker.memory.__main__ import KIND as MEMORY
from draft_worker.memory.__main__ import parse_arguments as parse_memory
from draft_worker.memory.options import MemoryLimits, MemoryOptions
from k8s.helm.chart import preset, render
from outrider.engine.options import EngineOptions
from outrider.errors import ConfigurationError
from outrider.settings import (
    SettingError,
    check,
    from_flags,
    from_mapping,
    make_parser,
    same_as,
    setting,
    settings_of,
    words_for,
)
from target_worker.__main__ import KIND as TARGET
from target_worker.__main__ import parse_arguments as parse_target
from target_worker.limits import SchedulerLimits
from tests.k8s.pods import pods

K8S = Path(__file__).parents[1] / "k8s"
PROCESSES = {
    "coordinator": COORDINATOR,
    "target": TARGET.settings,
    "draft": DRAFT.settings,
    "memory": MEMORY.settings,
}


def rows(process: str, *owners: type) -> list[dict[str, str]]:
    """All settings of a process in words; empty texts for what there is not."""
    names = ("name", "flag", "variable", "default", "bounds", "unit", "help")
    return [
        {"process": process, **{name: getattr(each, name) or "" for name in names}}
        | {"audience": "benchmarks" if each.is_advanced else "operators"}
        for each in {name: each for owner in owners for name, each in settings_of(owner).items()}.values()
    ]


def setting_rows() -> list[dict[str, str]]:
    return [
        *rows("outrider serve", ServeOptions, Deployment),
        *rows("coordinator", *COORDINATOR),
        *rows("target worker", *TARGET.settings),
        *rows("draft worker", *DRAFT.settings),
        *rows("memory worker", *MEMORY.settings),
    ]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Example:
    """One of every kind."""

    num_cats: int = setting(3, "cats at once", "Animals", "cats", at_least=1, at_most=9)
    wait_s: float | None = setting(None, "longest wait", unit="seconds", above=0, shows="for ever")
    colour: Colour = setting(Colour.RED, "of the cats", variable="EXAMPLE_COLOUR")
    names: tuple[str, ...] = setting((), "of 100 % of them", flag="--name")
    may_sleep: bool = setting(True, "never sleep", flag="--awake", is_inverse=True, is_advanced=True)
    purrs: bool = setting(True, "make a sound")
    bites: bool = setting(False, "be wild", variable="EXAMPLE_BITES")
    secret: str = setting("", "only in a file", flag=None)
    other: int = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Starter:
    """Starts what `Example` describes."""

    num_cats: int | None = same_as(Example, "num_cats", None)
    colour: Colour = same_as(Example, "colour")
    names: tuple[str, ...] = same_as(Example, "names")
    may_sleep: bool = same_as(Example, "may_sleep")
    hears: bool = same_as(Example, "purrs", flag="--hears")


def read(*words: str) -> Example:
    return from_flags(Example, make_parser("x", None, Example).parse_args(words))


def test_without_flags_a_process_has_the_defaults_of_its_class() -> None:
    assert read() == Example()


def test_every_kind_of_flag_reaches_its_field() -> None:
    words = ["--num-cats", "2", "--wait-s", "0.5", "--colour", "blue", "--name", "a", "--name", "b"]
    expected = Example(2, 0.5, Colour.BLUE, ("a", "b"), may_sleep=False, purrs=False, bites=True)
    assert read(*words, "--awake", "--no-purrs", "--bites") == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_cats": 0}, "--num-cats is 0; permitted: 1 to 9"),
        ({"num_cats": 10}, "--num-cats is 10; permitted: 1 to 9"),
        ({"num_cats": "3"}, "--num-cats is 3; permitted: 1 to 9"),
        ({"wait_s": 0.0}, "--wait-s is 0; permitted: above 0"),
        ({"wait_s": float("nan")}, "--wait-s is nan; permitted: above 0"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_flag(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Example(**values)
    assert caught.value.message == message
    assert isinstance(caught.value, ConfigurationError)
    assert caught.value.name in values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--colour", "green"], "argument --colour: 'green' is not one of red, blue"),
        (["--num-cats", "many"], "argument --num-cats: 'many' is not a whole number"),
        (["--wait-s", "long"], "argument --wait-s: 'long' is not a number"),
        (["--dogs", "1"], "unrecognized arguments: --dogs 1"),
        (["--secret", "x"], "unrecognized arguments: --secret x"),
    ],
)
def test_a_flag_that_means_nothing_is_refused_by_name(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*words)
    assert message in capsys.readouterr().err


def test_a_variable_counts_where_there_is_no_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXAMPLE_COLOUR", "blue")
    monkeypatch.setenv("EXAMPLE_BITES", "1")
    assert read() == Example(colour=Colour.BLUE, bites=True)
    assert read("--colour", "red").colour is Colour.RED
    monkeypatch.setenv("EXAMPLE_BITES", "true")
    with pytest.raises(SystemExit):
        read()
    assert "EXAMPLE_BITES: 'true' is not 0 or 1" in capsys.readouterr().err


def test_a_configuration_file_counts_before_a_variable_and_knows_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXAMPLE_BITES", "1")
    values = from_mapping(Example, {"colour": "blue", "names": ["a"], "secret": "s", "bites": False}, "keys")
    assert Example(**values) == Example(colour=Colour.BLUE, names=("a",), secret="s")
    for mapping, message in (
        ({"cats": 1, "other": 1}, "unknown keys: cats, other; known: "),
        ({"colour": "x"}, "'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            from_mapping(Example, mapping, "keys")


@pytest.mark.parametrize(("flag", "is_shown"), [("--help", False), ("--help-all", True)])
def test_only_whoever_asks_for_all_is_shown_what_benchmarks_need(
    flag: str, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(flag)
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("--awake" in shown) is is_shown
    assert "cats at once (1 to 9; default: 3)" in shown
    assert "of 100 % of them" in shown
    assert not read("--awake").may_sleep, "hidden, and still a flag"


def test_what_starts_a_process_passes_its_settings_on() -> None:
    assert words_for(Starter(), Example) == ["--colour", "red"]
    given = Starter(4, Colour.BLUE, ("a", "b"), may_sleep=False, hears=False)
    words = ["--num-cats", "4", "--colour", "blue", "--name", "a", "--name", "b", "--awake", "--no-purrs"]
    assert words_for(given, Example) == words
    assert read(*words) == Example(4, None, Colour.BLUE, ("a", "b"), may_sleep=False, purrs=False)
    assert words_for(given, Starter) == []


def test_rows_tell_everything_in_words() -> None:
    first, second, *_, last = rows("cat", Example)
    assert first == {
        "process": "cat", "name": "num_cats", "flag": "--num-cats", "variable": "", "default": "3", "bounds": "1 to 9",
        "unit": "cats", "help": "cats at once", "audience": "operators",
    }  # fmt: skip
    assert (second["default"], last["flag"]) == ("for ever", "")
    assert [row["name"] for row in rows("cat", Example) if row["audience"] == "benchmarks"] == ["may_sleep"]


@dataclass(frozen=True)
class Roomy:
    num_boxes: int | str | None = setting(None, "boxes", unit="boxes", at_least=2, word="auto", aliases=("-1",))

    def __post_init__(self) -> None:
        check(self)


def test_a_number_may_have_a_word_instead(capsys: pytest.CaptureFixture[str]) -> None:
    def read_roomy(*words: str) -> int | str | None:
        return from_flags(Roomy, make_parser("x", None, Roomy).parse_args(words)).num_boxes

    assert read_roomy() is None
    assert read_roomy("--num-boxes", "3") == 3
    assert read_roomy("--num-boxes", "auto") == read_roomy("--num-boxes", "-1") == "auto"
    assert Roomy(**from_mapping(Roomy, {"num_boxes": "auto"}, "keys")).num_boxes == "auto"
    with pytest.raises(SystemExit):
        read_roomy("--num-boxes", "some")
    assert "argument --num-boxes: 'some' is not a whole number or auto" in capsys.readouterr().err
    for value in (1, "some"):
        with pytest.raises(SettingError, match=f"--num-boxes is {value}; permitted: 2 and more, or auto"):
            Roomy(value)


def test_the_reference_has_every_setting_of_every_process_once() -> None:
    found = setting_rows()
    keys = [(row["process"], row["name"]) for row in found]
    assert len(keys) == len(set(keys)) > 80
    assert all(row["help"] and not row["help"].endswith(".") for row in found)
    flags = {(row["process"], row["flag"]): row["name"] for row in found if row["flag"]}
    processes = ("outrider serve", "coordinator", "target worker", "draft worker", "memory worker")
    assert set(processes) == {process for process, _ in flags}
    assert {row["variable"] for row in found} >= {"OUTRIDER_REDIS_URL", "OUTRIDER_ZONE", "OUTRIDER_API_KEYS"}


@pytest.mark.parametrize("owner", dict.fromkeys(owner for owners in PROCESSES.values() for owner in owners))
def test_defaults_lie_within_their_bounds(owner: type) -> None:
    for name, each in settings_of(owner).items():
        assert each.initial is None or each.permits(each.initial), name


def test_what_serve_passes_on_the_processes_read_as_it_was_meant() -> None:
    plain = Deployment(Path("/m/target"), Path("/m/draft"))
    (target, draft) = (spec.command[3:] for spec in worker_specs(plain, [], "x"))
    assert from_flags(SchedulerLimits, parse_target([*target])) == SchedulerLimits()
    assert from_flags(EngineOptions, parse_draft([*draft])) == EngineOptions(model=Path("/m/draft"))


def test_serve_tells_memory_workers_the_tokenizer_and_the_coordinator_whom_they_follow() -> None:
    plain = Deployment(Path("/m/target"), None, num_memory_workers=2)
    _, memory, other = worker_specs(plain, [], "x")
    assert (memory.name, other.name, memory.role) == ("memory-0", "memory-1", "draft")
    given = parse_memory([*memory.command[3:]])
    assert from_flags(MemoryOptions, given) == MemoryOptions(tokenizer=Path("/m/target"))
    assert from_flags(MemoryLimits, given) == MemoryLimits()

    def told(deployment: Deployment) -> list[str]:
        words = coordinator_spec(deployment, Path("/ray")).command
        return [words[index + 1] for index, word in enumerate(words) if word == "--memory-tenant"]

    assert told(plain) == ["*"]
    assert told(Deployment(Path("/m/target"), None)) == []
    named = Deployment(
        Path("/m/target"), None, num_memory_workers=1, memory_tenants=("a", "b"), api_keys=Path("/keys.toml")
    )
    assert told(named) == ["a", "b"]
    with pytest.raises(SettingError, match="needs --memory-tenant"):
        replace(named, memory_tenants=())


def test_kubernetes_gives_the_coordinator_what_its_class_knows() -> None:
    (service,) = [each for each in render(preset("llama-70b")) if each["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    values = from_mapping(CoordinatorSettings, application["args"], "args")
    assert CoordinatorSettings(**values).metrics_port == 9100
    advanced = {name for name, each in settings_of(CoordinatorSettings).items() if each.is_advanced}
    assert not advanced & application["args"].keys()


@pytest.mark.parametrize(("role", "parse"), [("target", parse_target), ("draft", parse_draft)])
def test_kubernetes_gives_workers_what_operators_are_shown(role: str, parse: Any) -> None:
    (pod,) = [each for each in pods(render()) if each.name == role]
    package, *words = (word.replace("$(POD_IP)", "10.0.0.1") for word in pod.spec["containers"][0]["args"])
    assert package == f"{role}_worker"
    given: argparse.Namespace = parse(words)
    for owner in PROCESSES[role]:
        assert from_flags(owner, given)
    advanced = {each.flag for owner in PROCESSES[role] for each in settings_of(owner).values() if each.is_advanced}
    assert not advanced & {word.partition("=")[0] for word in words}


def test_variables_that_kubernetes_sets_are_read_by_somebody() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(K8S.rglob("*.yaml")))
    known = {row["variable"] for row in setting_rows()}
    ours = {*known, "OUTRIDER_API_KEY"}  # that one is read by commands: `helm test` runs one
    assert set(re.findall(r"name: (OUTRIDER_\w+)", text)) <= ours


def test_both_halves_of_the_coordinator_have_fields_of_their_own() -> None:
    assert {each.name for each in fields(CoordinatorSettings)} & {each.name for each in fields(Listen)} == {"tls_dir"}


def test_an_infinite_value_is_refused_although_no_bound_forbids_it() -> None:
    with pytest.raises(SettingError, match="--wait-s is inf, which is not a finite number"):
        Example(wait_s=float("inf"))
