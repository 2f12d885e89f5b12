"""Measures the target, then every source on its sequences. One model is in memory at a time.

For a head the target keeps the features that the head reads, and reads its own sequences again; the features outlive
it. So the head drafts alone, as if beside its target.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from command_line.draft_kinds import Kind
from command_line.progress import Progress
from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.model import NODES_PER_HINT, Pair
from command_line.tune.profile import (
    DRAFT_SIZES,
    MS_PER_S,
    NUM_ROUNDS,
    NUM_SEQUENCES,
    TARGET_SIZES,
    loaded,
    longest_sequence,
    step_times,
)
from command_line.tune.sources.drafting import head_blocks, mask_blocks, medusa_blocks
from command_line.tune.sources.forecasts import Place, Source
from command_line.tune.sources.lookup import lookup_blocks
from command_line.tune.sources.offers import HEADS, Offer
from command_line.tune.texts import PREFILL_TOKENS, GeneratedText, check_texts, generate, ranks_within
from command_line.tune.times import Overheads, StepTimes
from outrider.engine.threads import threads

if TYPE_CHECKING:
    import torch

    from outrider.engine.heads.medusa import MedusaHeads
    from outrider.engine.model import Engine

HEAD_SIZES: Final = (1, 4, 8, 16, 32, 64)
NUM_MASKS: Final = (0, 1, 2, 3)
"""Numbers of mask tokens that are compared."""
NUM_CHAINED: Final = 1
"""Nodes of a draft model's chain that count. It has up to three (`DraftLimits.max_chain_nodes`), and commits break it
off. With the demo pair three would make the prediction 1.5 times the measured speed-up, none 0.9 times. Of a head none
counts: it runs rows again where the target's states arrive."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The measured target, and its sequences."""

    folder: Path
    profile: ModelProfile
    texts: list[GeneratedText]
    features: dict[Offer, list[torch.Tensor]]  # by head, of each text: [its tokens, feature_size]


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the measurement of all sources."""

    settings: Settings
    longest: int  # sequence, tokens
    num_hints_max: int
    overheads: Overheads

    def pair(self, target: TargetFacts, times: StepTimes, texts: Sequence[Sequence[int]]) -> Pair:
        """A source's measurements beside those of the target."""
        return Pair(target.profile.times, times, tuple(texts), self.overheads)


def measure_target(
    folder: Path, offered: Sequence[Offer], prompts: Sequence[Sequence[int]], plan: Plan, progress: Progress
) -> TargetFacts:
    """Step times, sequences, and the features that heads read. Raises OutriderError."""
    settings = plan.settings
    progress.say(f"Loading {folder}.")
    with loaded(folder, settings, is_target=True, longest=plan.longest) as engine:
        progress.say(f"Target steps over up to {TARGET_SIZES[-1]} tokens, at most {settings.budget_s:g} s.")
        profile = step_times(engine, TARGET_SIZES, settings, is_target=True)
        progress.say(f"The target's greedy outputs: {len(prompts)} prompts, at most {settings.budget_s:g} s.")
        texts = generate(engine, prompts, settings, progress.update)
        check_texts(texts, settings.budget_s)
        features = {}
        for offer in offered:
            if offer.kind in HEADS:
                progress.say(f"The target's states for {offer.name}.")
                features[offer] = read_features(engine, offer.folder, texts)
        return TargetFacts(folder, profile, texts, features)


def read_features(engine: Engine, head: Path, texts: Sequence[GeneratedText]) -> list[torch.Tensor]:
    """The features that a head reads of each token, from the target.  # [num_tokens, feature_size] each"""
    import torch

    from outrider.engine.heads.loading import feature_source
    from outrider.engine.model import SequenceChunk

    engine.tap(feature_source(head, engine.config.model, engine.config.dtype, engine.device))
    found = []
    for text in texts:
        whole = [*text.prompt_token_ids, *text.token_ids]
        kv = engine.new_sequence()
        try:
            for start in range(0, len(whole), PREFILL_TOKENS):
                part = whole[start : start + PREFILL_TOKENS]
                kv.extend(len(part))
                engine.forward([SequenceChunk(kv, part, 1)])
            assert engine.features is not None
            found.append(engine.features.index_select(0, torch.from_numpy(kv.slots(0, len(whole)))))
        finally:
            kv.free()
    return found


def measure_sources(target: TargetFacts, offered: Sequence[Offer], plan: Plan, progress: Progress) -> list[Source]:
    """Every offered source, then lookup. Raises OutriderError."""
    found: list[Source] = []
    for offer in offered:
        progress.say(f"Loading {offer.name}, a source of hints.")
        if offer.kind is Kind.MEDUSA:
            found += _medusa(target, offer, plan)
        elif offer.kind in HEADS:
            found += _head(target, offer, plan, progress)
        else:
            found += _model(target, offer, plan, progress)
    blocks = [lookup_blocks(text.prompt_token_ids, text.token_ids, plan.num_hints_max) for text in target.texts]
    pair = plan.pair(target, target.profile.times, [each.ranks for each in blocks])
    offered_counts = tuple(each.num_offered for each in blocks)
    return [*found, Source(Offer(Kind.LOOKUP, target.folder), Place.TARGET, pair, num_offered=offered_counts)]


def _model(target: TargetFacts, offer: Offer, plan: Plan, progress: Progress) -> list[Source]:
    settings = plan.settings
    with loaded(offer.folder, settings, is_target=False, longest=plan.longest, num_layers=offer.num_layers) as engine:
        progress.say(f"Steps of {offer.name} over up to {DRAFT_SIZES[-1]} nodes, at most {settings.budget_s:g} s.")
        profile = step_times(engine, DRAFT_SIZES, settings, is_target=False)
        progress.say(f"Candidates of {offer.name}, at most {settings.budget_s:g} s.")
        if offer.kind is not Kind.MASKS:
            pair = plan.pair(target, profile.times, ranks_within(engine, target.texts, settings.budget_s))
            return [Source(offer, Place.DRAFT_WORKER, replace(pair, num_chained=NUM_CHAINED), profile)]
        engine.enable_masks()
        found = []
        for count in NUM_MASKS:
            progress.update(f"Blocks of {offer.name} with {count} mask tokens.")
            share_s = settings.budget_s / len(NUM_MASKS)
            texts, passes = mask_blocks(engine, target.texts, count, plan.num_hints_max, share_s)
            pair = with_masks(plan.pair(target, profile.times, texts), count, passes)
            found.append(Source(offer, Place.DRAFT_WORKER, pair, profile, num_masks=count))
        return found


def with_masks(pair: Pair, num_masks: int, passes: tuple[float, ...]) -> Pair:
    """The measurements of a draft that reads masks, or of one that could and drafts chains. passes: see `Pair`."""
    if not num_masks:
        return replace(pair, num_chained=NUM_CHAINED)
    rows = 1 + 2 * num_masks  # the last guesses, and masks behind them
    return replace(pair, passes=passes, rows_per_pass=max(NODES_PER_HINT, rows))


def _head(target: TargetFacts, offer: Offer, plan: Plan, progress: Progress) -> list[Source]:
    """A head with attention: beside the target, and on a draft worker where it can run there."""
    import torch

    from outrider.engine.heads.loading import load_head
    from outrider.engine.options import Device, Dtype, EngineOptions

    settings = plan.settings
    options = EngineOptions(
        model=offer.folder,
        device=Device.CPU,
        dtype=Dtype(settings.dtype),
        max_num_seqs=NUM_SEQUENCES,
        max_model_len=min(plan.longest, longest_sequence(target.folder)),
    )
    places = [Place.BESIDE] if offer.kind is Kind.MTP else [Place.DRAFT_WORKER, Place.BESIDE]
    profiles: dict[Place, ModelProfile] = {}
    with threads(1):
        head = load_head(options, target.folder)
        progress.say(f"Blocks of {offer.name}, at most {settings.budget_s:g} s.")
        blocks = head_blocks(head, target.texts, target.features[offer], plan.num_hints_max, settings.budget_s)
        for place in places:
            # Beside the target it has the target's threads, and one token is taken of each row, without alternatives.
            is_beside = place is Place.BESIDE
            torch.set_num_threads(settings.num_threads if is_beside else 1)
            progress.say(f"Passes of {offer.name} ({place}), at most {settings.budget_s:g} s.")
            profiles[place] = step_times(head, HEAD_SIZES, settings, is_target=is_beside)
    return [
        Source(offer, place, plan.pair(target, profile.times, blocks), profile) for place, profile in profiles.items()
    ]


def _medusa(target: TargetFacts, offer: Offer, plan: Plan) -> list[Source]:
    from outrider.engine.heads.loading import load_medusa
    from outrider.engine.model import DTYPES

    with threads(plan.settings.num_threads):
        heads = load_medusa(offer.folder, target.folder, DTYPES[plan.settings.dtype])
        blocks = medusa_blocks(heads, target.texts, target.features[offer], plan.num_hints_max)
        profile = medusa_times(heads, plan.settings)
    pair = replace(plan.pair(target, profile.times, blocks), passes=(1.0,) * heads.num_heads)
    return [Source(offer, Place.BESIDE, pair, profile, num_hints_max=heads.num_heads)]


def medusa_times(heads: MedusaHeads, settings: Settings) -> ModelProfile:
    """Median times of a pass of all heads, by rows."""
    import torch

    weight = next(heads.parameters())  # of a layer that reads the states
    deadline = time.perf_counter() + settings.budget_s

    def timed(num_rows: int) -> float:
        states = torch.rand(num_rows, weight.shape[-1]).to(weight.dtype)
        started = time.perf_counter()
        heads(states).argmax(dim=-1).tolist()
        return (time.perf_counter() - started) * MS_PER_S

    samples = _sampled(timed, HEAD_SIZES, deadline)
    medians = {size: statistics.median(times) for size, times in samples.items()}
    first, _, last = statistics.quantiles(samples[HEAD_SIZES[0]], n=4)
    spread = (last - first) / 2 / medians[HEAD_SIZES[0]]
    num_parameters = sum(parameter.numel() for parameter in heads.parameters())
    return ModelProfile(StepTimes.measured(list(medians.items())), num_parameters, spread, 0)


def _sampled(timed: Callable[[int], float], sizes: Sequence[int], deadline: float) -> dict[int, list[float]]:
    """Times by size, in rotation, each at least twice; an untimed run of the same size goes before."""
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(NUM_ROUNDS):
        if number >= 2 and time.perf_counter() > deadline:
            break
        for size, times in samples.items():
            timed(size)
            times.append(timed(size))
    return samples
