"""The benchmark of hints in vLLM: equal cores, ratios within rounds, outputs compared with plain vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.engines import (
    APART,
    NO_HINTS,
    NOWHERE,
    OWN,
    PROPOSER,
    SHARED,
    WAYS,
    Turn,
    parse,
    settings_of,
    summarize,
)
from benchmarks.peers.systems import PLAIN
from outrider.engines.vllm import checks

ARGUMENTS = ["--vllm-python", "/nowhere/python", "--batch", "1", "4"]
ADDRESS = "127.0.0.1:7001"


def test_every_way_has_two_cores_in_all() -> None:
    arguments = parse(ARGUMENTS)
    cores = {way: settings_of(way, arguments, Path("target"), ADDRESS)["cores"] for way in WAYS}
    assert cores == {PLAIN: [0, 1], OWN: [0, 1], APART: [0], SHARED: [0, 1], NO_HINTS: [0, 1]}, (
        "the draft worker has core 1"
    )


def test_three_ways_have_the_plugin_and_two_a_draft_worker() -> None:
    arguments = parse(ARGUMENTS)
    found = {way: settings_of(way, arguments, Path("target"), ADDRESS) for way in WAYS}
    assert [way for way in WAYS if found[way]["plugin"]] == [APART, SHARED, NO_HINTS]
    workers = {way: found[way]["plugin"]["additional_config"]["outrider"] for way in (APART, SHARED, NO_HINTS)}
    assert workers == {
        APART: {"draft_workers": [ADDRESS]},
        SHARED: {"draft_workers": [ADDRESS]},
        NO_HINTS: {"draft_workers": [NOWHERE]},
    }
    assert [way for way in WAYS if found[way]["draft"]] == [OWN]


def test_the_proposer_is_the_one_that_the_scheduler_requires() -> None:
    assert PROPOSER == checks.PROPOSER


def test_ratios_are_taken_within_rounds_and_outputs_are_compared() -> None:
    turns = [
        Turn(0, 1, PLAIN, 10.0, 0.0, [[1, 2]]),
        Turn(0, 1, OWN, 20.0, 0.0, [[1, 2]]),
        Turn(0, 1, APART, 30.0, 0.5, [[1, 3]]),
        Turn(1, 1, PLAIN, 100.0, 0.0, [[4, 5]]),
        Turn(1, 1, OWN, 100.0, 0.0, [[4, 5]]),
        Turn(1, 1, APART, 100.0, 0.7, [[4, 5]]),
    ]
    figures = summarize(turns)["batch_1"][APART]
    assert figures["over_plain"]["median"] == 2.0
    assert figures["over_own"]["median"] == 1.25
    assert figures["differing"] == "1 of 2"
    assert figures["equal_tokens"] == 0.75
    assert figures["others_busy"] == 0.6


def test_without_vllm_it_says_where_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    assert "tests/engines/install_vllm.sh" in capsys.readouterr().err
