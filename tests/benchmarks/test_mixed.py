"""The two kinds of requests that `mixed` asks, and what it makes of slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.shared.worker_pair import Generation
from benchmarks.speculation.mixed import (
    BAD,
    BAD_KINDS,
    GOOD,
    OFF,
    ON,
    Kind,
    alternating,
    bad_kind,
    draw,
    summarize,
)
from benchmarks.speculation.modes import ModeSlice
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2
from tests.benchmarks.figures import slice_of, window_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [list(range(i, i + 30)) for i in range(4)]


def good() -> Kind:
    return Kind(GOOD, [list(prompt) for prompt in PROMPTS], GREEDY)


@pytest.mark.parametrize("name", BAD_KINDS)
def test_a_prompt_says_which_kind_it_is(name: str) -> None:
    bad = bad_kind(name, good(), 500, 1.3)
    assert bad.name == BAD
    assert len(bad.prompts) == len(PROMPTS)
    assert not {tuple(prompt) for prompt in bad.prompts} & {tuple(prompt) for prompt in PROMPTS}
    assert all(0 <= token_id < 500 for prompt in bad.prompts for token_id in prompt)
    assert (bad.sampling.temperature > 0.0) == name.endswith("hot")
    assert bad.sampling.max_tokens == GREEDY.max_tokens


def test_making_bad_prompts_leaves_the_good_ones_alone_and_is_repeatable() -> None:
    own = good()
    for name in BAD_KINDS:
        assert bad_kind(name, own, 500, 1.3) == bad_kind(name, own, 500, 1.3)
    assert own.prompts == PROMPTS


def test_kinds_take_turns() -> None:
    own = good()
    bad = bad_kind("random", own, 500, 1.3)
    asked = alternating([own, bad])
    assert asked[::2] == own.prompts
    assert asked[1::2] == bad.prompts


def generation(begin: float, interval_s: float, num_accepted: int) -> Generation:
    """Ten steps after the first, each with as many accepted hints and one token more."""
    own = [common_pb2.TOKEN_ORIGIN_ACCEPTED] * num_accepted + [common_pb2.TOKEN_ORIGIN_RECOVERED]
    arrivals = [(begin, 1)] + [(begin + interval_s * step, len(own)) for step in range(1, 11)]
    origins: list[int] = [common_pb2.TOKEN_ORIGIN_PLAIN, *own * 10]
    ended_at = arrivals[-1][0]
    return Generation([5] * len(origins), origins, first_token_at=begin, ended_at=ended_at, arrivals=arrivals)


def measured(good_interval_s: float, bad_interval_s: float, num_accepted: int) -> list[ModeSlice]:
    """Two slices of a second with a request of each kind."""
    found = []
    for _ in range(2):
        own = slice_of(window_of(100.0))
        recorded: list[tuple[Sequence[int], Generation]] = [
            ((1, 1), generation(0.1, good_interval_s, num_accepted)),
            ((2, 2), generation(0.1, bad_interval_s, 0)),
        ]
        found.append(ModeSlice(own.window, own.counters, recorded, 0.0, 1.0))
    return found


def test_kinds_are_told_apart_and_compared_with_nobody_having_a_draft(tmp_path: Path) -> None:
    kinds: dict[tuple[int, ...], Kind] = {
        (1, 1): Kind(GOOD, [[1, 1]], GREEDY),
        (2, 2): Kind(BAD, [[2, 2]], GREEDY),
    }
    summary = summarize({OFF: measured(0.01, 0.01, 0), ON: measured(0.02, 0.02, 3)}, kinds)
    on = summary[ON]
    assert on[GOOD]["tokens_per_step"] == 4.0
    assert on[GOOD]["acceptance"] == 0.75
    assert on[GOOD]["tpot_ms_p50"] == pytest.approx(5.0)
    assert on[GOOD]["tpot_ms_p50_over_off"] == pytest.approx(0.5)
    assert on[BAD]["tokens_per_step"] == 1.0
    assert on[BAD]["tpot_ms_p50_over_off"] == pytest.approx(2.0)
    assert on[BAD]["requests"] == 2
    assert "tpot_ms_p50_over_off" not in summary[OFF][BAD]
    draw({"batch": {"8": summary}, "load": {"target": "t"}}, tmp_path / "mixed.svg")
    assert (tmp_path / "mixed.svg").read_text().startswith("<svg")
