"""A process that runs batches until it is killed: `python -m tests.coordinator.batches.runner_process REDIS FOLDER
LEASE_S LOG`. Each line that it answers is written to LOG first, as a target would have done the work."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from coordinator.batches import batch_results
from coordinator.batches.batch import Batch
from coordinator.batches.batch_lines import LineResult
from coordinator.batches.batch_runner import BatchRunner, Hold
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import MODEL, EchoLines, desk_over


class LoggedLines(EchoLines):
    """Answers lines after a moment, and logs them."""

    def __init__(self, log: Path) -> None:
        super().__init__(room=4)
        self._log = log

    async def run(self, batch: Batch, url: str, body: bytes, request_id: str, hold: Hold) -> LineResult:
        async with hold(MODEL, 1):
            await asyncio.sleep(random.uniform(0.1, 0.5))
        prompt = json.loads(body)["prompt"]
        with self._log.open("a") as log:
            log.write(f"{prompt}\n")
        return LineResult(200, request_id, {"text": prompt, "pid": os.getpid(), "usage": {"prompt_tokens": 2}})


async def main(redis_url: str, folder: str, lease_s: str, log: str) -> None:
    batch_results.WAIT_S, batch_results.LOOK_S = 0.1, 0.02  # type: ignore[misc]
    registry = Registry(redis_url)
    desk = desk_over(registry, Path(folder), lease_s=float(lease_s))
    async with BatchRunner(desk, LoggedLines(Path(log)), poll_s=0.05):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
