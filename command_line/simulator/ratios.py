"""The best draft : target ratio at a fleet's price. Simulations are independent and run in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final

from command_line.simulator.fleet import Fleet
from command_line.simulator.world import Outcome, World
from outrider.errors import InvalidRequest

SHARES: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Shares of the price that draft workers get, if no ratios are given."""
INDIFFERENCE: Final = 0.02
"""Share by which throughputs may differ and still count as equal. The lower latency then wins."""


def fleets_of_shares(fleet: Fleet) -> list[Fleet]:
    """The fleet and others at the same price, without draft workers first. Raises InvalidRequest."""
    _check_prices(fleet)
    found = [(int(fleet.price / fleet.target.price), 0), (fleet.target.count, fleet.draft.count)]
    for share in SHARES:
        num_drafts = round(fleet.price * share / fleet.draft.price)
        found.append((int((fleet.price - num_drafts * fleet.draft.price) / fleet.target.price), num_drafts))
    return _fleets(fleet, found)


def fleets_of_ratios(fleet: Fleet, text: str) -> list[Fleet]:
    """Fleets for ratios such as `1:4,1:2,0:1` (draft to target workers), at the same price. Raises InvalidRequest."""
    _check_prices(fleet)
    found = []
    for part in text.split(","):
        drafts, colon, targets = part.partition(":")
        try:
            ratio = float(drafts) / float(targets)
        except (ValueError, ZeroDivisionError):
            ratio = -1.0
        if not colon or not 0.0 <= ratio <= 1e6:
            raise InvalidRequest("ratios", f"{part!r} is not a ratio of draft to target workers such as 1:4")
        num_targets = int(fleet.price / (fleet.target.price + ratio * fleet.draft.price))
        found.append((num_targets, round(ratio * num_targets)))
    return _fleets(fleet, found)


def _check_prices(fleet: Fleet) -> None:
    if not fleet.target.price > 0.0 or not fleet.draft.price > 0.0:
        raise InvalidRequest("price", "ratios are compared at the same price: both prices must be above 0")


def _fleets(fleet: Fleet, pools: Sequence[tuple[int, int]]) -> list[Fleet]:
    by_ratio = {drafts / targets: (targets, drafts) for targets, drafts in pools if targets >= 1}
    if not by_ratio:
        raise InvalidRequest("ratios", "the money is not enough for a single target worker")
    return [fleet.with_pools(*by_ratio[ratio]) for ratio in sorted(by_ratio)]


def predict(fleet: Fleet) -> Outcome:
    return World(fleet).run()


def predict_all(fleets: Sequence[Fleet], num_jobs: int, on_one: Callable[[int], None]) -> list[Outcome]:
    """Outcomes in the fleets' order, from several processes; `on_one` gets the number done after each."""
    found: dict[int, Outcome] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_jobs, len(fleets)), mp_context=context) as pool:
        places = {pool.submit(predict, fleet): place for place, fleet in enumerate(fleets)}
        for future in as_completed(places):
            found[places[future]] = future.result()
            on_one(len(found))
    return [found[place] for place in range(len(fleets))]


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The highest throughput; among about equal ones the lowest median E2EL."""
    most = max(outcome.tokens_per_s for outcome in outcomes)
    good = [each for each in outcomes if each.tokens_per_s >= (1.0 - INDIFFERENCE) * most]
    return min(good, key=lambda each: each.e2el_ms.p50 if each.e2el_ms else float("inf"))
