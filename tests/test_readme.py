"""The README is run: its commands start the system, its examples get answers from it.

`test_repository.py` keeps the names in it true without starting anything; here every block under "How to call it"
runs as it stands, but for the addresses.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.openai_schema import ChatBody, CompletionBody
from outrider.cli.deployment import DEMO_DRAFT, DEMO_TARGET
from tests.e2e.system import (
    FREE_PORTS,
    READY,
    ROOT,
    START_TIMEOUT_S,
    Command,
    System,
    environment,
    events_of,
    eventually,
    running_system,
    text_of,
)
from tests.exactness.cases import LARGE_CASES, SMALL_CASES

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HELP_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 240.0

live = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("system"),
    pytest.mark.skipif(
        not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
    ),
]


def section(title: str) -> str:
    """The text below a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no section {title!r}"
    return found[1]


def blocks(title: str) -> list[tuple[str, str]]:
    """Fenced blocks of a section: language and content."""
    return BLOCK.findall(section(title))


def commands(block: str) -> list[list[str]]:
    """The words of each `outrider ...` line of a shell block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("outrider ")]


def all_commands() -> list[list[str]]:
    """Every `outrider ...` in the README's shell blocks."""
    return [
        words
        for language, content in BLOCK.findall(README)
        if language == "sh"
        for words in commands(content)
    ]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `outrider` and `python` are this checkout's and this interpreter's."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in (("outrider", "-m outrider"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    here = environment()
    return here | {"PATH": f"{folder}{os.pathsep}{here['PATH']}", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """What the first command of "How to call it" starts, on free ports."""
    language, content = blocks("How to call it")[0]
    program, command, *flags = commands(content)[0]
    assert (language, program, command) == ("sh", "outrider", "serve")
    with running_system(tmp_path_factory.mktemp("readme") / "cache", *flags) as running:
        yield running


def run(words: list[str], shell: dict[str, str], typed: str | None = None) -> str:
    """The standard output of a command that must succeed."""
    result = subprocess.run(
        words, cwd=ROOT, env=shell, input=typed, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )  # fmt: skip
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def addressed(code: str, system: System) -> str:
    """The code with the addresses of the running system. Fails when it names none of the documented ones."""
    replaced = code.replace("http://127.0.0.1:8000", system.url).replace("127.0.0.1:9000", system.grpc)
    assert replaced != code, "the example names neither 127.0.0.1:8000 nor 127.0.0.1:9000"
    return replaced


def test_every_kind_of_call_has_an_example() -> None:
    assert [language for language, _ in blocks("How to call it")] == ["sh", "sh", "python", "python"]
    code = "\n".join(content for _, content in blocks("How to call it"))
    assert all(word in code for word in ("outrider serve", "curl ", "from openai import", "import grpc"))


def test_the_exactness_table_has_every_parameter_and_cases_that_exist() -> None:
    table = (
        section("Exactly the same")
        .split("| Parameter | Permitted | Shown by |\n|---|---|---|\n")[1]
        .split("\n\n")[0]
    )
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    about_text = (CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()) - NOT_ABOUT_TEXT
    assert named == about_text
    shown = {name for row in rows for name in re.findall(r"`([^`]+)`", row[2])}
    paths = {name for name in shown if "/" in name}
    assert all((ROOT / path).is_file() for path in paths)
    assert shown - paths == (LARGE_CASES.keys() | SMALL_CASES.keys()) - {"none"}


NOT_ABOUT_TEXT = {
    "model", "prompt", "messages", "stream", "stream_options", "user", "prompt_cache_key", "cache_salt", "request_id",
    "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens", "chat_template_kwargs",
    "parallel_tool_calls", "max_completion_tokens", "priority", "deadline_ms",
}  # fmt: skip
"""What is asked and how the answer is shown."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_fleet_is_predicted_as_the_readme_says(shell: dict[str, str], tmp_path: Path) -> None:
    (_, content), (_, table) = blocks("How many of each?")
    example, ratios, _ = commands(content)
    (tmp_path / "fleet.toml").write_text(run(example[: example.index(">")], shell), encoding="utf-8")
    words = [str(tmp_path / word) if word == "fleet.toml" else word for word in ratios]
    shown = {line.strip() for line in run(words, shell | {"COLUMNS": "100"}).splitlines()}
    assert {line.strip() for line in table.splitlines()} <= shown


def test_a_plan_is_what_the_readme_shows(shell: dict[str, str], tmp_path: Path) -> None:
    found = re.search(r"^### Will it fit\?\n(.*?)^##", README, re.MULTILINE | re.DOTALL)
    assert found
    (_, content), (_, table) = BLOCK.findall(found[1])
    write_config(
        tmp_path / "large",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    )
    write_config(
        tmp_path / "small",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        tie_word_embeddings=True,
    )
    words = [
        str(tmp_path / Path(word).name) if word.startswith("/models/") else word
        for word in commands(content)[0]
    ]
    shown = [line.strip() for line in run(words, shell).splitlines()]
    assert [line.strip() for line in table.splitlines()] == shown


def write_config(folder: Path, **values: object) -> None:
    """As Llama 3.1 and 3.2 have it."""
    kinds = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32}
    sizes = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kinds | sizes | values), encoding="utf-8")


def test_commands_show_their_help_and_know_the_flags_the_readme_gives_them(shell: dict[str, str]) -> None:
    used: dict[str, set[str]] = {}
    for words in all_commands():
        used.setdefault(words[1], set()).update(word for word in words if word.startswith("--"))
    for name in re.findall(r"`outrider ([a-z-]+)[^`]*`", README):
        used.setdefault(name, set())
    assert {"serve", "demo", "chat", "target-worker", "draft-worker", "coordinator"} <= used.keys()
    for name, flags in used.items():
        text = run(["outrider", name, "--help"], shell)
        assert not [flag for flag in flags if flag not in text], name


@pytest.mark.slow
@pytest.mark.thorough
def test_a_locked_server_is_made_and_asked_as_the_readme_says(shell: dict[str, str], tmp_path: Path) -> None:
    _, content = blocks("Operated like a service")[0]
    content = content.replace(" tls", f" {tmp_path}/tls").replace(" keys.toml", f" {tmp_path}/keys.toml")
    certificates, keys, serve = commands(content)
    run(certificates, shell)
    key = run(keys, shell).strip()
    command = Command.start(tmp_path / "cache", *serve[1:], *FREE_PORTS)
    try:
        url = eventually(
            lambda: READY.search(command.stdout) or command.process.poll(),
            lambda seen: seen is not None,
            "it is ready",
            START_TIMEOUT_S,
        )
        assert isinstance(url, re.Match), command.stderr
        (curl,) = [line for line in content.splitlines() if line.startswith("curl ")]
        curl = curl.replace("https://127.0.0.1:8000", url.group(1))
        answer = json.loads(run(["bash", "-euc", curl], shell | {"OUTRIDER_API_KEY": key}))
        assert [model["id"] for model in answer["data"]] == ["target"]
        refused = json.loads(run(["bash", "-euc", curl], shell | {"OUTRIDER_API_KEY": "or-another"}))
        assert refused["error"]["code"] == "invalid_api_key"
    finally:
        command.stop()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_knows_every_target_that_the_readme_names() -> None:
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", README, re.MULTILINE))
    targets = {target for pair in named for target in pair if target}
    assert {"demo", "test", "bench"} <= targets
    for target in targets:
        result = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr


class TestLive:
    """Against what the README's own first command started."""

    pytestmark = live

    def test_the_examples_say_the_same(self, system: System, shell: dict[str, str]) -> None:
        """curl, the openai package and gRPC ask for the same 60 tokens."""
        (_, first), (_, curl), *programs = blocks("How to call it")
        events = list(events_of(iter(run(["bash", "-euc", addressed(curl, system)], shell).splitlines())))
        text = text_of(events)
        assert text.strip()
        last = events[-1]
        assert last["usage"]["completion_tokens"] == 60
        assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] <= 5
        details = [event["outrider"] for event in events if "outrider" in event]
        assert sum(len(detail["token_ids"]) for detail in details) == 60
        assert sum(len(detail["origins"]) for detail in details) == 60
        assert all(
            "outrider" in event for event in events if event["choices"] and event["choices"][0]["text"]
        )
        for language, program in programs:
            assert language == "python"
            assert run(["python", "-W", "error", "-c", addressed(program, system)], shell) == text
        rest = commands(first)[1:]
        assert all(run(words, shell).strip() for words in rest), "serve --help"

    def test_a_stream_goes_on_where_the_readme_stops_it(self, system: System, shell: dict[str, str]) -> None:
        both = next(content for _, content in blocks("When something breaks") if "curl" in content)
        first, again = addressed(both, system).split("\nLAST=")
        whole = run(["bash", "-euc", first], shell)
        rest = run(["bash", "-euc", f"LAST={again}"], shell)
        ids = re.findall(r"^id: (.*)$", whole, re.MULTILINE)
        assert ids[-1].endswith(":60e")
        assert rest.startswith("id: ")
        assert not set(ids[:3]) & set(re.findall(r"^id: (.*)$", rest, re.MULTILINE))
        said = text_of(list(events_of(iter(line for line in whole.splitlines() if line.startswith("data")))))
        left = text_of(list(events_of(iter(line for line in rest.splitlines() if line.startswith("data")))))
        assert left
        assert said.endswith(left)
        assert len(left) < len(said)

    def test_chat_answers_from_another_terminal(self, system: System, shell: dict[str, str]) -> None:
        assert "`outrider chat`" in section("How to call it")
        words = ["outrider", "chat", "--url", system.url, "--max-tokens", "20"]
        for extra in ([], ["--complete"]):
            assert "20 tokens · TTFT" in run([*words, *extra], shell, typed="def read_file(path):\n")

    def test_the_other_paths_it_names_exist(self, system: System) -> None:
        paths = re.findall(r"`(/[a-z0-9_/]+)`", section("How to call it"))
        assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
        for path in paths:
            statuses = {
                system.client.get(path).status_code, system.client.post(path, content=b"{}").status_code
            }  # fmt: skip
            assert 404 not in statuses, path
            assert statuses & {200, 400}, path
        tokens = system.post("/tokenize", {"prompt": "def f(x):"}).json()["tokens"]
        assert system.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "def f(x):"
        assert system.text("def f(x):", max_tokens=2)
        lines = system.client.get("/metrics").text.splitlines()
        assert any(line.startswith("outrider_generation_tokens_total{") for line in lines)

    def test_a_client_of_the_readme_sees_the_model_by_its_name(self, system: System) -> None:
        served = [model["id"] for model in system.client.get("/v1/models").json()["data"]]
        asked = set(re.findall(r'"?model"?[=:] ?"(\w+)"', section("How to call it")))
        assert asked == set(served) == {system.model}

    def test_errors_are_json_on_every_path(self, system: System) -> None:
        response = system.client.get("/v1/nowhere")
        assert response.status_code == 404
        assert json.loads(response.text)["error"]["message"]
