"""Which draft : target ratio is best for the money of a fleet. Simulations are independent: processes share them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Final

from outrider.errors import InvalidRequest
from outrider.simulate.fleet import Fleet
from outrider.simulate.world import Outcome, World

SHARES: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Of the money that go to draft workers, where nobody names ratios."""
INDIFFERENCE: Final = 0.02
"""Of two ratios whose throughput differs by less, the one with the lower latency."""


def fleets_of_shares(fleet: Fleet) -> list[Fleet]:
    """The fleet itself and others for the same money, no draft workers first. Raises InvalidRequest."""
    _check_prices(fleet)
    found = [(int(fleet.price / fleet.target.price), 0), (fleet.target.count, fleet.draft.count)]
    for share in SHARES:
        num_drafts = round(fleet.price * share / fleet.draft.price)
        found.append((int((fleet.price - num_drafts * fleet.draft.price) / fleet.target.price), num_drafts))
    return _fleets(fleet, found)


def fleets_of_ratios(fleet: Fleet, text: str) -> list[Fleet]:
    """As `1:4,1:2,0:1`: draft to target workers, for the same money. Raises InvalidRequest."""
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
        raise InvalidRequest("price", "ratios are compared for the same money: both prices must be above 0")


def _fleets(fleet: Fleet, pools: Sequence[tuple[int, int]]) -> list[Fleet]:
    by_ratio = {drafts / targets: (targets, drafts) for targets, drafts in pools if targets >= 1}
    if not by_ratio:
        raise InvalidRequest("ratios", "the money is not enough for a single target worker")
    return [fleet.with_pools(*by_ratio[ratio]) for ratio in sorted(by_ratio)]


def predict(fleet: Fleet) -> Outcome:
    return World(fleet).run()


def predict_all(fleets: Sequence[Fleet], num_jobs: int, on_one: Callable[[int], None]) -> list[Outcome]:
    """In the fleets' order; `on_one` is told after each how many are done."""
    found: dict[int, Outcome] = {}
    for place, outcome in _predicted(fleets, num_jobs):
        found[place] = outcome
        on_one(len(found))
    return [found[place] for place in range(len(fleets))]


def _predicted(fleets: Sequence[Fleet], num_jobs: int) -> Iterator[tuple[int, Outcome]]:
    if num_jobs == 1 or len(fleets) == 1:
        yield from ((place, predict(fleet)) for place, fleet in enumerate(fleets))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_jobs, len(fleets)), mp_context=context) as pool:
        places = {pool.submit(predict, fleet): place for place, fleet in enumerate(fleets)}
        for future in as_completed(places):
            yield places[future], future.result()


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """The greatest throughput; of those about as good the lowest median E2EL."""
    most = max(outcome.tokens_per_s for outcome in outcomes)
    good = [each for each in outcomes if each.tokens_per_s >= (1.0 - INDIFFERENCE) * most]
    return min(good, key=lambda each: each.e2el_ms.p50 if each.e2el_ms else float("inf"))
