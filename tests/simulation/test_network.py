"""The simulated network keeps what real ones promise."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.calls import Held
from tests.simulation.clock import SimulatedLoop
from tests.simulation.network import Network


@pytest.mark.parametrize("joins", list(itertools.permutations([("c", "*"), ("c", "t"), ("t", "*")])))
def test_cuts_that_overlap_keep_the_order_of_what_they_hold(joins: tuple[tuple[str, str], ...]) -> None:
    with closing(SimulatedLoop()) as loop:
        network = Network(loop, random.Random(0), lambda details, error: None)
        call: Any = SimpleNamespace(client=SimpleNamespace(name="c", is_alive=True), host="t", server=None)
        came: list[int] = []
        for number, cut in enumerate(sorted(joins)):
            network.cut(*cut)
            network.come_in(Held(call, True, partial(came.append, number)))
        for join in joins:
            assert not came
            network.join(*join)
        assert came == [0, 1, 2]
