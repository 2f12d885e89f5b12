"""Grammars are compiled once each, and one that takes long delays nobody for longer than is stated."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.grammar import GrammarCompiler, compile_queue
from outrider.grammar.compile_queue import MAX_RUNNING, CompileQueue
from outrider.grammar.position import Position
from outrider.grammar.tokenizer import load_tokenizer
from outrider.sampling_params import GrammarKind, GrammarSpec

TOKENIZER_JSON = Path(__file__).parents[2] / "demo" / "target" / "tokenizer.json"


class Builds:
    """Stands for compiling: each build is counted and ends when it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()
        self._changed = threading.Condition()

    def __call__(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
        assert self.gate.wait(30)
        return f"compiled {name}"

    def wait_for(self, names: list[str]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.begun == names, timeout=30)


@pytest.fixture
def builds() -> Iterator[Builds]:
    builds = Builds()
    yield builds
    builds.gate.set()


def ask(queue: CompileQueue[str], builds: Builds, name: str, owner: str = "") -> asyncio.Task[str]:
    return asyncio.create_task(queue.get_async(name.encode(), owner, lambda: builds(name)))


async def until_begun(builds: Builds, *names: str) -> None:
    assert await asyncio.to_thread(builds.wait_for, list(names)), builds.begun


async def test_eight_callers_with_one_grammar_compile_it_once(builds: Builds) -> None:
    queue = CompileQueue[str](4)
    asked = [ask(queue, builds, "same") for _ in range(8)]
    await until_begun(builds, "same")
    builds.gate.set()
    assert await asyncio.gather(*asked) == ["compiled same"] * 8
    assert await ask(queue, builds, "same") == "compiled same"
    assert builds.begun == ["same"]


async def test_only_the_latest_are_kept(builds: Builds) -> None:
    queue = CompileQueue[str](2)
    builds.gate.set()
    for name in ("a", "b", "a", "c", "a", "b"):
        await ask(queue, builds, name)
    assert builds.begun == ["a", "b", "c", "b"]


async def test_a_caller_that_leaves_gives_up_its_place_in_the_line(builds: Builds) -> None:
    queue = CompileQueue[str](4)
    running = [ask(queue, builds, f"slow {index}") for index in range(MAX_RUNNING)]
    await until_begun(builds, *(f"slow {index}" for index in range(MAX_RUNNING)))
    gone, shared, stays = (ask(queue, builds, name) for name in ("gone", "shared", "shared"))
    await asyncio.sleep(0)
    for task in (gone, shared):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    builds.gate.set()
    await asyncio.gather(*running)
    assert await stays == "compiled shared"
    assert "gone" not in builds.begun


async def test_an_owner_with_many_grammars_goes_after_one_with_none_running(builds: Builds) -> None:
    queue = CompileQueue[str](8)
    greedy = [ask(queue, builds, f"greedy {index}", "greedy") for index in range(MAX_RUNNING + 4)]
    await until_begun(builds, *(f"greedy {index}" for index in range(MAX_RUNNING)))
    modest = ask(queue, builds, "modest", "modest")
    await asyncio.sleep(0)
    builds.gate.set()
    await asyncio.gather(modest, *greedy)
    assert builds.begun.index("modest") == MAX_RUNNING


async def test_two_owners_with_many_grammars_shut_a_third_one_out_no_more_than_each_other(builds: Builds) -> None:
    queue = CompileQueue[str](8)
    running = [ask(queue, builds, f"running {owner}", owner) for owner in "ab"]
    await until_begun(builds, "running a", "running b")
    waiting = [ask(queue, builds, f"{owner} {index}", owner) for index in range(10) for owner in "ab"]
    await asyncio.sleep(0)
    modest = ask(queue, builds, "modest", "c")
    await asyncio.sleep(0)
    builds.gate.set()
    await asyncio.gather(modest, *running, *waiting)
    assert builds.begun.index("modest") < 8


async def test_no_more_wait_than_there_is_room_for(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MAX_CALLERS", 8)
    queue = CompileQueue[str](4)
    greedy = [ask(queue, builds, f"greedy {index}", "greedy") for index in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many grammars are waiting"):
        await ask(queue, builds, "greedy 4", "greedy")
    others = [ask(queue, builds, f"other {index}", f"owner {index}") for index in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await ask(queue, builds, "one too many", "late")
    builds.gate.set()
    await asyncio.gather(*greedy, *others)
    assert await ask(queue, builds, "greedy 4", "greedy") == "compiled greedy 4"


async def test_what_takes_too_long_is_refused_as_such_and_what_is_behind_it_as_overload(
    builds: Builds,
) -> None:
    queue = CompileQueue[str](4, time_limit_s=0.05, wait_max_s=0.2)
    asked = [ask(queue, builds, f"slow {index}") for index in range(MAX_RUNNING)]
    await until_begun(builds, *(f"slow {index}" for index in range(MAX_RUNNING)))
    behind = ask(queue, builds, "behind")
    for task in asked:
        with pytest.raises(InvalidRequest, match=r"takes longer than 0\.05 s to compile"):
            await task
    with pytest.raises(Overloaded, match="others are before it"):
        await behind
    builds.gate.set()
    # Waiting is not work: it took none of the processor's time and is kept for whoever comes again.
    async with asyncio.timeout(30):
        while True:
            try:
                assert await ask(queue, builds, "slow 0") == "compiled slow 0"
                break
            except (InvalidRequest, Overloaded):
                await asyncio.sleep(0)
    assert "behind" not in builds.begun


async def test_a_refusal_is_remembered_and_a_lack_of_room_is_not() -> None:
    queue, tried = CompileQueue[str](4), []

    def build(error: Exception) -> str:
        tried.append(error)
        raise error

    for error, message in ((InvalidRequest("grammar", "bad"), "bad"), (MemoryError(), "no room")):
        for _ in range(2):
            with pytest.raises((InvalidRequest, Overloaded), match=message):
                await queue.get_async(message.encode(), "", partial(build, error))
    assert [type(error) for error in tried] == [InvalidRequest, MemoryError, MemoryError]


async def test_a_build_that_fails_as_nobody_foresaw_tells_its_callers_and_frees_its_slot() -> None:
    class Panic(BaseException):
        """As pyo3's: a panic of Rust code is no Exception."""

    def build(error: BaseException) -> str:
        raise error

    queue = CompileQueue[str](4)
    for number, error in enumerate([Panic("index out of bounds"), KeyError("oneOf"), Panic()]):
        with pytest.raises(OutriderError, match="compiling the grammar failed") as caught:
            await queue.get_async(b"%d" % number, "", partial(build, error))
        assert type(caught.value) is OutriderError
    assert await queue.get_async(b"good", "", lambda: "compiled") == "compiled"


async def test_without_a_thread_to_be_had_callers_are_told_and_the_queue_goes_on(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    queue = CompileQueue[str](4)
    with monkeypatch.context() as patched:
        patched.setattr(compile_queue, "start_with_a_deep_stack", refuse)
        for _ in range(MAX_RUNNING + 1):
            with pytest.raises(Overloaded, match="no room"):
                await ask(queue, builds, "a")
    builds.gate.set()
    assert await ask(queue, builds, "a") == "compiled a"


async def test_a_worker_compiles_for_the_owners_that_its_callers_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners = []

    async def get_async(self: CompileQueue[str], key: bytes, owner: str, build: object) -> str:
        owners.append(owner)
        raise Overloaded("that is all")

    monkeypatch.setattr(CompileQueue, "get_async", get_async)
    compiler = GrammarCompiler(Path("none"), vocab_size=1, eos_token_ids=frozenset())
    for owner in ("one", "other"):
        with pytest.raises(Overloaded):
            await compiler.compile_async(GrammarSpec(GrammarKind.REGEX, "a"), owner)
    assert owners == ["one", "other"]


async def test_a_verdict_tells_the_time_of_compiling_but_not_of_reading_the_vocabulary() -> None:
    reading_s = 0.3

    def load(path: Path) -> tuple[LLTokenizer, int]:
        began_s = time.thread_time()
        while time.thread_time() - began_s < reading_s:
            pass
        return load_tokenizer(path)

    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=4096, eos_token_ids=frozenset([1]), load=load)
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    refusal, compile_s = await compiler.judge_async(spec)
    assert refusal is None
    assert 0 < compile_s < reading_s
    assert await compiler.judge_async(spec) == (None, compile_s)
    refusal, compile_s = await compiler.judge_async(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": {}}'))
    assert refusal is not None
    assert compile_s > 0


async def test_refused_grammars_keep_nothing_of_their_compiler() -> None:
    """Each kept refusal would else hold the matcher, of megabytes, in the frames of its traceback."""
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=4096, eos_token_ids=frozenset([1]))
    before = _num_positions()
    for index in range(8):
        # Compiled, and then refused: no text could follow.
        schema = {"type": "object", "properties": {f"p{index}-{number}": {} for number in range(1000)}}
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="does not compile"):
                await compiler.check_async(spec)
        with pytest.raises(InvalidRequest, match="does not compile"):
            await compiler.compile_async(spec)
    gc.collect()
    assert _num_positions() == before
    for kept in (*compiler._verdicts._kept.values(), *compiler._states._kept.values()):
        error = kept[0] if isinstance(kept, tuple) else kept
        assert isinstance(error, InvalidRequest)
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    assert len(compiler._verdicts._kept) == len(compiler._states._kept) == 8


def _num_positions() -> int:
    return sum(isinstance(each, Position) for each in gc.get_objects())
