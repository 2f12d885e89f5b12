"""A target worker of two processes serves as one does, and the death of either costs a pause alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from command_line.checkout import DEMO_TARGET
from demo.corpus import held_out_prompts
from outrider.engine.loading.loading import load_model
from outrider.text.tokenizer import Tokenizer
from tests import models
from tests.e2e.system import System, eventually, needs_the_pair, running_system
from tests.engine.sequences import feed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs_the_pair,
]

PROMPTS = held_out_prompts(6)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    words = ("--tensor-parallel-size", 2, "--dtype", "float32")
    with running_system(tmp_path_factory.mktemp("system") / "cache", *words) as running:
        yield running


def ranks(system: System) -> list[psutil.Process]:
    """The target's processes, rank 0 first."""
    first = psutil.Process(system.ready_lines("target-0")[-1]["pid"])
    others = [each for each in psutil.Process(first.ppid()).children() if each.pid != first.pid]
    return [first, *others]


def test_greedy_text_is_that_of_one_process_with_speculation_and_without(system: System) -> None:
    assert len(ranks(system)) == 2
    engine = load_model(models.engine_config(DEMO_TARGET, kv_cache_gib=2**-4))
    tokenizer = Tokenizer(DEMO_TARGET)
    for prompt in PROMPTS:
        expected = list(tokenizer.encode(prompt))
        num_prompt, kv = len(expected), engine.new_sequence()
        while len(expected) < num_prompt + NUM_TOKENS:
            expected.append(int(feed(engine, kv, expected[kv.length :], 1)[-1].argmax()))
        kv.free()
        for enabled in (True, False):
            answer = system.complete(
                prompt,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                return_token_ids=True,
                speculation={"enabled": enabled},
            )
            assert answer["choices"][0]["token_ids"] == expected[num_prompt:]


@pytest.mark.thorough
@pytest.mark.parametrize("who", [pytest.param(1, id="another one"), pytest.param(0, id="rank 0")])
def test_the_death_of_a_rank_loses_no_token(system: System, who: int) -> None:
    def text(prompt: str) -> str:
        return system.text(prompt, max_tokens=200, ignore_eos=True)

    before, num_before = ranks(system), len(system.ready_lines("target-0"))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = list(pool.map(text, PROMPTS))
        answers: list[Future[str]] = [pool.submit(text, prompt) for prompt in PROMPTS]
        eventually(system.sessions, lambda seen: seen["target running"] == len(PROMPTS), "all streams run")
        before[who].kill()
        assert [answer.result() for answer in answers] == expected
    assert len(system.ready_lines("target-0")) == num_before + 1
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in before)
    system.expect_idle()
