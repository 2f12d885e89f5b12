"""Starts the systems, measures them alternately and records the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.process import Answer, Peer, PeerError, cpu_seconds, decode_rate
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
from benchmarks.shared.options import say
from benchmarks.shared.worker_pair import (
    Generation,
    TwoCores,
    WorkerPair,
    WorkerProcessHandle,
    attach_draft,
    worker_pair,
    worker_words,
)
from outrider.engine.loading.machine import GIB, available_memory
from outrider.sampling_params import SamplingParams

# Memory of a process of each kind, measured and rounded up: GiB, and a multiple of the target's weights.
_NEEDS = {Family.OUTRIDER: (1.0, 2.5), Family.TRANSFORMERS: (0.8, 1.5), Family.VLLM: (1.8, 3.0)}


class Answering(Protocol):
    """A system that answers batches."""

    async def ask(self, batch: Sequence[Sequence[int]], num_tokens: int) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A running system. Outrider's modes share processes."""

    answering: Answering
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outrider:
    """The pair of workers in one mode. Its times include both ways over gRPC."""

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
    """Systems to start, with their models."""

    systems: Sequence[System]
    target: Path
    drafts: Mapping[str, Path]  # by mode
    vllm_python: Path | None
    vllm_preload: Sequence[Path]
    num_speculative_tokens: int  # of the peers; Outrider chooses per step
    batch_max: int
    max_model_len: int = MAX_MODEL_LEN  # prompt and output


def check_memory(setup: Setup) -> None:
    """Raises PeerError if the systems would not fit into memory together."""
    weights = sum(path.stat().st_size for path in setup.target.glob("*.safetensors")) / GIB
    families = {system.name: system.family for system in setup.systems if system.family is not Family.OUTRIDER}
    ours = {system.num_target_cores for system in setup.systems if system.family is Family.OUTRIDER}
    kinds = [*[Family.OUTRIDER] * max(len(ours), 1), *families.values()]
    wanted = sum(own + times * weights for own, times in (_NEEDS[kind] for kind in kinds))
    there = available_memory() / GIB
    if wanted > there:
        raise PeerError(
            f"{len(kinds)} systems side by side need about {wanted:.0f} GiB and there are {there:.0f}; "
            "select some with --systems and run the benchmark again for the others"
        )


@asynccontextmanager
async def running_systems(setup: Setup) -> AsyncIterator[tuple[dict[System, Running], dict[str, Any]]]:
    """All systems, ready, and facts about them; always stopped."""
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        running: dict[System, Running] = {}
        ours = [system for system in setup.systems if system.family is Family.OUTRIDER]
        for num_cores in sorted({system.num_target_cores for system in ours}):
            own = [system for system in ours if system.num_target_cores == num_cores]
            running |= await _start_outrider(stack, setup, own, is_shared=num_cores > 1)
            say(f"{', '.join(system.name for system in own)}: ready after {time.perf_counter() - began:.0f} s")

        facts: dict[str, Any] = {}

        async def start(system: System) -> None:
            command = peer_command(
                system,
                target=setup.target,
                drafts=setup.drafts,
                vllm_python=setup.vllm_python,
                num_speculative_tokens=setup.num_speculative_tokens,
                max_num_seqs=setup.batch_max,
                max_model_len=setup.max_model_len,
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
    stack: AsyncExitStack, setup: Setup, ours: Sequence[System], *, is_shared: bool
) -> dict[System, Running]:
    """Starts one target worker on core 0, with `is_shared` also on core 1, and one draft worker per draft on core 1;
    one draft at a time has load."""
    common = ["--max-model-len", str(setup.max_model_len)]
    modes = [system.mode for system in ours if system.mode != PLAIN]
    pair = await stack.enter_async_context(
        worker_pair(
            setup.target,
            setup.drafts[modes[0]] if modes else None,
            target_arguments=["--no-enable-prefix-caching", *common],
            draft_arguments=common,
            cores=TwoCores(is_shared=is_shared),
        )
    )
    pids, pairs = [pair.target.process.pid], dict.fromkeys([PLAIN, *modes[:1]], pair)
    if pair.draft is not None:
        pids.append(pair.draft.process.pid)
    if WEAK in modes[1:]:
        own = TwoCores(is_shared=is_shared).draft
        words = [*worker_words(own), *common]
        weak = await WorkerProcessHandle.start(
            "draft_worker", "--model", str(setup.drafts[WEAK]), *words, through=own.through
        )
        stack.push_async_callback(weak.stop)
        pairs[WEAK] = await stack.enter_async_context(attach_draft(pair, weak.address))
        pids.append(weak.process.pid)
    return {system: Running(Outrider(pairs[system.mode], system.mode != PLAIN), tuple(pids)) for system in ours}


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
    """Runs rounds of turns; every round and batch size has its own prompts, the same for all systems.

    The first system rotates. The `num_warmup` rounds before the counted ones fill caches and let Outrider measure its
    costs. A turn at batch B sends at least `num_prompts` prompts, B at a time.
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
        raise PeerError(f"{system.name} generated {min(short)} tokens where {num_tokens} were asked for")
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
