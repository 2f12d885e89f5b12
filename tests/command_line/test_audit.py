"""`outrider audit` against a server with faults, and against the coordinator's own HTTP edge."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from command_line import app
from command_line.audit.auditor import Auditor
from command_line.audit.requests import (
    DEFAULT_SEED,
    Overrides,
    ReplayWay,
    audit_request,
    read_bodies,
    replay_body,
    replay_way,
    run_body,
)
from command_line.client import CHAT, COMPLETIONS
from outrider.audit import Divergence, Run, Verdict
from outrider.errors import InvalidRequest
from protos.outrider.v1 import target_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.tiny_model import write_model_dir

VOCAB_SIZE = 26  # a letter each
END = 25


@dataclass
class FakeServer:
    """An Outrider whose next token is a function of all tokens before it; faults are chosen by the test.

    The likeliest token has log probability -0.5, each next letter of the alphabet 2 less, four of them being shown.
    """

    diverges_at: int | None = None  # output position at which speculation says another token
    off_by: int = 1  # how many letters further on that one is
    speculation_ends_at: int | None = None  # output length at which a speculated answer ends too soon
    flips_at: int | None = None  # output position at which plain decoding alternates between two tokens
    ends_at: int | None = None  # length of prompt and output after which the text ends
    fails: Callable[[dict[str, Any]], bool] = lambda body: False
    decoding_mode: str = ""  # instead of the one that fits
    num_hints: int = 8  # verified per speculated request
    is_always_speculating: bool = False
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    num_flips: int = 0
    num_running_max: int = 0
    num_running: int = 0
    num_prompt: int = 4
    answer_s: float = 0.0  # how long an answer takes

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.bodies.append((path, body))
        if path == "/detokenize":
            return 200, {"prompt": text_of(body["tokens"])}
        if self.fails(body):
            return 400, {"error": {"message": "the test says no", "type": "invalid_request_error"}}
        speculates = self.is_always_speculating or body["speculation"]["enabled"]
        prompt = body["messages"][-1]["content"] if path == CHAT else body["prompt"]
        prompt_ids = [ord(letter) - 97 for letter in prompt] if isinstance(prompt, str) else list(prompt)
        output, finish_reason, rows = self._generate(prompt_ids, body, speculates)
        hints = self.num_hints if speculates else 0
        metrics = {
            "decoding_mode": self.decoding_mode or ("coupled" if "seed" in body else "greedy"),
            "speculative_decoding": {
                "num_draft_tokens": hints, "num_accepted_draft_tokens": hints // 2, "num_spec_steps": hints // 4,
            },
        }  # fmt: skip
        choice: dict[str, Any] = {"token_ids": output, "finish_reason": finish_reason, "logprobs": None}
        if path == CHAT:
            choice["message"] = {"role": "assistant", "content": text_of(output)}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [chat_row(row) for row in rows]}
            return 200, {"choices": [choice], "prompt_token_ids": prompt_ids, "metrics": metrics}
        choice |= {"text": text_of(output), "prompt_token_ids": prompt_ids}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [name(token_id) for token_id in output],
                "token_logprobs": [row[0][1] for row in rows],
                "top_logprobs": [{name(each): at for each, at in row} for row in rows],
            }
        return 200, {"choices": [choice], "metrics": metrics}

    def _generate(
        self, prompt_ids: list[int], body: dict[str, Any], speculates: bool
    ) -> tuple[list[int], str, list[list[tuple[int, float]]]]:
        output: list[int] = []
        rows: list[list[tuple[int, float]]] = []
        for _ in range(body.get("max_tokens", 16)):
            sequence = [*prompt_ids, *output]
            position = len(sequence) - self.num_prompt  # as in the original request, whatever the prompt is now
            choice = (sum(sequence) * 7 + len(sequence)) % END
            if self.ends_at is not None and len(sequence) >= self.ends_at:
                choice = END
            if speculates and position == self.diverges_at:
                choice = (choice + self.off_by) % END
            if speculates and position == self.speculation_ends_at:
                choice = END
            if not speculates and position == self.flips_at:
                with self.lock:
                    choice = (choice + self.num_flips % 2) % END
                    self.num_flips += 1
            if choice == END and not body.get("ignore_eos"):
                return output, "stop", rows
            output.append(choice)
            rows.append([((choice + step) % VOCAB_SIZE, -0.5 - 2.0 * step) for step in range(4)])
        return output, "length", rows


def name(token_id: int) -> str:
    return f"token_id:{token_id}"


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(97 + token_id) for token_id in token_ids)


def chat_row(row: list[tuple[int, float]]) -> dict[str, Any]:
    tops = [{"token": name(each), "logprob": at, "bytes": []} for each, at in row]
    return {**tops[0], "top_logprobs": tops}


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(server: FakeServer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.num_running += 1
                server.num_running_max = max(server.num_running_max, server.num_running)
                server.headers.append(self.headers)
            time.sleep(server.answer_s)
            status, answer = server.answer(self.path, body)
            content = json.dumps(answer).encode()
            with server.lock:
                server.num_running -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Nobody reads it."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}"
    listener.shutdown()
    thread.join()
    listener.server_close()


def run(url: str, *arguments: object, stdin: str | None = None) -> Result:
    words = ["audit", "--url", url, *map(str, arguments)]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, input=stdin)


def report_of(result: Result) -> dict[str, Any]:
    assert result.stdout, (result.stderr, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["exit_code"] == result.exit_code
    return report


class TestVerdicts:
    def test_identical_answers_pass(self, url: str) -> None:
        result = run(url, "--prompt", "abcd", "--repeat", 2)
        assert result.exit_code == 0, result.output
        assert "identical" in result.stdout
        assert "16" in result.stdout, "hints of both runs"
        assert "50%" in result.stdout
        assert "3.00" in result.stdout
        assert "warning" not in result.stdout

    def test_a_divergence_is_named_with_position_tokens_and_margin(self, server: FakeServer, url: str) -> None:
        server.diverges_at = 6
        result = run(url, "--prompt", "abcd", "--max-tokens", 12)
        assert result.exit_code == 1
        plain = next(body for path, body in server.bodies if path == COMPLETIONS)
        assert plain["speculation"] == {"enabled": False}
        assert "DIVERGED at output position 6, after 4 tokens of prompt" in result.stdout
        assert "margin 2.000 nats" in result.stdout
        assert "too far apart for rounding" in result.stdout
        assert "plain decoding repeats its token" in result.stdout

    def test_the_same_for_machines(self, server: FakeServer, url: str) -> None:
        server.diverges_at = 6
        report = report_of(run(url, "--prompt", "abcd", "--max-tokens", 12, "--json"))
        assert report["verdict"] == "diverged"
        assert report["verdicts"] == {"identical": 0, "diverged": 1, "unstable": 0, "failed": 0, "inexact": 0}
        (audited,) = report["requests"]
        (found,) = audited["runs"]
        divergence = found["divergence"]
        assert divergence["position"] == 6
        assert divergence["speculated_token_id"] == (divergence["plain_token_id"] + 1) % END
        assert divergence["replay"] == "prefix"
        assert divergence["replay_token_id"] == divergence["plain_token_id"]
        assert divergence["is_plain_reproduced"] is True
        for kind in ("processed", "raw"):
            assert divergence["margins"][kind] == {
                "plain_logprob": -0.5, "speculated_logprob": -2.5, "is_bound": False, "nats": 2.0,
            }  # fmt: skip
        assert divergence["likeliest"][0] == {"token_id": divergence["plain_token_id"], "logprob": -0.5}
        assert divergence["text"]["before"].startswith("abcd")
        assert divergence["text"]["plain"][0] == text_of([divergence["plain_token_id"]])

    def test_a_token_far_from_the_likeliest_bounds_the_margin(self, server: FakeServer, url: str) -> None:
        server.diverges_at, server.off_by = 2, 9
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 1
        assert "margin at least 6.000 nats" in result.stdout

    def test_an_engine_that_contradicts_itself_is_not_speculations_fault(self, server: FakeServer, url: str) -> None:
        server.flips_at, server.num_flips = 3, 1  # so that the first run is the odd one
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 3
        assert "UNSTABLE at output position 3" in result.stdout
        assert "plain decoding contradicts itself" in result.stdout
        assert "as speculation did" in result.stdout

    def test_a_refused_request_fails_with_the_servers_words(self, server: FakeServer, url: str) -> None:
        server.fails = lambda body: body["prompt"] == "no"
        result = run(url, "--prompt", "abcd", "--prompt", "no", "--json")
        report = report_of(result)
        assert result.exit_code == 2
        assert [audited["verdict"] for audited in report["requests"]] == ["identical", "failed"]
        assert report["requests"][1]["error"] == "400: the test says no"

    def test_a_divergence_outweighs_a_failure(self, server: FakeServer, url: str) -> None:
        server.diverges_at, server.fails = 2, lambda body: body["prompt"] == "no"
        assert run(url, "--prompt", "no", "--prompt", "abcd").exit_code == 1

    def test_a_replay_that_is_refused_leaves_nobody_to_blame(self, server: FakeServer, url: str) -> None:
        server.diverges_at, server.fails = 2, lambda body: body.get("logprobs_mode") == "processed"
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 2
        assert "FAILED at output position 2" in result.stdout
        assert "the test says no" in result.stdout

    def test_a_refused_detail_does_not_change_the_verdict(self, server: FakeServer, url: str) -> None:
        server.diverges_at, server.fails = 2, lambda body: body.get("logprobs_mode") == "raw"
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 1
        assert "not everything could be found out: 400: the test says no" in result.stdout

    def test_a_server_that_is_not_there_fails(self) -> None:
        result = run("http://127.0.0.1:1/v1", "--prompt", "abcd", "--prompt", "efgh")
        assert result.exit_code == 2
        assert result.stdout == "", "no table of failures"
        assert result.stderr.count("http://127.0.0.1:1 cannot be reached") == 1
        assert "outrider serve" in result.stderr

    def test_a_server_that_is_not_there_is_reported_as_json_too(self) -> None:
        result = run("http://127.0.0.1:1", "--prompt", "abcd", "--json")
        assert result.exit_code == 2
        report = report_of(result)
        assert (report["verdict"], report["exit_code"]) == ("failed", 2)
        assert "cannot be reached" in report["error"]

    def test_the_address_may_be_as_serve_prints_it(self, url: str) -> None:
        assert run(f"{url}/v1", "--prompt", "abcd").exit_code == 0

    def test_an_end_that_comes_too_soon_is_a_divergence(self, server: FakeServer, url: str) -> None:
        server.speculation_ends_at = 3
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 1
        assert "speculation had ended (stop)" in result.stdout
        assert "margin      unknown" in result.stdout

    def test_an_end_that_speculation_passes_by_is_a_divergence_with_its_margin(
        self, server: FakeServer, url: str
    ) -> None:
        server.ends_at, server.diverges_at, server.off_by = 9, 5, 1
        result = run(url, "--prompt", "abcd", "--max-tokens", 6, "--json")
        divergence = report_of(result)["requests"][0]["runs"][0]["divergence"]
        assert result.exit_code == 1
        assert (divergence["plain_token_id"], divergence["speculated_token_id"]) == (None, 1)
        assert divergence["replay"] == "whole"
        assert divergence["margins"]["processed"]["nats"] == 4.0


class TestWhatIsProven:
    def test_an_audit_without_hints_warns(self, server: FakeServer, url: str) -> None:
        server.num_hints = 0
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 0
        assert "no draft worker attached?" in result.stdout

    def test_and_fails_where_speculation_is_required(self, server: FakeServer, url: str) -> None:
        server.num_hints = 0
        result = run(url, "--prompt", "abcd", "--require-speculation", "--json")
        assert result.exit_code == 4
        assert report_of(result)["has_speculated"] is False

    def test_a_reference_with_hints_is_none(self, server: FakeServer, url: str) -> None:
        server.is_always_speculating = True
        result = run(url, "--prompt", "abcd")
        assert result.exit_code == 2
        assert "verified 8 hints in the run that asked for none" in result.stdout

    def test_rejection_sampling_cannot_be_audited(self, server: FakeServer, url: str) -> None:
        server.decoding_mode = "rejection"
        result = run(url, "--prompt", "abcd", "--temperature", 1)
        assert result.exit_code == 2
        assert "two outputs differ by design" in result.stdout

    def test_a_margin_of_seeded_sampling_is_of_probabilities_before_noise(self, server: FakeServer, url: str) -> None:
        server.diverges_at = 2
        result = run(url, "--prompt", "abcd", "--temperature", 1)
        assert result.exit_code == 1
        assert "of probabilities before noise" in result.stdout
        assert f"seed set to {DEFAULT_SEED}" in result.stdout


class TestInput:
    def test_built_in_prompts_are_asked_when_nothing_else_is(self, server: FakeServer, url: str) -> None:
        report = report_of(run(url + "/v1/", "--json", "--max-tokens", 2))
        assert report["num_requests"] >= 5
        assert not any(audited["changes"] for audited in report["requests"]), "nothing was recorded"
        assert {body["max_tokens"] for _, body in server.bodies} == {2}

    def test_recorded_bodies_come_from_a_file_or_standard_input(
        self, server: FakeServer, url: str, tmp_path: Path
    ) -> None:
        lines = [
            {"prompt": "abcd", "max_tokens": 5, "temperature": 0, "stream": True, "n": 3, "model": "old"},
            {"messages": [{"role": "user", "content": "a\u2028b"}], "max_tokens": 5, "temperature": 0.5},
        ]
        text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
        (tmp_path / "recorded.jsonl").write_text(text, encoding="utf-8")
        for source, stdin in ((tmp_path / "recorded.jsonl", None), ("-", text)):
            server.bodies.clear()
            report = report_of(run(url, "--requests", source, "--json", "--model", "new", stdin=stdin))
            assert [audited["path"] for audited in report["requests"]] == [COMPLETIONS, CHAT]
            assert report["requests"][0]["changes"] == ["stream dropped", "n dropped", "model set to new"]
            assert report["requests"][1]["changes"][-1].startswith(f"seed set to {DEFAULT_SEED}")
            assert {body["model"] for _, body in server.bodies} == {"new"}

    def test_a_chat_is_replayed_by_its_tokens(self, server: FakeServer, url: str) -> None:
        server.diverges_at = 3
        line = {
            "messages": [{"role": "user", "content": "abcd"}],
            "temperature": 0,
            "max_completion_tokens": 9,
        }
        report = report_of(run(url, "--requests", "-", "--json", stdin=json.dumps(line)))
        divergence = report["requests"][0]["runs"][0]["divergence"]
        assert (divergence["position"], divergence["replay"]) == (3, "prefix")
        assert divergence["margins"]["raw"]["nats"] == 2.0

    def test_a_penalized_chat_is_replayed_as_it_was(self, server: FakeServer, url: str) -> None:
        server.diverges_at = 3
        line = {
            "messages": [{"role": "user", "content": "abcd"}],
            "temperature": 0,
            "presence_penalty": 0.5,
            "max_completion_tokens": 9,
        }
        report = report_of(run(url, "--requests", "-", "--json", stdin=json.dumps(line)))
        divergence = report["requests"][0]["runs"][0]["divergence"]
        assert (divergence["position"], divergence["replay"]) == (3, "partial")
        assert divergence["margins"]["processed"]["nats"] == 2.0
        replays = [body for path, body in server.bodies if path == CHAT and body.get("logprobs")]
        assert [body["max_tokens"] for body in replays] == [4, 4]
        assert all("max_completion_tokens" not in body for body in replays)

    def test_the_key_is_sent(self, server: FakeServer, url: str) -> None:
        assert run(url, "--prompt", "abcd", "--api-key", "secret").exit_code == 0
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}

    def test_requests_share_the_server_as_far_as_asked(self, server: FakeServer, url: str) -> None:
        server.answer_s = 0.05
        prompts = [word for letter in "abcdefgh" for word in ("--prompt", letter * 4)]
        result = run(url, *prompts, "--concurrency", 4, "--json")
        names = [audited["name"] for audited in report_of(result)["requests"]]
        assert names == [f"prompt {number}" for number in range(1, 9)], "in the order given"
        assert 1 < server.num_running_max <= 4

    @pytest.mark.parametrize(
        ("arguments", "stdin", "complaint"),
        [
            (("--requests", "-"), "{}", "line 1 is not a request"),
            (("--requests", "-"), '{"prompt": "a"}\nnonsense', "line 2 is not valid JSON"),
            (("--requests", "-"), "\n", "there is no request in it"),
            (("--requests", "no-such-file"), None, "No such file"),
            (("--url", "ftp://nowhere"), None, "is not an address"),
        ],
    )
    def test_unusable_input_is_a_usage_error(
        self, url: str, arguments: tuple[str, ...], stdin: str | None, complaint: str
    ) -> None:
        result = run(url, *arguments, stdin=stdin)
        assert result.exit_code == 2
        assert complaint in result.stderr

    def test_help_teaches_by_example(self) -> None:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["audit", "--help"])
        assert "outrider audit --requests recorded.jsonl --repeat 3" in result.stdout
        assert "Exit status" in result.stdout


class TestBodies:
    PLAIN = Run(token_ids=(5, 6, 7), prompt_token_ids=(1, 2), finish_reason="stop")

    def test_the_seed_fills_a_gap_only(self) -> None:
        overrides = Overrides(seed=9)
        assert audit_request("", {"prompt": "a"}, overrides).body["seed"] == 9, "the server samples by default"
        assert audit_request("", {"prompt": "a", "seed": 4}, overrides).body["seed"] == 4
        assert "seed" not in audit_request("", {"prompt": "a", "temperature": 0}, overrides).body

    def test_what_is_recorded_about_speculation_stays_but_for_the_switch(self) -> None:
        recorded = {"prompt": "a", "seed": 1, "speculation": {"enabled": False, "num_speculative_tokens": 3}}
        request = audit_request("", recorded, Overrides())
        assert request.changes == ("speculation enabled",)
        assert run_body(request, enabled=True)["speculation"] == {
            "enabled": True,
            "always": True,
            "num_speculative_tokens": 3,
        }
        assert run_body(request, enabled=False)["speculation"] == {"enabled": False}

    @pytest.mark.parametrize(
        ("parameters", "way"),
        [
            ({}, ReplayWay.PREFIX),
            ({"presence_penalty": 0, "response_format": {"type": "text"}, "tools": []}, ReplayWay.PREFIX),
            ({"repetition_penalty": 1.5, "bad_words": ["x"], "stop": "x"}, ReplayWay.PREFIX),
            ({"presence_penalty": 0.1}, ReplayWay.PARTIAL),
            ({"frequency_penalty": -0.1}, ReplayWay.PARTIAL),
            ({"min_tokens": 2}, ReplayWay.PARTIAL),
            ({"response_format": {"type": "json_object"}}, ReplayWay.PARTIAL),
            ({"structured_outputs": {"regex": "a"}}, ReplayWay.PARTIAL),
            ({"tools": [{"type": "function"}]}, ReplayWay.PARTIAL),
        ],
    )
    def test_a_bare_prefix_will_do_unless_output_is_told_from_prompt(
        self, parameters: dict[str, Any], way: ReplayWay
    ) -> None:
        request = audit_request("", {"prompt": "a", "temperature": 0, **parameters}, Overrides())
        assert replay_way(request, self.PLAIN, Divergence(1, 6, 9)) is way
        assert replay_way(request, self.PLAIN, Divergence(3, None, 9)) is ReplayWay.WHOLE

    def test_a_prefix_is_prompt_and_common_output(self) -> None:
        recorded = {"messages": [{"role": "user", "content": "a"}], "top_p": 0.5, "seed": 1, "tools": []}
        request = audit_request("", recorded, Overrides())
        path, body = replay_body(request, self.PLAIN, 2, ReplayWay.PREFIX, mode="raw")
        assert path == COMPLETIONS
        assert body == {
            "prompt": [1, 2, 5, 6], "max_tokens": 1, "top_p": 0.5, "seed": 1, "logprobs": 20, "logprobs_mode": "raw",
            "return_tokens_as_token_ids": True, "return_token_ids": True, "speculation": {"enabled": False},
        }  # fmt: skip

    def test_min_tokens_fits_a_request_that_was_cut(self) -> None:
        request = audit_request("", {"prompt": "a", "seed": 1, "min_tokens": 9, "echo": True}, Overrides())
        _, body = replay_body(request, self.PLAIN, 1, ReplayWay.PARTIAL, mode="processed")
        assert (body["min_tokens"], body["max_tokens"]) == (2, 2)
        assert "echo" not in body

    def test_both_kinds_of_prompt_at_once_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="line 2"):
            read_bodies(["", '{"prompt": "a", "messages": []}'])


class TestAgainstTheCoordinator:
    """The shapes that the audit reads are those that the HTTP edge writes."""

    @pytest.fixture
    def clusters(self, tmp_path: Path) -> ClusterFactory:
        return ClusterFactory(write_model_dir(tmp_path))

    @asynccontextmanager
    async def divergent(self, clusters: ClusterFactory, num_prompt: int) -> AsyncIterator[Cluster]:
        """A target that says another script from its third token on when it may listen to hints."""
        script = clusters.script

        def script_of(request: target_pb2.GenerateRequest) -> list[int]:
            said = [*script[:2], 9, *script[3:]] if request.speculation.enabled else script
            shift = request.num_prompt_tokens - num_prompt  # a bare prefix goes on where the output was
            return said[shift:] + said[:shift]

        async with clusters.open([clusters.target(script_of=script_of)]) as cluster:
            yield cluster

    @pytest.mark.parametrize(
        ("recorded", "way"),
        [
            ({"prompt": "import"}, ReplayWay.PREFIX),
            ({"prompt": "import", "presence_penalty": 1}, ReplayWay.PARTIAL),
            ({"messages": [{"role": "user", "content": "hi"}]}, ReplayWay.PREFIX),
            ({"messages": [{"role": "user", "content": "hi"}], "min_tokens": 6}, ReplayWay.PARTIAL),
        ],
    )
    async def test_a_divergence_is_found_and_weighed(
        self, clusters: ClusterFactory, recorded: dict[str, Any], way: ReplayWay
    ) -> None:
        request = audit_request("it", {**recorded, "temperature": 0, "max_tokens": 8}, Overrides())
        asked = {name: value for name, value in recorded.items() if name in ("prompt", "messages")}
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/tokenize", json=asked)
        async with self.divergent(clusters, answer.json()["count"]) as cluster:
            report = await Auditor(cluster.client, 2, lambda doing: None).audit(request)
        assert not report.message
        for finding in report.findings:
            assert finding.verdict is Verdict.DIVERGED, finding
            assert finding.divergence == Divergence(2, clusters.script[2], 9)
            assert finding.way is way
            assert finding.margins["processed"] is not None
            assert finding.surroundings is not None
            assert finding.surroundings.tokens[9] == clusters.tokenizer.decode([9])

    async def test_an_honest_server_passes(self, clusters: ClusterFactory) -> None:
        request = audit_request("it", {"prompt": "import", "temperature": 0.7}, Overrides())
        async with clusters.open([clusters.target()]) as cluster:
            report = await Auditor(cluster.client, 2, lambda doing: None).audit(request)
        assert report.verdict is Verdict.IDENTICAL, report
        assert report.plain is not None
        assert report.plain.decoding_mode == "coupled"
