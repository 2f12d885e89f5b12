"""Several pairs of real workers behind one coordinator: models of different tokenizers, added, removed and lost while
others serve.

The tests share one system, and the last of them kills a target.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc
from tests import models
from tests.coordinator.tiny_model import exchange_letters
from tests.docs.pages import fences, read
from tests.e2e.replicas import metric, ready_line, wait_until_ready
from tests.e2e.system import ROOT, Command, events_of, eventually, needs_the_pair, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_the_pair]

MAX_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
PROMPT = "def f(x):\n"
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
SERVED_AT_ONCE_S = 10.0  # on a busy machine


@dataclass
class Pair:
    """A target model and its draft, as workers of one name."""

    name: str
    target_dir: Path
    draft_dir: Path
    workers: list[Command] = field(default_factory=list)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.target_dir, CHAT)

    @property
    def entry(self) -> str:
        """The pair's lines of the models file."""
        return (
            f'[[models]]\nname = "{self.name}"\ntokenizer = "{self.target_dir}"\ndrafts = ["{self.name}-draft"]\n'
            'chat_template = "chat.jinja"\n'
        )

    def start(self, folder: Path, redis_url: str) -> None:
        for role, model, name in (
            ("target", self.target_dir, self.name),
            ("draft", self.draft_dir, f"{self.name}-draft"),
        ):
            words = (f"{role}-worker", "--model", model, "--served-model-name", name, "--redis-url", redis_url)
            self.workers.append(Command.start(folder / f"{self.name}-{role}", *words, "--max-num-seqs", 8))

    def fact(self, worker: int, name: str) -> Any:
        line = ready_line(self.workers[worker])
        assert line is not None
        return line[name]

    def num_hints_sent(self) -> float:
        return metric(f"http://127.0.0.1:{self.fact(1, 'metrics_port')}/metrics", "outrider_draft_nodes_sent_total")

    def says(self, token_ids: list[int]) -> tuple[int, ...]:
        """The tokens that the target itself generates, asked without a coordinator."""
        request = target_pb2.GenerateRequest(
            session_id=uuid.uuid4().hex,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        with grpc.insecure_channel(self.fact(0, "address")) as channel:
            events = list(target_pb2_grpc.TargetStub(channel).Generate(request, timeout=60))
        return tuple(token_id for event in events for token_id in event.step.token_ids)


@dataclass
class Fleet:
    """One coordinator, its models file, and pairs of workers."""

    folder: Path
    redis_url: str
    http_port: int
    grpc_port: int
    pairs: dict[str, Pair] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)  # text after PROMPT
    client: httpx.Client = field(init=False)
    stub: generation_pb2_grpc.GenerationStub = field(init=False)

    def list_pairs(self, *pairs: Pair) -> None:
        self.write("\n".join(pair.entry for pair in pairs))

    def write(self, text: str) -> None:
        """Replaces the file at once, as a person's editor or Kubernetes does."""
        new = self.folder / "models.toml.new"
        new.write_text(text)
        new.rename(self.folder / "models.toml")

    def add(self, pair: Pair) -> None:
        """Starts a pair's workers, and asks the target what it says."""
        self.pairs[pair.name] = pair
        pair.start(self.folder, self.redis_url)
        for worker in pair.workers:
            wait_until_ready(worker)
        text = pair.tokenizer.decode(pair.says(pair.tokenizer.encode(PROMPT)))
        assert text not in self.expected.values(), "models that say the same would show nothing"
        self.expected[pair.name] = text

    def post(self, path: str, model: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=GREEDY | {"model": model} | body)

    def complete(self, model: str, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", model, **{"prompt": PROMPT, **body})

    @contextmanager
    def stream(self, model: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion."""
        asked = GREEDY | {"model": model, "prompt": PROMPT, "stream": True} | body
        with self.client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.read().decode()
            yield events_of(response.iter_lines())

    def models(self) -> dict[str, tuple[int, int]]:
        """Numbers of targets and drafts of the models that are listed."""
        data = self.client.get("/v1/models").json()["data"]
        return {each["id"]: (each["num_target_workers"], each["num_draft_workers"]) for each in data}

    def until_listed(self, *names: str) -> None:
        expected = dict.fromkeys(names, (1, 1))
        eventually(self.models, lambda seen: seen == expected, f"the models are {names}, each with a pair", 60)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/health").json()
        return found


def tiny_pair(name: str, family: str, folder: Path, num_exchanged: int) -> Pair:
    """A random model with a tokenizer of its own, whose draft is the same model."""
    directory = models.copy_of(family, folder / name)
    exchange_letters(directory, num_exchanged)
    return Pair(name, directory, directory)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with two pairs: the demo's and a tiny one."""
    folder, commands = tmp_path_factory.mktemp("pairs"), list[Command]()
    server = EmbeddedRedis(folder)
    ray_folder = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))  # sockets of Ray lie below it
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
        stack.callback(server.stop)
        http_port, grpc_port = free_ports(2)
        made = Fleet(folder, server.start(), http_port, grpc_port)
        stack.callback(lambda: stop(*commands, *(worker for pair in made.pairs.values() for worker in pair.workers)))
        (folder / "chat.jinja").write_text(CHAT)
        demo, tiny = Pair("demo", DEMO_TARGET, DEMO_DRAFT), tiny_pair("tiny", "llama", folder, 1)
        made.list_pairs(demo, tiny)
        commands.append(
            Command.start(
                folder / "coordinator",
                *("coordinator", "--models", folder / "models.toml", "--redis-url", made.redis_url),
                *("--port", made.http_port, "--grpc-port", made.grpc_port, "--ray-temp-dir", ray_folder / "c"),
            )
        )
        wait_until_ready(commands[0])
        made.client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{made.http_port}", timeout=60, trust_env=False)
        )
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{made.grpc_port}"))
        made.stub = generation_pb2_grpc.GenerationStub(channel)
        for pair in (demo, tiny):
            made.add(pair)
        made.until_listed("demo", "tiny")
        yield made


def stop(*commands: Command) -> None:
    for command in commands:
        if command.process.poll() is None:
            command.process.terminate()
    for command in commands:
        command.stop()
        for pid in command.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def steady_traffic(fleet: Fleet, *names: str) -> Iterator[Callable[[str], int]]:
    """Streams and whole answers of these models, one after the other, until the block ends. No request may fail, or say
    anything else than its model. Yields a function that counts those of a model that were right."""
    num_right = dict.fromkeys(names, 0)
    wrong: list[str] = []
    is_over = threading.Event()

    def ask(name: str) -> None:
        while not is_over.is_set():
            try:
                whole = fleet.complete(name)
                told = whole.json()["choices"][0]["text"] if whole.status_code == 200 else whole.text
                with fleet.stream(name) as events:
                    streamed = text_of(list(events))
            except Exception as error:
                wrong.append(f"{name}: {error!r}")
                return
            if [told, streamed] != [fleet.expected[name]] * 2:
                wrong.append(f"{name}: {told!r}, {streamed!r}")
                return
            num_right[name] += 1

    with ThreadPoolExecutor(len(names)) as pool:
        running = [pool.submit(ask, name) for name in names]
        try:
            yield lambda name: num_right[name]
        finally:
            is_over.set()
            for each in running:
                each.result(60)
    assert not wrong
    assert min(num_right.values()) > 0


def until_more(num_right: Callable[[str], int], *names: str) -> None:
    """Waits until requests of each of these models have begun and ended from now on."""
    before = {name: num_right(name) for name in names}
    eventually(
        lambda: {name: num_right(name) - before[name] for name in names},
        lambda seen: min(seen.values()) >= 2,
        "they are served",
    )


def test_each_pair_says_its_own_text_with_its_own_hints(fleet: Fleet) -> None:
    for name, pair in fleet.pairs.items():
        prompt = pair.tokenizer.encode(PROMPT)
        hints = pair.num_hints_sent()
        answer = fleet.complete(name, return_token_ids=True, speculation={"always": True}).json()
        choice = answer["choices"][0]
        assert answer["model"] == name
        assert choice["prompt_token_ids"] == prompt
        assert tuple(choice["token_ids"]) == pair.says(prompt)
        assert choice["text"] == fleet.expected[name]
        # A short text may be over before its first hint.
        for number in range(20):
            if pair.num_hints_sent() > hints:
                break
            fleet.complete(name, prompt=f"{PROMPT}{number}", max_tokens=100, speculation={"always": True})
        assert pair.num_hints_sent() > hints


def test_each_pair_streams_and_chats_and_answers_over_grpc(fleet: Fleet) -> None:
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    for name, pair in fleet.pairs.items():
        with fleet.stream(name) as events:
            assert text_of(list(events)) == fleet.expected[name]
        asked = generation_pb2.GenerationRequest(model=name, prompt=PROMPT, sampling=sampling)
        chunks = list(fleet.stub.Generate(asked, timeout=60))
        assert "".join(chunk.text for chunk in chunks) == fleet.expected[name]
        messages = [{"role": "user", "content": "x = 1"}]
        rendered = pair.tokenizer.encode(pair.tokenizer.render_chat(messages), add_special_tokens=False)
        answer = fleet.post("/v1/chat/completions", name, messages=messages).json()
        assert answer["choices"][0]["message"]["content"] == pair.tokenizer.decode(pair.says(rendered))
        assert answer["usage"]["prompt_tokens"] == len(rendered)


def test_each_pair_follows_grammars_in_its_own_vocabulary(fleet: Fleet) -> None:
    schema = {
        "type": "object",
        "properties": {"is_it_so": {"type": "boolean"}, "kind": {"enum": ["import", "return"]}},
        "required": ["is_it_so", "kind"],
        "additionalProperties": False,
    }
    for name in fleet.pairs:
        answer = fleet.complete(name, structured_outputs={"json": schema}, max_tokens=120, ignore_eos=False).json()
        told = json.loads(answer["choices"][0]["text"])
        assert isinstance(told["is_it_so"], bool)
        assert told["kind"] in ("import", "return")
        assert answer["metrics"]["speculative_decoding"]["num_forced_tokens"] > 0


def test_a_third_pair_comes_and_goes_while_the_others_serve(fleet: Fleet) -> None:
    demo, tiny = fleet.pairs["demo"], fleet.pairs["tiny"]
    third = tiny_pair("third", "qwen3", fleet.folder, 2)
    with steady_traffic(fleet, "demo", "tiny") as num_right:
        assert fleet.complete("third").status_code == 404
        fleet.add(third)
        eventually(
            fleet.health,
            lambda seen: sum("'third'" in each["reason"] for each in seen["excluded_workers"]) == 1,
            "its target is there, and nobody's",
        )
        fleet.list_pairs(demo, tiny, third)
        fleet.until_listed("demo", "tiny", "third")
        assert fleet.complete("third").json()["choices"][0]["text"] == fleet.expected["third"]
        until_more(num_right, "demo", "tiny")
        # One that runs while its model goes.
        whole = fleet.complete("third", max_tokens=150).json()["choices"][0]["text"]
        with fleet.stream("third", max_tokens=150) as events:
            seen = [next(events)]
            with stopped(third.workers[0]):
                fleet.list_pairs(demo, tiny)
                eventually(lambda: fleet.complete("third").status_code, lambda status: status == 404, "it has gone")
            seen += list(events)
        assert text_of(seen) == whole
        fleet.until_listed("demo", "tiny")
        until_more(num_right, "demo", "tiny")
        stop(*third.workers)
        until_more(num_right, "demo", "tiny")
    del fleet.pairs["third"], fleet.expected["third"]


@contextmanager
def stopped(worker: Command) -> Iterator[None]:
    """Nothing is generated meanwhile. For less than the seconds after which it counts as lost."""
    line = ready_line(worker)
    assert line is not None
    os.kill(line["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(line["pid"], signal.SIGCONT)


def test_a_wrong_file_is_refused_and_nothing_changes(fleet: Fleet) -> None:
    before = (fleet.folder / "models.toml").read_text()
    with steady_traffic(fleet, "demo", "tiny") as num_right:
        fleet.write(before.replace(str(fleet.pairs["tiny"].target_dir), str(fleet.folder / "nowhere")))
        refusal = eventually(
            lambda: fleet.health()["refused_models_file"], lambda reason: reason is not None, "the file is refused"
        )
        assert "model tiny" in refusal
        assert "nowhere/tokenizer.json does not exist" in refusal
        until_more(num_right, "demo", "tiny")
        degraded = "outrider_models_file_degraded"
        eventually(lambda: metric(f"{fleet.client.base_url}/metrics", degraded), lambda seen: seen == 1, "it shows")
        fleet.write(before)
        eventually(lambda: fleet.health()["refused_models_file"], lambda reason: reason is None, "it is right again")
    fleet.until_listed("demo", "tiny")


def test_the_guides_pairs_are_served(fleet: Fleet) -> None:
    """The commands and the file of the page, with this system's Redis and port."""
    page = read("docs/guides/several-models.md")
    (entries,) = (each.content for each in fences(page) if each.language == "toml")
    shell = [each.content for each in fences(page) if each.language == "sh"]
    started: list[Command] = []
    try:
        for line in shell[0].splitlines():
            words = shlex.split(line.removesuffix("&"))
            if words[1] in ("target-worker", "draft-worker"):
                name = words[words.index("--served-model-name") + 1]
                started.append(Command.start(fleet.folder / name, *words[1:], "--redis-url", fleet.redis_url))
            else:
                assert words in (
                    ["export", "OUTRIDER_REDIS_URL=redis://127.0.0.1:6379/0"],
                    ["outrider", "coordinator", "--models", "models.toml"],
                )
        assert len(started) == 4
        for worker in started:
            wait_until_ready(worker)
        before = (fleet.folder / "models.toml").read_text()
        fleet.write(before + entries.replace('"demo/', f'"{ROOT}/demo/'))
        fleet.until_listed("demo", "tiny", "code", "code-mini")
        told = [
            json.loads(subprocess.check_output(["sh", "-c", line.replace("8000", str(fleet.http_port))], timeout=60))
            for line in shell[1].splitlines()
        ]
        assert {"code", "code-mini"} <= {each["id"] for each in told[0]["data"]}
        assert told[1]["model"] == "code-mini"
        assert told[1]["usage"]["completion_tokens"] > 0
        assert fleet.complete("gpt-4o-mini").json()["model"] == "code-mini"
        # One tokenizer, two drafts: the text is the target's in any case.
        assert fleet.complete("code").json()["choices"][0]["text"] == fleet.expected["demo"]
        fleet.write(before)
        fleet.until_listed("demo", "tiny")
    finally:
        stop(*started)


def test_a_pair_whose_targets_die_holds_up_no_other(fleet: Fleet) -> None:
    """The last test: the tiny target does not come back."""
    target = fleet.pairs["tiny"].workers[0]
    page = f"http://127.0.0.1:{fleet.pairs['tiny'].fact(0, 'metrics_port')}/metrics"
    with ThreadPoolExecutor(16) as pool:
        lost = [pool.submit(fleet.complete, "tiny", max_tokens=200, deadline_ms=20_000) for _ in range(16)]
        eventually(lambda: metric(page, "outrider_num_requests_running"), lambda seen: seen > 0, "they run")
        for pid in target.processes():
            os.kill(pid, signal.SIGKILL)
        is_gone = False
        while not is_gone:
            is_gone = "tiny" not in fleet.models()
            began_s = time.monotonic()
            assert fleet.complete("demo").json()["choices"][0]["text"] == fleet.expected["demo"]
            assert time.monotonic() - began_s < SERVED_AT_ONCE_S
        refused = fleet.complete("tiny")
        assert refused.status_code == 503
        assert "no target worker of tiny is live" in refused.json()["error"]["message"]
        assert fleet.complete("demo").json()["choices"][0]["text"] == fleet.expected["demo"]
        statuses = {each.result(60).status_code for each in lost}
    assert statuses & {429, 503, 504}, "none was lost, so this shows nothing"
    assert fleet.models() == {"demo": (1, 1)}
