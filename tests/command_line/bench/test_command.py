"""`outrider bench` from flags to table, JSON and chart, against fake servers."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from command_line import app
from outrider.errors import ConfigurationError
from tests.command_line.bench.fake_server import FakeServer, dead_url, reply, running, two_words
from tests.command_line.conftest import Run
from tests.command_line.fakes import expect_eventually


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    """Two that answer well."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(FakeServer())) for _ in range(2)]


@pytest.fixture
def server(servers: list[FakeServer]) -> FakeServer:
    return servers[0]


def run(*arguments: object) -> Result:
    environment = {"COLUMNS": "200", "OPENAI_API_KEY": None, "TERM": "dumb"}
    return CliRunner(env=environment).invoke(app, ["bench", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.stderr
    read: dict[str, Any] = json.loads(result.stdout)
    return read


class TestLoops:
    def test_a_closed_loop_keeps_to_its_level_and_counts_no_warmup(self, server: FakeServer) -> None:
        read = document("--url", server.url, "--concurrency", "1,2", "--num-requests", 6, "--warmup", 2)
        assert [each["level"] for each in read["results"]] == [{"concurrency": 1.0}, {"concurrency": 2.0}]
        assert [each["num_ok"] for each in read["results"]] == [6, 6]
        assert len(server.bodies) == 2 * (6 + 2)

    def test_a_closed_loop_has_as_many_under_way_as_it_says_and_never_more(self, server: FakeServer) -> None:
        server.num_awaited = 3
        read = document("--url", server.url, "--concurrency", 3, "--num-requests", 12)
        assert read["results"][0]["num_ok"] == 12
        assert server.num_running_max == 3

    def test_an_open_loop_does_not_wait_for_answers(self, server: FakeServer) -> None:
        server.num_awaited = 10
        read = document("--url", server.url, "--rate", 500, "--num-requests", 10, "--warmup", 0, "--requests")
        (cell,) = read["results"]
        assert cell["num_ok"] == 10
        assert server.num_running_max == 10
        sent = [row["sent_ms"] for row in cell["requests"]]
        assert sent == sorted(sent)
        assert cell["client"]["late_ms_max"] >= 0

    @pytest.mark.parametrize("load", [("--concurrency", 2), ("--rate", 50)])
    def test_the_duration_ends_either(self, server: FakeServer, load: tuple[str, object]) -> None:
        (cell,) = document("--url", server.url, *load, "--duration-s", 0.2, "--warmup", 0)["results"]
        assert cell["num_ok"] == len(server.bodies) >= 1
        assert cell["num_failed"] == 0

    @pytest.mark.thorough
    def test_servers_take_turns_and_are_compared(self, servers: list[FakeServer], tmp_path: Path) -> None:
        first, second = servers
        plot = tmp_path / "load.svg"
        read = document(
            "--url", f"ours={first.url}/v1", "--url", f"theirs={second.url}", "--concurrency", "1,2", "--rounds", 3,
            "--num-requests", 2, "--warmup", 0, "--plot", plot,
        )  # fmt: skip
        assert [(each["server"], len(each["rounds"])) for each in read["results"]] == [
            ("ours", 3), ("theirs", 3), ("ours", 3), ("theirs", 3),
        ]  # fmt: skip
        assert read["results"][0]["output_tokens_per_s_against_first"] is None
        assert read["results"][1]["output_tokens_per_s_against_first"]["num_rounds"] == 3
        asked = [sorted(json.dumps(body) for body in each.bodies) for each in servers]
        assert asked[0] == asked[1]
        names = {each.text for each in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")}
        assert {"ours", "theirs", "output tokens/s"} <= names


class TestReport:
    @pytest.mark.thorough
    def test_the_document_says_what_was_measured_and_how(self, server: FakeServer) -> None:
        read = document(
            "--url", f"it={server.url}", "--concurrency", 1, "--num-requests", 3, "--warmup", 0, "--requests",
            "--slo-ttft-ms", 60_000, "--api-key", "secret",
        )  # fmt: skip
        (cell,) = read["results"]
        assert read["servers"] == [{"name": "it", "url": server.url, "model": "first"}]
        assert read["client_machine"]
        assert not read["is_cut_short"]
        assert "secret" not in json.dumps(read)
        assert cell["num_output_tokens"] == 9
        assert cell["ttft_ms"]["num_samples"] == cell["itl_ms"]["num_samples"] == 3
        assert cell["goodput_share"] == 1.0
        assert cell["mean_acceptance_length"] == 1.5
        assert [row["num_output_tokens"] for row in cell["requests"]] == [3, 3, 3]
        assert "requests" not in document("--url", server.url, "--concurrency", 1, "--num-requests", 1)["results"][0]

    @pytest.mark.thorough
    def test_the_table_has_levels_figures_and_names(self, servers: list[FakeServer]) -> None:
        urls = [word for name, each in zip("ab", servers, strict=True) for word in ("--url", f"{name}={each.url}")]
        result = run(*urls, "--concurrency", "1,2", "--num-requests", 5, "--slo-tpot-ms", 1e6)
        assert result.exit_code == 0, result.stderr
        for shown in (
            "concurrency 1",
            "concurrency 2",
            "TTFT, ms",
            "TPOT, ms",
            "n 5",
            "goodput",
            "100%",
            "1.50",
            "×",
        ):
            assert shown in result.stdout, shown
        assert "only 4 prompts, repeated" in result.stdout

    def test_flags_reach_the_server(self, server: FakeServer, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "one"}\n')
        document(
            "--url", server.url, "--concurrency", 1, "--num-requests", 1, "--warmup", 0, "--prompts", prompts, "--chat",
            "--max-tokens", 9, "--temperature", 0.5, "--seed", 4, "--ignore-eos", "--model", "m",
            "--extra-body", '{"speculation": {"enabled": false}}',
        )  # fmt: skip
        assert server.bodies == [
            {
                "model": "m", "messages": [{"role": "user", "content": "one"}], "max_tokens": 9, "temperature": 0.5,
                "stream": True, "stream_options": {"include_usage": True}, "seed": 4, "ignore_eos": True,
                "speculation": {"enabled": False},
            }
        ]  # fmt: skip
        assert server.heads[-1].startswith("POST /v1/chat/completions ")


class TestFailures:
    @pytest.mark.thorough
    def test_some_failures_are_counted_by_cause(self, server: FakeServer) -> None:
        def every_other(body: dict[str, Any]) -> Any:
            is_bad = len(server.bodies) % 2 == 0
            return reply("503 No", b'{"error": {"message": "full"}}') if is_bad else two_words(body)

        server.answer = every_other
        asked = ("--url", server.url, "--concurrency", 1, "--num-requests", 4, "--warmup", 0)
        (cell,) = document(*asked)["results"]
        assert (cell["num_ok"], cell["num_failed"]) == (2, 2)
        assert cell["failures"] == {"HTTP 503": {"num_requests": 2, "example": "full"}}
        shown = run(*asked).stdout
        assert "2 × HTTP 503" in shown
        assert "full" in shown

    def test_a_run_in_which_everything_failed_says_why(self, server: FakeServer, tmp_path: Path) -> None:
        server.answer = lambda body: reply("503 No", b"{}")
        file, plot = tmp_path / "result.json", tmp_path / "load.svg"
        asked = ("--url", server.url, "--concurrency", 2, "--num-requests", 2, "--warmup", 0)
        result = run(*asked, "--json", file, "--plot", plot)
        assert result.exit_code == 1
        assert "failed: HTTP 503" in result.stderr
        assert json.loads(file.read_text())["results"][0]["num_failed"] == 2
        ElementTree.parse(plot)

    def test_a_dead_server_is_named_before_any_load(self, server: FakeServer) -> None:
        nowhere = dead_url()
        result = run("--url", server.url, "--url", nowhere)
        assert result.exit_code == 1
        assert isinstance(result.exception, ConfigurationError)
        assert f"--url {nowhere} cannot be reached: connection refused" in result.exception.message
        assert "outrider serve" in result.exception.message
        assert not server.bodies

    async def test_an_interrupted_run_reports_what_it_has(self, server: FakeServer, real_outrider: Run) -> None:
        process = real_outrider("bench", "--url", server.url, "--concurrency", 1, "--num-requests", 1, "--rounds", 1000)
        await expect_eventually(lambda: len(server.bodies) > 4, "the second round ends", timeout_s=30)
        server.answer = lambda body: [30.0]
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGINT
        assert "output tokens/s" in shown
        assert "interrupted" in shown

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("--concurrency", "1,x"), "--concurrency: 'x' in '1,x'"),
            (("--rate", "0"), "--rate: '0'"),
            (("--rate", "1", "--concurrency", "1"), "--rate: is another kind"),
            (("--url", "ftp://nowhere"), "--url: 'ftp://nowhere' is not an address"),
            (("--extra-body", "[]"), "--extra-body"),
            (("--extra-body", ""), "--extra-body"),
            (("--requests",), "--requests: needs --json"),
            (("--json", "no-such-folder/x.json"), "--json"),
            (("--plot", "no-such-folder/x.svg"), "--plot"),
            (("--prompts", "no-such-file"), "--prompts"),
            (("--timeout-s", "nan"), "--timeout-s"),
            (("--duration-s", "inf"), "--duration-s: is inf"),
            (("--num-requests", "0"), "--num-requests"),
        ],
    )
    def test_bad_flags_are_named(self, arguments: tuple[str, ...], complaint: str) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        shown = " ".join(result.stderr.replace("│", " ").split())
        assert f"Invalid value for {complaint}" in shown.replace("'--", "--").replace("':", ":", 1)

    def test_an_empty_file_of_prompts_is_a_usage_error(self, tmp_path: Path) -> None:
        empty = tmp_path / "prompts.txt"
        empty.touch()
        assert run("--prompts", empty).exit_code == 2

    def test_help_teaches_by_example(self) -> None:
        shown = run("--help").stdout
        assert "outrider bench --concurrency 1,8,32" in shown
        assert "Exit status" in shown
