"""Workers as an operator starts them, without a coordinator: plain decoding against the draft, and equal outputs.

One target worker serves both. Slices of plain decoding and of decoding with the draft alternate, in an order that
rotates, and both send the same prompts; the first slice of each is not counted. Ratios are of slices of one round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.gpu.engine_part import kv_gib, num_cpu_threads
from benchmarks.gpu.models_part import models_of, prompts_of
from benchmarks.gpu.outcome import Outcome, Setting
from benchmarks.shared.figures import spread
from benchmarks.shared.worker_pair import Generation, WorkerPair, WorkerProcessHandle, attach_draft, worker_pair
from benchmarks.speculation.closed_loop import RAMP_S, Slice, run_slice
from benchmarks.speculation.modes import MAX_DRAFT_SESSIONS, window
from outrider.sampling_params import SamplingParams

STREAMS: Final = (1, 8)
MAX_MODEL_LEN: Final = "4096"
NUM_ROUNDS: Final = 5
PROMPT_LEN: Final = 64
NUM_TOKENS: Final = 200
MARGIN_S: Final = 8.0  # for the workers' end


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """Placement of the draft: arguments of its worker."""

    name: str
    arguments: tuple[str, ...] = ()
    through: tuple[str, ...] = ()  # a command that runs the worker


def same_gpu(setting: Setting) -> DraftPlace:
    """The target's device."""
    kv = ("--kv-cache-gib", str(kv_gib(setting, "draft")))
    return DraftPlace("on the target's device", ("--device", setting.device, *kv))


def own_gpu(setting: Setting) -> DraftPlace:
    """The second GPU."""
    return DraftPlace("on a GPU of its own", ("--device", "cuda"), ("env", "CUDA_VISIBLE_DEVICES=1"))


def on_cpu(setting: Setting) -> DraftPlace:
    """The CPU's cores, but for two."""
    return DraftPlace("on the CPU", ("--device", "cpu", "--num-threads", str(num_cpu_threads(setting))))


@contextlib.asynccontextmanager
async def started(setting: Setting, place: DraftPlace) -> AsyncIterator[WorkerPair]:
    """The target's worker and the draft's, loaded at the same time."""
    kv = ("--kv-cache-gib", str(kv_gib(setting, "target")))
    arguments = ["--device", setting.device, "--max-model-len", MAX_MODEL_LEN, *kv]
    own = ["--max-model-len", MAX_MODEL_LEN, "--max-num-seqs", MAX_DRAFT_SESSIONS, *place.arguments]
    if not place.through:
        async with worker_pair(setting.target, setting.draft, target_arguments=arguments, draft_arguments=own) as pair:
            yield pair
        return
    async with worker_pair(setting.target, None, target_arguments=arguments) as alone:
        draft = await WorkerProcessHandle.start(
            "draft_worker", "--model", str(setting.draft), *own, through=place.through
        )
        try:
            async with attach_draft(alone, draft.address) as pair:
                yield pair
        finally:
            await draft.stop()


def same_outputs(recorded: Iterable[tuple[Sequence[int], Generation]]) -> bool:
    """Whether all outputs of one prompt are equal, as far as the shorter of them goes."""
    longest: dict[tuple[int, ...], list[int]] = {}
    for prompt, generation in recorded:
        known = longest.setdefault(tuple(prompt), [])
        shared = min(len(known), len(generation.token_ids))
        if known[:shared] != generation.token_ids[:shared]:
            return False
        if len(generation.token_ids) > len(known):
            longest[tuple(prompt)] = list(generation.token_ids)
    return True


def summary(slices: dict[bool, list[Slice]]) -> dict[str, Any]:
    """Figures of one number of streams, from slices without the draft (False) and with it."""
    plain, ahead = ([each.tokens_per_s for each in slices[use_draft]] for use_draft in (False, True))
    windows = [window([each for _, each in own.recorded], own.begin, own.end) for own in slices[True]]
    num_accepted, num_rejected = (
        sum(getattr(each, name) for each in windows) for name in ("num_accepted", "num_rejected")
    )
    steps = max(sum(each.num_steps for each in windows), 1)
    return {
        "plain_tokens_per_s": spread(plain),
        "draft_tokens_per_s": spread(ahead),
        "speedup": spread(b / a for a, b in zip(plain, ahead, strict=True) if a),
        "tokens_per_step": round(sum(each.num_tokens for each in windows) / steps, 3),
        "acceptance": round(num_accepted / max(num_accepted + num_rejected, 1), 4),
        "num_judged": num_accepted + num_rejected,
        "plain_tpot_ms": _median([ms for own in slices[False] for ms in own.tpot_ms]),
        "draft_tpot_ms": _median([ms for own in slices[True] for ms in own.tpot_ms]),
        "same_outputs": same_outputs(pair for own in (*slices[False], *slices[True]) for pair in own.recorded),
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


async def compare(setting: Setting, pair: WorkerPair, num_streams: int, until: float) -> dict[str, Any] | None:
    """Alternating slices until `until` (of time.perf_counter) or `NUM_ROUNDS`; None where no time is left for two."""
    prompts = prompts_of(models_of(setting).language, 64, PROMPT_LEN)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    seconds = 1.0 if setting.is_tiny else 5.0
    round_s = 2 * (RAMP_S + seconds)
    if time.perf_counter() + 2 * round_s > until:
        return None
    slices: dict[bool, list[Slice]] = {False: [], True: []}
    for index in range(1 + (1 if setting.is_tiny else NUM_ROUNDS)):
        if index > 1 and time.perf_counter() + round_s > until:
            break
        first = index * num_streams % len(prompts)
        for use_draft in (False, True) if index % 2 == 0 else (True, False):
            asked = itertools.islice(itertools.cycle(prompts), first, None)
            ran = await run_slice(pair, asked, params, num_streams=num_streams, seconds=seconds, use_draft=use_draft)
            if index:
                slices[use_draft].append(ran)
    return summary(slices) if slices[True] else None


async def equal_outputs(setting: Setting, pair: WorkerPair) -> bool:
    """Whether greedy outputs are equal with the draft and without it, alone and eight at a time."""
    prompts = prompts_of(models_of(setting).language, 8, PROMPT_LEN, seed=11)
    params = SamplingParams(temperature=0.0, max_tokens=32 if setting.is_tiny else 128, ignore_eos=True)
    plain = [await pair.generate(prompt, params, use_draft=False) for prompt in prompts[:3]]
    alone = [await pair.generate(prompt, params, use_draft=True) for prompt in prompts[:3]]
    together = [
        await asyncio.gather(*(pair.generate(prompt, params, use_draft=use_draft) for prompt in prompts))
        for use_draft in (False, True)
    ]
    pairs = [
        *zip(plain, alone, strict=True),
        *zip(plain, together[0][:3], strict=True),
        *zip(*together, strict=True),
    ]
    return all(len(a.token_ids) == params.max_tokens and a.token_ids == b.token_ids for a, b in pairs)


async def measure(setting: Setting, outcome: Outcome, place: DraftPlace) -> None:
    """Writes the figures of a placement of the draft."""
    outcome.put("draft", place.name)
    began = time.perf_counter()
    async with started(setting, place) as pair:
        outcome.put("workers_ready_in_s", round(time.perf_counter() - began, 1))
        outcome.put("equal_outputs", await equal_outputs(setting, pair))
        for index, num_streams in enumerate(STREAMS):
            left = setting.seconds_left - MARGIN_S
            until = time.perf_counter() + left / (len(STREAMS) - index)
            found = await compare(setting, pair, num_streams, until) if left > 0.0 else None
            if found is None:
                outcome.skip(f"{num_streams} streams", "no time")
            else:
                outcome.put(str(num_streams), found)


def run(setting: Setting, outcome: Outcome, place: DraftPlace) -> None:
    """Starts the workers and measures."""
    asyncio.run(measure(setting, outcome, place))
