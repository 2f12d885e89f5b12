"""Commands that start the recommended source. Pure."""

from __future__ import annotations

from command_line.draft_kinds import Kind
from command_line.tune.document import as_command, pool_words, wait_words
from command_line.tune.sources.comparison import Comparison, Judged
from command_line.tune.sources.forecasts import Place
from command_line.tune.sources.offers import HEADS

USUAL_NUM_MASKS = 1  # a draft worker's own --num-mask-tokens


def flags(found: Comparison) -> list[str]:
    """Commands to paste: for one machine where one command does it, then for single processes."""
    common: list[object] = ["--dtype", found.settings.dtype]
    quantized: list[object] = (
        ["--quantization", found.settings.quantization] if found.settings.quantization != "none" else []
    )
    best = found.best
    target = [*common, *quantized, *([] if best is None else _hints(best))]
    threads: list[object] = ["--num-threads", found.settings.num_threads]
    if best is None or best.source.place is Place.TARGET:
        return [
            as_command("outrider serve", "--target", found.target, "--no-draft", *target),
            as_command("outrider target-worker", "--model", found.target, *target, *threads),
        ]
    source = best.source
    if source.place is Place.BESIDE:
        beside = ["--draft-head", source.offer.folder]
        return [
            as_command("outrider serve", "--target", found.target, *beside, *target),
            as_command("outrider target-worker", "--model", found.target, *beside, *target, *threads),
        ]
    wait = wait_words(source.pair, found.advice) if found.advice else []
    pool = pool_words(found.advice) if found.advice else []
    draft: list[object] = ["--draft", source.offer.folder]
    sends_features: list[object] = []
    if source.offer.kind is Kind.EARLY_EXIT:
        draft = ["--early-exit-layer", source.offer.num_layers]
    elif source.offer.kind in HEADS:
        sends_features = ["--draft-head", source.offer.folder, "--no-local-head"]
    workers = [
        as_command("outrider target-worker", "--model", found.target, *sends_features, *target, *wait, *threads),
        _draft_worker(found, best),
    ]
    if source.num_masks not in (None, USUAL_NUM_MASKS):
        return workers  # `outrider serve` cannot choose the number
    return [as_command("outrider serve", "--target", found.target, *draft, *target, *pool), *workers]


def _hints(best: Judged) -> list[object]:
    """A bound for every batch size: the worker verifies fewer hints where fewer pay."""
    return ["--num-speculative-tokens", max(each.num_speculative_tokens for each in best.forecasts)]


def _draft_worker(found: Comparison, best: Judged) -> str:
    source, words = best.source, list[object]()
    if source.offer.kind is Kind.EARLY_EXIT:
        words = ["--early-exit-layer", source.offer.num_layers]
    elif source.offer.kind in HEADS:
        words = ["--target-tokenizer", found.target]
    elif source.num_masks not in (None, USUAL_NUM_MASKS):
        words = ["--num-mask-tokens", source.num_masks]
    common = ["--dtype", found.settings.dtype, "--num-threads", 1]
    return as_command("outrider draft-worker", "--model", source.offer.folder, *words, *common)
