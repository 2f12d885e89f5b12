"""The ladder of hint sources in real processes: a draft worker, a draft head beside the target, plain steps."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from benchmarks.shared.worker_pair import Generation, WorkerPair, worker_pair
from command_line.checkout import DEMO_DRAFT, DEMO_HEAD, DEMO_TARGET
from command_line.start.demo_prompts import DEMO_PROMPTS
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2
from tests.e2e.system import needs_the_pair

pytestmark = [pytest.mark.timeout(300), needs_the_pair]

GREEDY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
DRAFT, HEAD = common_pb2.HINT_SOURCE_DRAFT, common_pb2.HINT_SOURCE_HEAD
LOST_AFTER = 100  # tokens


def kill_draft(pair: WorkerPair) -> None:
    """Ends the draft worker as a lost machine does: without a word to anybody."""
    assert pair.draft is not None
    tether = psutil.Process(pair.draft.process.pid)
    for process in tether.children(recursive=True):
        process.kill()


async def test_the_head_goes_on_where_the_draft_worker_was_lost() -> None:
    """Once the hints that the draft worker had sent are used up, the next ones are the head's. That this is the very
    next step is shown where no clock has a say, in `tests/target_worker/test_head_turns.py`."""
    prompt = Tokenizer(DEMO_TARGET).encode(DEMO_PROMPTS[0])
    arguments = ("--draft-head", str(DEMO_HEAD))
    async with worker_pair(DEMO_TARGET, DEMO_DRAFT, target_arguments=arguments) as pair:
        plain = await pair.generate(prompt, GREEDY, use_draft=False)
        assert set(plain.sources) == {0}
        result = Generation()
        running = asyncio.create_task(pair.generate(prompt, GREEDY, result=result))
        while len(result.token_ids) < LOST_AFTER and not running.done():  # noqa: ASYNC110 - tokens arrive meanwhile
            await asyncio.sleep(0)
        assert DRAFT in result.sources
        kill_draft(pair)
        await running
        assert result.token_ids == plain.token_ids
        last = len(result.sources) - 1 - result.sources[::-1].index(DRAFT)
        after = result.sources[last + 1 :]
        assert len(after) > 20, "the draft worker was lost too late"
        assert HEAD in after[:5]
        assert after.count(HEAD) > len(after) / 4
        assert result.finished.stats.num_accepted_head_tokens > len(after) / 4


async def test_without_a_draft_worker_the_head_alone_saves_steps() -> None:
    prompt = Tokenizer(DEMO_TARGET).encode(DEMO_PROMPTS[1])
    async with worker_pair(DEMO_TARGET, None, target_arguments=("--draft-head", str(DEMO_HEAD))) as pair:
        plain = await pair.generate(prompt, GREEDY, use_draft=False)
        pair.has_local_hints = True
        hinted = await pair.generate(prompt, GREEDY)
        assert hinted.token_ids == plain.token_ids
        assert set(hinted.sources) <= {0, HEAD}
        assert len(hinted.sources) < len(plain.sources) / 1.5
        samples = pair.target.metrics()
        accepted = [each.value for each in samples if each.name == "outrider_hint_source_accepted_total"]
        assert accepted == [hinted.finished.stats.num_accepted_head_tokens]
        assert sum(each.value for each in samples if each.name == "outrider_head_milliseconds_count") > 20
