"""From turns to figures: medians with quartiles over rounds, ratios within rounds, equal texts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.systems import DRAFT, PLAIN, WEAK, Family, System


@dataclass(frozen=True, slots=True)
class Turn:
    """One system in one round at one batch size."""

    round: int
    batch: int
    system: System
    tokens_per_s: float  # all new tokens over the wall time, prefill included
    decode_tokens_per_s: float  # after the first tokens
    cores_busy: float  # by its own processes, 1 is a whole core
    others_busy: float  # by the processes of all the others meanwhile; the client is not among them
    texts: tuple[tuple[int, ...], ...]


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Median and quartiles; None of nothing."""
    known = sorted(values)
    if not known:
        return None
    low, middle, high = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {
        "median": _rounded(middle),
        "quartiles": [_rounded(low), _rounded(high)],
        "rounds": len(known),
    }


def _rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def summarize(turns: Sequence[Turn]) -> dict[str, Any]:
    """By batch size: every system's figures, and Outrider against each peer at equal cores."""
    made: dict[str, Any] = {}
    for batch in dict.fromkeys(turn.batch for turn in turns):
        by_system: dict[System, dict[int, Turn]] = {}
        for turn in turns:
            if turn.batch == batch:
                by_system.setdefault(turn.system, {})[turn.round] = turn
        made[f"batch_{batch}"] = {
            "systems": {system.name: _figures(system, by_system) for system in by_system},
            **_comparisons(by_system),
        }
    return made


def _figures(system: System, by_system: dict[System, dict[int, Turn]]) -> dict[str, Any]:
    turns = by_system[system]
    baseline = by_system.get(System(Family.OUTRIDER, PLAIN, 1), {})
    num_equal, num_texts = _equal_texts(turns, baseline)
    return {
        "cores": {"target": system.num_target_cores, "total": system.num_cores},
        "tokens_per_s": spread(turn.tokens_per_s for turn in turns.values()),
        "decode_tokens_per_s": spread(turn.decode_tokens_per_s for turn in turns.values()),
        "over_outrider_plain": ratio(turns, baseline),
        "over_own_plain": ratio(turns, by_system.get(system.plain, {})),
        "cores_busy": _rounded(statistics.median(turn.cores_busy for turn in turns.values())),
        "others_busy_max": _rounded(max(turn.others_busy for turn in turns.values())),
        "texts_equal_to_outrider_plain": f"{num_equal} of {num_texts}" if num_texts else None,
    }


def ratio(ours: dict[int, Turn], theirs: dict[int, Turn]) -> dict[str, Any] | None:
    """Tokens per second of ours over theirs, taken within rounds, over the rounds that both have."""
    return spread(
        turn.tokens_per_s / theirs[number].tokens_per_s for number, turn in ours.items() if number in theirs
    )


def _equal_texts(ours: dict[int, Turn], theirs: dict[int, Turn]) -> tuple[int, int]:
    pairs = [
        pair
        for number, turn in ours.items()
        if number in theirs
        for pair in zip(turn.texts, theirs[number].texts, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def _comparisons(by_system: dict[System, dict[int, Turn]]) -> dict[str, Any]:
    """Outrider over each peer in the same mode, and with its draft over the plain peer."""
    made: dict[str, dict[str, Any]] = {"equal_total_cores": {}, "equal_target_cores": {}}
    for ours, our_turns in by_system.items():
        if ours.family is not Family.OUTRIDER:
            continue
        for theirs, their_turns in by_system.items():
            is_same_mode = theirs.mode == ours.mode
            if theirs.family is Family.OUTRIDER or not (is_same_mode or theirs.mode == PLAIN):
                continue
            name = f"{ours.name} / {theirs.name}"
            if theirs.num_cores == ours.num_cores:
                made["equal_total_cores"][name] = ratio(our_turns, their_turns)
            if theirs.num_target_cores == ours.num_target_cores:
                made["equal_target_cores"][name] = ratio(our_turns, their_turns)
    return made


def num_differing(turns: Sequence[Turn]) -> int:
    """How many of Outrider's texts with a draft differ from its plain ones; anything but 0 is a defect of ours."""
    by_place = {
        (turn.system.mode, turn.round, turn.batch): turn
        for turn in turns
        if turn.system.family is Family.OUTRIDER
    }
    return sum(
        ours != plain
        for (mode, number, batch), turn in by_place.items()
        if mode in (DRAFT, WEAK) and (PLAIN, number, batch) in by_place
        for ours, plain in zip(turn.texts, by_place[PLAIN, number, batch].texts, strict=True)
    )
