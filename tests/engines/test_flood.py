"""A real draft worker floods a real hint server, another one is honest: the engine has the hints of that one."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from outrider.local.free_ports import free_ports
from tests.engines.flood_cost import oracle
from tests.engines.test_hint_server import PROMPT, after, running

NUM_REQUESTS = 8
NUM_STEPS = 100
TEXT_LEN = 30_000  # more than is generated in the time that the test waits


async def test_an_honest_draft_workers_hints_are_accepted_beside_one_that_floods(tmp_path: Path) -> None:
    text = list(PROMPT)
    while len(text) < TEXT_LEN:
        text.append(after(text))
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([[PROMPT, text[len(PROMPT) :]]]))
    honest_port, flood_port = free_ports(2)
    drafts = [oracle(tmp_path, honest_port, texts), oracle(tmp_path, flood_port, texts, "flood")]
    try:
        async with running([honest_port, flood_port]) as engine:
            for index in range(NUM_REQUESTS):
                engine.open(f"request-{index}")
            gains, before = deque[int](maxlen=NUM_STEPS), 0

            def is_done() -> bool:
                nonlocal before
                gains.append(engine.num_accepted - before)
                before = engine.num_accepted
                return len(gains) == NUM_STEPS and sum(gains) >= NUM_STEPS

            # Half of the requests have the honest one, whose hints are nearly all right. What the flood sends never is.
            # How many they are on a machine of one's own, `tests.engines.flood_cost` says.
            await engine.steps_until(is_done, "one hint is accepted a step, in a hundred steps")
            assert engine.link.num_starts == 1
    finally:
        for draft in drafts:
            draft.stop()
