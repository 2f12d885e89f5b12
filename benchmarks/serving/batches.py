"""Measures what a batch costs other requests, and what it gets when there are none.

One system is up (`outrider serve --batch-files`). Each round has four turns, in another order each time:

  alone          streamed requests of `--streams` clients
  beside         the same, while a batch runs
  offline        as many requests at once as the target has slots, sent by an ordinary client
  batch          a batch, with nothing else

The result shows the gaps between chunks (ITL) and the times to the first token beside a batch relative to those alone,
and the output tokens per second of a batch relative to the ordinary client's, each within its round. The exit status is
1 if the median of the 99th percentiles' ratios is above `--slower-max`, or that of throughput below `--share-min`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.serving.http_servers import MODEL_NAME, running_outrider
from benchmarks.shared.figures import percentile, spread
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from command_line.load.requests import new_bench_client, observe
from command_line.load.summary import RequestResult
from demo.corpus import held_out_prompts

TIMEOUT_S: Final = 120.0
PATH: Final = "/v1/completions"
NUM_LINES: Final = 50_000  # more than any turn runs
LOOK_S: Final = 0.2
TURNS: Final = ("alone", "beside", "offline", "batch")


@dataclass(frozen=True, slots=True)
class Turn:
    """Times and speed of one turn: milliseconds, and output tokens per second."""

    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float


class Load:
    """Requests and batches of one server."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self._url, self._given = url, arguments
        self._chance = random.Random(arguments.seed)
        self._prompts = held_out_prompts(64, seed=arguments.seed)
        self._http = new_bench_client(TIMEOUT_S, api_key=None)
        self._file_id = ""

    async def __aenter__(self) -> Load:
        lines = (
            {"custom_id": str(number), "method": "POST", "url": PATH, "body": self._body()}
            for number in range(NUM_LINES)
        )
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        files = {"file": ("lines.jsonl", content)}
        answer = await self._http.post(f"{self._url}/v1/files", data={"purpose": "batch"}, files=files)
        self._file_id = answer.raise_for_status().json()["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def _body(self) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "prompt": self._chance.choice(self._prompts),
            "max_tokens": self._given.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def streams(self, num: int) -> Turn:
        """Runs a closed loop of `num` clients."""
        until_s = time.perf_counter() + self._given.seconds
        results: list[RequestResult] = []

        async def one() -> None:
            while time.perf_counter() < until_s:
                body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
                found = await observe(self._http, f"{self._url}{PATH}", body, index=0, timeout_s=TIMEOUT_S)
                if found.cause is not None:
                    sys.exit(f"a request failed: {found.cause}")
                results.append(found)

        began_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(num)))
        seconds = time.perf_counter() - began_s
        gaps = [1e3 * gap for each in results for gap in each.itl_s]
        firsts = [1e3 * each.ttft_s for each in results if each.ttft_s is not None]
        return Turn(
            percentile(gaps, 0.5), percentile(gaps, 0.99), percentile(firsts, 0.5), percentile(firsts, 0.99),
            sum(each.num_output_tokens for each in results) / seconds,
        )  # fmt: skip

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[str]:
        """A batch that runs; its id. It is cancelled at the end."""
        asked = {"input_file_id": self._file_id, "endpoint": PATH, "completion_window": "24h"}
        answer = await self._http.post(f"{self._url}/v1/batches", json=asked)
        batch_id = str(answer.raise_for_status().json()["id"])
        await self._until(batch_id, lambda found: found["request_counts"]["completed"] > 0)
        try:
            yield batch_id
        finally:
            await self._http.post(f"{self._url}/v1/batches/{batch_id}/cancel")
            await self._until(batch_id, lambda found: found["status"] == "cancelled")

    async def batch_alone(self) -> Turn:
        """Output tokens per second of a batch, from one commit of results to another."""
        async with self.batch() as batch_id:
            first = await self._next_commit(batch_id, await self._tokens(batch_id))
            last, until_s = first, first[0] + self._given.seconds
            while last[0] < until_s:
                last = await self._next_commit(batch_id, last[1])
        nan = float("nan")
        return Turn(nan, nan, nan, nan, (last[1] - first[1]) / (last[0] - first[0]))

    async def _next_commit(self, batch_id: str, num_tokens: int) -> tuple[float, int]:
        """When its tokens are no longer `num_tokens`, and how many they are."""
        while True:
            found = await self._tokens(batch_id)
            if found != num_tokens:
                return time.perf_counter(), found
            await asyncio.sleep(LOOK_S / 4)

    async def _tokens(self, batch_id: str) -> int:
        return int((await self._get(batch_id))["usage"]["output_tokens"])

    async def _until(self, batch_id: str, holds: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not holds(found := await self._get(batch_id)):
                if found["status"] == "failed":
                    sys.exit(f"the batch was refused: {found['errors']}")
                await asyncio.sleep(LOOK_S)

    async def _get(self, batch_id: str) -> dict[str, Any]:
        answer: httpx.Response = await self._http.get(f"{self._url}/v1/batches/{batch_id}")
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


async def take(load: Load, name: str, arguments: argparse.Namespace) -> Turn:
    """Runs one turn."""
    if name == "batch":
        return await load.batch_alone()
    if name == "beside":
        async with load.batch():
            return await load.streams(arguments.streams)
    return await load.streams(arguments.places if name == "offline" else arguments.streams)


def compare(rounds: Sequence[dict[str, Turn]]) -> dict[str, Any]:
    """Ratios within rounds."""
    found: dict[str, Any] = {
        f"{name}_beside_over_alone": spread(
            getattr(one["beside"], name) / getattr(one["alone"], name) for one in rounds
        )
        for name in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_s")
    }
    shares = (one["batch"].tokens_per_s / one["offline"].tokens_per_s for one in rounds)
    return found | {"batch_over_offline": spread(shares)}


async def measure(arguments: argparse.Namespace) -> list[dict[str, Turn]]:
    chance, rounds = random.Random(arguments.seed), []
    with target_model(arguments) as target, tempfile.TemporaryDirectory() as files:
        limits = ("--max-num-seqs", str(arguments.places), "--batch-files", str(Path(files)))
        async with (
            running_outrider(target, arguments.draft, *limits) as server,
            Load(server.asked.url, arguments) as load,
        ):
            await load.streams(arguments.places)  # warm-up
            for number in range(arguments.rounds):
                one = {}
                for name in chance.sample(TURNS, len(TURNS)):
                    one[name] = await take(load, name, arguments)
                    say(f"round {number + 1} of {arguments.rounds}, {name}: {one[name]}")
                rounds.append(one)
    return rounds


def known(values: Iterable[float]) -> list[float]:
    """The values without those that a turn does not measure."""
    return [value for value in values if not math.isnan(value)]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="clients beside the batch (default: %(default)s)")
    parser.add_argument("--places", type=int, default=8, help="slots of the target (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--slower-max", type=float, default=1.05, help="p99 of ITL, times alone (default: %(default)s)")
    parser.add_argument("--share-min", type=float, default=0.9, help="of offline throughput (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    rounds = asyncio.run(measure(arguments))
    found = compare(rounds)
    turns = {
        name: {each.name: spread(known(getattr(one[name], each.name) for one in rounds)) for each in fields(Turn)}
        for name in TURNS
    }
    report(arguments, {"machine": machine(), "arguments": given(arguments), "turns": turns, "ratios": found})
    is_bound = found["itl_p99_ms_beside_over_alone"]["median"] <= arguments.slower_max
    has_share = found["batch_over_offline"]["median"] >= arguments.share_min
    for holds, told in ((is_bound, "gaps beside a batch are too long"), (has_share, "a batch alone is too slow")):
        if not holds:
            say(f"NOT WITHIN BOUNDS: {told}")
    return 0 if is_bound and has_share else 1


if __name__ == "__main__":
    sys.exit(main())
