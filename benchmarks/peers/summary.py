"""Figures over turns: medians with quartiles over rounds, ratios within rounds, equal outputs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.systems import PLAIN, Family, System
from benchmarks.shared.figures import rounded, spread


@dataclass(frozen=True, slots=True)
class Turn:
    """One system in one round at one batch size."""

    round: int
    batch: int
    system: System
    tokens_per_s: float  # all new tokens over the wall time, prefill included
    decode_tokens_per_s: float  # after the first tokens
    cores_busy: float  # of its own processes; 1 is a whole core
    others_busy: float  # of the processes of all others at the same time, without the client
    texts: tuple[tuple[int, ...], ...]


def summarize(turns: Sequence[Turn]) -> dict[str, Any]:
    """Summary by batch size: every system's figures, and Outrider relative to each peer at equal cores."""
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
    num_equal, num_compared = _equal_texts(turns, baseline)
    return {
        "cores": {"target": system.num_target_cores, "total": system.num_cores},
        "tokens_per_s": spread(turn.tokens_per_s for turn in turns.values()),
        "decode_tokens_per_s": spread(turn.decode_tokens_per_s for turn in turns.values()),
        "over_outrider_plain": ratio(turns, baseline),
        "over_own_plain": ratio(turns, by_system.get(system.plain, {})),
        "cores_busy": rounded(statistics.median(turn.cores_busy for turn in turns.values())),
        "others_busy_max": rounded(max(turn.others_busy for turn in turns.values())),
        "texts_equal_to_outrider_plain": f"{num_equal} of {num_compared}" if num_compared else None,
    }


def ratio(ours: dict[int, Turn], theirs: dict[int, Turn]) -> dict[str, Any] | None:
    """Ratio of tokens per second, ours over theirs, within the rounds that both have."""
    return spread(turn.tokens_per_s / theirs[number].tokens_per_s for number, turn in ours.items() if number in theirs)


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
    """Number of Outrider's outputs that differ from its first plain ones; anything but 0 is our defect."""
    ours = [turn for turn in turns if turn.system.family is Family.OUTRIDER]
    plain: dict[tuple[int, int], Turn] = {}
    for turn in ours:
        if turn.system.mode == PLAIN:
            plain.setdefault((turn.round, turn.batch), turn)
    return sum(
        own != expected
        for turn in ours
        if (turn.round, turn.batch) in plain
        for own, expected in zip(turn.texts, plain[turn.round, turn.batch].texts, strict=True)
    )
