"""Starts the systems, lets them take turns and writes down what they did."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.process import Answer, Peer, PeerError, cpu_seconds, decode_rate, resident_gib
from benchmarks.peers.summary import Turn
from benchmarks.peers.systems import (
    MAX_MODEL_LEN,
    PLAIN,
    WEAK,
    Family,
    System,
    peer_command,
    peer_environment,
)
from benchmarks.worker_pair import Generation, WorkerPair, WorkerProcessHandle, attach_draft, worker_pair
from outrider.machine import GIB, available_memory
from outrider.sampling_params import SamplingParams

# What a process of each kind needs, measured and rounded up: GiB by itself, and times the target's weights.
_NEEDS = {Family.OUTRIDER: (1.0, 2.5), Family.TRANSFORMERS: (0.8, 1.5), Family.VLLM: (1.8, 3.0)}


class Answering(Protocol):
    """Whatever can be asked."""

    async def ask(self, batch: Sequence[Sequence[int]], num_tokens: int) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A system that is up. Outrider's modes share processes."""

    answering: Answering
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outrider:
    """The pair of workers in one mode. Its times hold the way over gRPC and back."""

    pair: WorkerPair
    use_draft: bool

    async def ask(self, batch: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        generations = await asyncio.gather(
            *(self.pair.generate(prompt, params, use_draft=self.use_draft) for prompt in batch)
        )
        ended = max(each.arrivals[-1][0] for each in generations)
        rate = decode_rate([_decoding(each) for each in generations])
        return Answer(ended - began, [each.token_ids for each in generations], rate)


def _decoding(generation: Generation) -> tuple[int, float]:
    (first_at, num_first), (last_at, _) = generation.arrivals[0], generation.arrivals[-1]
    return len(generation.token_ids) - num_first, last_at - first_at


@dataclass(frozen=True, slots=True)
class Setup:
    """What is started, with which models."""

    systems: Sequence[System]
    target: Path
    drafts: Mapping[str, Path]  # by mode
    vllm_python: Path | None
    vllm_preload: Sequence[Path]
    num_speculative_tokens: int  # of the peers; Outrider decides from step to step
    batch_max: int


def check_memory(setup: Setup) -> None:
    """Raises PeerError where the systems would not fit side by side."""
    weights = sum(path.stat().st_size for path in setup.target.glob("*.safetensors")) / GIB
    families = {
        system.name: system.family for system in setup.systems if system.family is not Family.OUTRIDER
    }
    kinds = [Family.OUTRIDER, *families.values()]
    wanted = sum(own + times * weights for own, times in (_NEEDS[kind] for kind in kinds))
    there = available_memory() / GIB
    if wanted > there:
        raise PeerError(
            f"{len(kinds)} systems side by side need about {wanted:.0f} GiB and there are {there:.0f}; "
            "select some with --systems and run the benchmark again for the others"
        )


@asynccontextmanager
async def running_systems(setup: Setup) -> AsyncIterator[tuple[dict[System, Running], dict[str, Any]]]:
    """All systems, ready, and facts about them; stopped whatever happens."""
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        running: dict[System, Running] = {}
        ours = [system for system in setup.systems if system.family is Family.OUTRIDER]
        if ours:
            running |= await _start_outrider(stack, setup, ours)
            say(f"outrider is ready after {time.perf_counter() - began:.0f} s")

        facts: dict[str, Any] = {}

        async def start(system: System) -> None:
            command = peer_command(
                system,
                target=setup.target,
                drafts=setup.drafts,
                vllm_python=setup.vllm_python,
                num_speculative_tokens=setup.num_speculative_tokens,
                max_num_seqs=setup.batch_max,
            )
            peer = await Peer.start(system.name, command, peer_environment(system, setup.vllm_preload))
            stack.push_async_callback(peer.stop)
            running[system] = Running(peer, (peer.pid,))
            facts.update(peer.facts)
            say(f"{system.name} is ready after {time.perf_counter() - began:.0f} s")

        started = await asyncio.gather(
            *(start(system) for system in setup.systems if system not in ours), return_exceptions=True
        )
        for result in started:
            if isinstance(result, BaseException):
                raise result
        yield {system: running[system] for system in setup.systems}, facts


async def _start_outrider(
    stack: AsyncExitStack, setup: Setup, ours: Sequence[System]
) -> dict[System, Running]:
    """One target worker on core 0; on core 1 a draft worker per draft, of which one at a time has anything to do."""
    common = ["--max-model-len", str(MAX_MODEL_LEN)]
    modes = [system.mode for system in ours if system.mode != PLAIN]
    pair = await stack.enter_async_context(
        worker_pair(
            setup.target,
            setup.drafts[modes[0]] if modes else None,
            target_arguments=["--cpu-affinity", "0", "--no-enable-prefix-caching", *common],
            draft_arguments=["--cpu-affinity", "1", *common],
        )
    )
    pids, pairs = [pair.target.process.pid], dict.fromkeys([PLAIN, *modes[:1]], pair)
    if pair.draft is not None:
        pids.append(pair.draft.process.pid)
    if WEAK in modes[1:]:
        weak = await WorkerProcessHandle.start(
            "draft_worker", "--model", str(setup.drafts[WEAK]), "--cpu-affinity", "1", *common
        )
        stack.push_async_callback(weak.stop)
        pairs[WEAK] = await stack.enter_async_context(attach_draft(pair, weak.address))
        pids.append(weak.process.pid)
    return {
        system: Running(Outrider(pairs[system.mode], system.mode != PLAIN), tuple(pids)) for system in ours
    }


async def idle_costs(running: Mapping[System, Running], seconds: float = 2.0) -> dict[str, dict[str, float]]:
    """By system: cores that its processes use while nobody asks, and GiB that they hold."""
    before = {system: cpu_seconds(each.pids) for system, each in running.items()}
    await asyncio.sleep(seconds)
    return {
        system.name: {
            "idle_cores": round((cpu_seconds(each.pids) - before[system]) / seconds, 3),
            "resident_gib": round(resident_gib(each.pids), 2),
        }
        for system, each in running.items()
    }


async def measure(
    running: Mapping[System, Running],
    prompts: Iterator[list[int]],
    *,
    batches: Sequence[int],
    num_prompts: int,
    num_tokens: int,
    num_rounds: int,
    num_warmup: int,
) -> list[Turn]:
    """Rounds of turns; every round and batch size has prompts of its own, the same for all systems.

    Who goes first rotates. The `num_warmup` rounds before the counted ones let caches fill and Outrider learn its
    costs. A turn at batch B asks at least `num_prompts` prompts, B at a time.
    """
    turns = []
    order = list(running)
    for number in range(-num_warmup, num_rounds):
        for batch in batches:
            asked = [[next(prompts) for _ in range(batch)] for _ in range(-(-num_prompts // batch))]
            first = number % len(order)
            for system in order[first:] + order[:first]:
                if system.batch_max is not None and batch > system.batch_max:
                    continue
                turn = await _turn(running, system, asked, number, num_tokens)
                kind = f"round {number + 1} of {num_rounds}" if number >= 0 else "warm-up"
                say(f"{kind}, batch {batch}, {system.name}: {turn.tokens_per_s:.0f} tokens/s")
                if number >= 0:
                    turns.append(turn)
    return turns


async def _turn(
    running: Mapping[System, Running],
    system: System,
    asked: Sequence[list[list[int]]],
    number: int,
    num_tokens: int,
) -> Turn:
    own = running[system].pids
    others = sorted({pid for each in running.values() for pid in each.pids} - set(own))
    own_before, others_before, began = cpu_seconds(own), cpu_seconds(others), time.perf_counter()
    answers = [await running[system].answering.ask(batch, num_tokens) for batch in asked]
    took = time.perf_counter() - began
    short = {len(text) for answer in answers for text in answer.texts} - {num_tokens}
    if short:
        raise PeerError(f"{system.name} wrote {min(short)} tokens where {num_tokens} were asked for")
    return Turn(
        number,
        len(asked[0]),
        system,
        sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers),
        sum(answer.decode_tokens_per_s for answer in answers) / len(answers),
        (cpu_seconds(own) - own_before) / took,
        (cpu_seconds(others) - others_before) / took,
        tuple(tuple(text) for answer in answers for text in answer.texts),
    )


def say(words: str) -> None:
    """Progress, for whoever watches."""
    print(words, file=sys.stderr, flush=True)
