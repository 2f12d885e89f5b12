"""Pairs of models that come and go by upgrades while another pair serves, and weights that Jobs fetch.

All models lie in a claim. The second pair has another tokenizer than the demo's.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET, ROOT
from k8s.helm.chart import merged
from tests.cluster.container import FILES
from tests.cluster.network import command, inside
from tests.cluster.traffic import Access, Tally, checked
from tests.coordinator.tiny_model import exchange_letters
from tests.k8s.policy_rules import OTHERS

if TYPE_CHECKING:
    from tests.cluster.story import Story

CLAIM: Final = "models"
HUB: Final = "hub"
CONTENT_ADDRESS: Final = "10.244.0.251"
REPOSITORY: Final = "outrider/letters"


def _pair(name: str, target: str, draft: str) -> dict[str, Any]:
    return {"name": name, "servedModelName": name, "target": {"model": target}, "draft": {"model": draft}}


PAIRS: Final = [
    _pair("demo", "/models/target", "/models/draft"),
    _pair("second", "/models/letters-1", "/models/letters-1"),
]
THIRD: Final = _pair("third", "/models/letters-2", "/models/letters-2")
VALUES: Final[dict[str, Any]] = {"models": {"claim": CLAIM}, "pairs": PAIRS}
SERVED_S: Final = 120.0
TRIES_EVERY_S: Final = 0.5


def put_models(folder: Path) -> None:
    """Fills the claim: the demo's models, and two small ones with tokenizers of their own."""
    for name, source in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT)):
        shutil.copytree(source, folder / name)
    for number in (1, 2):
        exchange_letters(shutil.copytree(DEMO_DRAFT, folder / f"letters-{number}"), number)


async def come_and_go(story: Story, access: Access, tally: Tally) -> None:
    """A third pair comes and goes, and then comes from a Hub, all under traffic for the first pair."""
    await _check_served(story, replace(access, model="second"))
    third = replace(access, model="third")
    refused = await checked(third)
    assert (refused["http_status"], refused["grpc_code"]) == (404, "NOT_FOUND"), refused
    with _Step(story, tally, "another pair comes"):
        await _until_replaced(story, [*PAIRS, THIRD])
        await _check_served(story, third)
    with _Step(story, tally, "it goes"):
        await _until_replaced(story, PAIRS)
        await _until(third, 404, "NOT_FOUND")
    async with _hub(story) as (endpoint, commit):
        source = f"hf://{REPOSITORY}@{commit}"
        story.values = merged(
            story.values, {"models": {"fetch": {"env": [{"name": "HF_ENDPOINT", "value": endpoint}]}}}
        )
        with _Step(story, tally, "another pair comes from a Hub"):
            await _until_replaced(story, [*PAIRS, _pair("third", source, source)])
            await _check_served(story, third)
    await tally.more(1, SERVED_S)


async def _until_replaced(story: Story, pairs: list[dict[str, Any]]) -> None:
    """Upgrades to these pairs. Coordinators stay unless their pods have to wait for other weights."""
    await story.release(merged(story.values, {"pairs": pairs}))


async def _check_served(story: Story, access: Access) -> None:
    found = await _until(access, 200, "OK")
    story.say(f"{access.model}: {found['http_text']!r}")
    assert found["http_text"] == found["grpc_text"] == found["http_text_without_speculation"] != "", found


async def _until(access: Access, status: int, code: str) -> Mapping[str, Any]:
    """Asks until requests for the model are answered so; returns what was found. Raises TimeoutError."""
    async with asyncio.timeout(SERVED_S):
        while True:
            found = await checked(access)
            if (found["http_status"], found["grpc_code"]) == (status, code):
                return found
            await asyncio.sleep(TRIES_EVERY_S)


class _Step:
    """Says at its end how long it took, and what traffic met meanwhile."""

    def __init__(self, story: Story, tally: Tally, name: str) -> None:
        self._story, self._tally, self._name = story, tally, name

    def __enter__(self) -> None:
        self._began_s, self._num_answers = time.monotonic(), self._tally.num_answers
        self._num_failed = len(self._tally.failures)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            num_failed = len(self._tally.failures) - self._num_failed
            answers = f"{self._tally.num_answers - self._num_answers} answers meanwhile, {num_failed} failed"
            self._story.say(f"{self._name}: {time.monotonic() - self._began_s:.0f} s, {answers}")


@asynccontextmanager
async def _hub(story: Story) -> AsyncIterator[tuple[str, str]]:
    """A Hub outside of the installation; yields its address, and the commit of its only repository."""
    address = await story.installation.add_outsider(HUB, OTHERS["stranger"])
    await command("ip", "-netns", HUB, "address", "add", f"{CONTENT_ADDRESS}/24", "dev", "eth0")
    letters = exchange_letters(shutil.copytree(DEMO_DRAFT, FILES / "letters-3"), 3)
    words = [sys.executable, "-m", "tests.cluster.hub", address, CONTENT_ADDRESS, f"{REPOSITORY}={letters}"]
    with (FILES / "logs" / "hub.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *inside(HUB),
            *words,
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SERVED_S):
            commits = json.loads(await process.stdout.readline())
        yield f"http://{address}:443", commits[REPOSITORY]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
