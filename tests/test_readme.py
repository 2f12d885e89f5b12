"""The README and the documentation are run: their commands start the system, their examples get answers from it.

`test_repository.py` keeps the names in them true without starting anything; here the README's block under "Call it" and
others run as they stand, but for the addresses.
"""

from __future__ import annotations

import itertools
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

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from coordinator.api.schema.openai_schema import ChatBody, CompletionBody
from docs.generate.meanings import DELIVERY
from tests.docs.pages import all_pages, blocks, code, everything, fences, read, section
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

CLIENTS = "docs/guides/clients.md"
RESUMING = "docs/guides/resuming.md"
SIZING = "docs/guides/sizing.md"
HELP_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 240.0

live = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
    ),
]


def commands(block: str) -> list[list[str]]:
    """The words of each `outrider ...` line of a shell block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("outrider ")]


def all_commands() -> list[list[str]]:
    """Every `outrider ...` in the shell blocks of all pages."""
    return [
        words
        for page in all_pages()
        for fence in fences(page.read_text(encoding="utf-8"))
        if fence.language == "sh"
        for words in commands(fence.content)
    ]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `outrider` and `python` are this checkout's and this interpreter's."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in (("outrider", "-m command_line"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    here = environment()
    return here | {"PATH": f"{folder}{os.pathsep}{here['PATH']}", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The system that the first command of the README's "Call it" starts, on free ports."""
    language, content = blocks("README.md", "Call it")[0]
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
    shown = [*blocks("README.md", "Call it"), *blocks(CLIENTS, "gRPC")]
    assert [language for language, _ in shown] == ["sh", "sh", "python", "python"]
    text = "\n".join(content for _, content in shown)
    assert all(word in text for word in ("outrider serve", "curl ", "from openai import", "import grpc"))


def test_the_exactness_table_has_every_parameter_and_cases_that_exist() -> None:
    text = section("docs/reference/parameters.md", "Parameters that decide the output")
    table = text.split("| Parameter | Permitted | Meaning | Shown by |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    about_text = (CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()) - DELIVERY.keys()
    assert named == about_text
    (together,) = re.findall(r"^All of these together: (.*)$", text, re.MULTILINE)
    shown = {name for cell in [*(row[3] for row in rows), together] for name in re.findall(r"`([^`]+)`", cell)}
    paths = {name for name in shown if "/" in name}
    assert all((ROOT / path).is_file() for path in paths)
    assert shown - paths == (LARGE_CASES.keys() | SMALL_CASES.keys()) - {"none"}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_fleet_is_predicted_as_the_documents_say(shell: dict[str, str], tmp_path: Path) -> None:
    (_, content), (_, table) = blocks(SIZING, "How many workers?")
    example, ratios, _ = commands(content)
    (tmp_path / "fleet.toml").write_text(run(example[: example.index(">")], shell), encoding="utf-8")
    words = [str(tmp_path / word) if word == "fleet.toml" else word for word in ratios]
    shown = {line.strip() for line in run(words, shell | {"COLUMNS": "100"}).splitlines()}
    assert {line.strip() for line in table.splitlines()} <= shown


@pytest.mark.thorough
def test_a_plan_is_what_the_documents_show(shell: dict[str, str], tmp_path: Path) -> None:
    (_, content), (_, table) = blocks(SIZING, "Will it fit?")
    words = with_models(commands(content)[0], tmp_path)
    shown = [line.strip() for line in run(words, shell).splitlines()]
    assert [line.strip() for line in table.splitlines()] == shown


def test_values_are_what_the_documents_show(shell: dict[str, str], tmp_path: Path) -> None:
    (_, content), (_, comments) = blocks(SIZING, "Values for the Helm chart")
    words = commands(content)[0]
    shown = run(with_models(words[: words.index(">")], tmp_path), shell)
    assert shown.startswith(comments.rstrip("\n") + "\npairs:")


def with_models(words: list[str], folder: Path) -> list[str]:
    """A command about models in a folder where these are shapes of Llama 3.1 70B and 3.2 1B."""
    write_config(
        folder / "large",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    )
    write_config(
        folder / "small",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        tie_word_embeddings=True,
    )
    return [str(folder / Path(word).name) if word.startswith("/models/") else word for word in words]


def write_config(folder: Path, **values: object) -> None:
    """As Llama 3.1 and 3.2 have it."""
    kinds = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32}
    sizes = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kinds | sizes | values), encoding="utf-8")


@pytest.mark.thorough
def test_commands_show_their_help_and_know_the_flags_that_the_documents_give_them(
    shell: dict[str, str],
) -> None:
    used: dict[tuple[str, ...], set[str]] = {}
    for _, *words in all_commands():
        name = tuple(words[:2]) if words[0] in ("batch", "canary") else (words[0],)
        own = itertools.takewhile(lambda word: word != "--", words)  # what follows is another program's
        used.setdefault(name, set()).update(word for word in own if word.startswith("--"))
    for text in code(everything()):
        if found := re.match(r"outrider ([a-z-]+)", text):
            used.setdefault((found[1],), set())
    assert {"serve", "demo", "chat", "target-worker", "draft-worker", "coordinator"} <= {name[0] for name in used}
    for name, flags in used.items():
        text = run(["outrider", *name, "--help"], shell)
        assert not [flag for flag in flags if flag not in text], name


@pytest.mark.slow
@pytest.mark.thorough
def test_a_locked_server_is_made_and_asked_as_the_documents_say(shell: dict[str, str], tmp_path: Path) -> None:
    _, content = blocks("docs/operations/security.md", "Keys and certificates on one machine")[0]
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
def test_make_knows_every_target_that_the_documents_name() -> None:
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", everything(), re.MULTILINE))
    targets = {target for pair in named for target in pair if target}
    assert {"demo", "test", "bench"} <= targets
    for target in targets:
        result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


class TestLive:
    """Against what the README's own first command started."""

    pytestmark = live

    def test_the_examples_say_the_same(self, system: System, shell: dict[str, str]) -> None:
        """curl, the openai package and gRPC ask for the same 60 tokens."""
        (_, first), (_, curl), *programs = [*blocks("README.md", "Call it"), *blocks(CLIENTS, "gRPC")]
        events = list(events_of(iter(run(["bash", "-euc", addressed(curl, system)], shell).splitlines())))
        text = text_of(events)
        assert text.strip()
        last = events[-1]
        assert last["usage"]["completion_tokens"] == 60
        assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] <= 5
        details = [event["outrider"] for event in events if "outrider" in event]
        assert sum(len(detail["token_ids"]) for detail in details) == 60
        assert sum(len(detail["origins"]) for detail in details) == 60
        assert all("outrider" in event for event in events if event["choices"] and event["choices"][0]["text"])
        for language, program in programs:
            assert language == "python"
            assert run(["python", "-W", "error", "-c", addressed(program, system)], shell) == text
        rest = commands(first)[1:]
        assert all(run(words, shell).strip() for words in rest), "serve --help"

    def test_a_stream_goes_on_where_the_documents_stop_it(self, system: System, shell: dict[str, str]) -> None:
        both = next(content for _, content in blocks(RESUMING, "Example") if "curl" in content)
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
        assert "`outrider chat`" in read("docs/getting-started.md")
        words = ["outrider", "chat", "--url", system.url, "--max-tokens", "20"]
        for extra in ([], ["--complete"]):
            assert "20 tokens · TTFT" in run([*words, *extra], shell, typed="def read_file(path):\n")

    def test_the_other_paths_it_names_exist(self, system: System) -> None:
        paths = re.findall(r"`(/[a-z0-9_/]+)`", section(CLIENTS, "HTTP"))
        assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(paths)
        for path in paths:
            answers = [system.client.get(path), system.client.post(path, content=b"{}")]
            if "--batch-files" in answers[0].text:
                continue  # it exists, and says how it is turned on
            statuses = {answer.status_code for answer in answers}
            assert 404 not in statuses, path
            assert statuses & {200, 400}, path
        tokens = system.post("/tokenize", {"prompt": "def f(x):"}).json()["tokens"]
        assert system.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "def f(x):"
        assert system.text("def f(x):", max_tokens=2)
        lines = system.client.get("/metrics").text.splitlines()
        assert any(line.startswith("outrider_generation_tokens_total{") for line in lines)

    def test_a_client_of_the_documents_sees_the_model_by_its_name(self, system: System) -> None:
        served = [model["id"] for model in system.client.get("/v1/models").json()["data"]]
        asked = set(re.findall(r'"?model"?[=:] ?"(\w+)"', section("README.md", "Call it")))
        assert asked == set(served) == {system.model}

    def test_errors_are_json_on_every_path(self, system: System) -> None:
        response = system.client.get("/v1/nowhere")
        assert response.status_code == 404
        assert json.loads(response.text)["error"]["message"]
