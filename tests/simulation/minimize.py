"""A failing scenario with everything left out that its failure does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.scenario import Scenario


def minimize(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leaves out faults, requests, processes and slowness, one at a time, for as long as it still `fails`."""
    while True:
        smaller = next((each for each in _smaller(scenario) if fails(each)), None)
        if smaller is None:
            return scenario
        scenario = smaller


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The greatest cuts first."""
    for index in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:index] + scenario.faults[index + 1 :])
    for index in range(len(scenario.requests)):
        if len(scenario.requests) > 1:
            yield replace(scenario, requests=scenario.requests[:index] + scenario.requests[index + 1 :])
    for name in ("num_targets", "num_coordinators", "num_drafts"):
        count = getattr(scenario, name)
        if count > (name != "num_drafts"):
            yield replace(scenario, **{name: count - 1})
    if scenario.slow_share:
        yield replace(scenario, slow_share=0.0)
