"""OUTRIDER_HINTS makes vLLM take hints, unless vLLM's own arguments say something else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engines.hints_variable import VARIABLE
from outrider.engines.vllm.checks import PROPOSER
from outrider.engines.vllm.plugin import SCHEDULER, complete, register
from outrider.errors import ConfigurationError

GIVEN = {"draft_workers": ["a:1"]}


def arguments(**changes: Any) -> SimpleNamespace:
    """vLLM's defaults."""
    defaults: dict[str, Any] = {
        "speculative_config": None,
        "scheduler_cls": None,
        "async_scheduling": None,
        "additional_config": {},
    }
    return SimpleNamespace(**{**defaults, **changes})


def test_all_that_hints_need_is_set() -> None:
    made = arguments(additional_config={"other": 1})
    complete(made, {**GIVEN, "num_speculative_tokens": 4})
    assert made.speculative_config == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 4}
    assert made.scheduler_cls == SCHEDULER
    assert made.async_scheduling is False
    assert made.additional_config == {"other": 1, "outrider": GIVEN}


def test_a_synchronous_scheduler_may_be_asked_for() -> None:
    made = arguments(async_scheduling=False)
    complete(made, GIVEN)
    assert made.scheduler_cls == SCHEDULER


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ({"scheduler_cls": "a.B"}, "--scheduler-cls"),
        ({"async_scheduling": True}, "--async-scheduling"),
        ({"additional_config": {"outrider": GIVEN}}, "--additional-config outrider"),
    ],
)
def test_two_ways_at_once_are_refused_by_the_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{VARIABLE} sets {flag}"):
        complete(arguments(**changes), GIVEN)


@pytest.mark.parametrize("given", [{}, {"draft_worker": ["a:1"]}, {**GIVEN, "port": "x"}])
def test_wrong_settings_are_refused_before_an_engine_starts(given: dict[str, Any]) -> None:
    made = arguments()
    with pytest.raises(ConfigurationError):
        complete(made, given)
    assert made == arguments()


def test_a_release_that_was_not_tried_may_be_permitted() -> None:
    made = arguments()
    complete(made, {**GIVEN, "is_any_version": True})
    assert made.additional_config["outrider"]["is_any_version"] is True


def test_without_the_variable_nothing_of_vllm_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)  # an import of it fails
    register()


def test_engines_of_a_process_are_completed_once_however_often_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    class EngineArgs(SimpleNamespace):
        def create_engine_config(self, usage: str) -> str:
            return f"{usage} {self.scheduler_cls}"

    monkeypatch.setenv(VARIABLE, '{"draft_workers": ["a:1"]}')
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=EngineArgs))
    register()
    register()
    made = EngineArgs(**vars(arguments()))
    assert made.create_engine_config("usage") == f"usage {SCHEDULER}"
