"""`python -m tests.engines.flood_cost`: what a flooding draft worker takes of an engine's step.

Thirty-two requests, two honest draft workers without a model and a third one, which is honest in the first run and
floods in the second. Prints the processor time of hints in a step, which the engine's own step waits for, and the
hints accepted in each step of the requests that honest draft workers have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from outrider.local.free_ports import free_ports
from tests.engines.test_hint_server import PROMPT, Engine, after, running
from tests.engines.vllm_server import Process, start, wait_until

NUM_REQUESTS: Final = 32
TEXT_LEN: Final = 400


def oracle(folder: Path, port: int, texts: Path, *words: str) -> Process:
    log = folder / f"oracle-{port}.log"
    made = start([sys.executable, "-m", "tests.engines.oracle_draft", str(port), str(texts), *words], log)
    wait_until(lambda: "ready" in log.read_text(), "the draft worker is ready")
    return made


async def measure(engine: Engine, seconds: float, step_s: float) -> dict[str, float]:
    """Runs steps; returns what hints took of them, ms."""
    num_opened = 0
    costs: list[float] = []
    until = time.monotonic() + seconds
    warm_at = time.monotonic() + seconds / 4
    accepted_before = engine.num_accepted
    while time.monotonic() < until:
        while len(engine.texts) < NUM_REQUESTS:
            num_opened += 1
            engine.open(f"request-{num_opened}")
        began = time.thread_time()
        engine.step()
        if time.monotonic() > warm_at:
            costs.append(1e3 * (time.thread_time() - began))
        else:
            accepted_before = engine.num_accepted
        for name in [name for name, text in engine.texts.items() if len(text) >= TEXT_LEN]:
            engine.close(name)
        await asyncio.sleep(step_s)
    return {
        "steps": len(costs),
        "median ms": round(statistics.median(costs), 2),
        "p95 ms": round(statistics.quantiles(costs, n=20)[18], 2),
        "accepted a step": round((engine.num_accepted - accepted_before) / len(costs), 1),
    }


async def run(seconds: float, step_s: float, words: list[str]) -> dict[str, float]:
    text = list(PROMPT)
    while len(text) < TEXT_LEN + 20:
        text.append(after(text))
    hints_port, *ports = free_ports(4)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        texts.write_text(json.dumps([[PROMPT, text[len(PROMPT) :]]]))
        drafts = [oracle(Path(folder), port, texts) for port in ports[1:]]
        drafts.append(oracle(Path(folder), ports[0], texts, *words))
        try:
            async with running(ports, port=hints_port) as engine:
                return await measure(engine, seconds, step_s)
        finally:
            for draft in drafts:
                draft.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=10.0, help="pause between two steps")
    options = parser.parse_args()
    for name, words in ({"quiet": [], "flood": ["flood"]}).items():
        print(name, json.dumps(asyncio.run(run(options.seconds, options.step_ms / 1e3, words))), flush=True)


if __name__ == "__main__":
    main()
