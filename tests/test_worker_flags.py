"""What a worker does by default is said in one place, however it is started."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from draft_worker.__main__ import parse_arguments as draft_arguments
from draft_worker.messages import DraftLimits
from target_worker.__main__ import parse_arguments as target_arguments
from target_worker.messages import SchedulerLimits


@pytest.mark.parametrize(
    ("parsed", "limits", "num_compared"),
    [
        (draft_arguments(["--model", "m"]), DraftLimits(), 8),
        (target_arguments(["--model", "m"]), SchedulerLimits(), 4),
    ],
    ids=["draft", "target"],
)
def test_flags_default_to_the_limits_that_the_code_has(
    parsed: argparse.Namespace, limits: DraftLimits | SchedulerLimits, num_compared: int
) -> None:
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    shared = [field.name for field in fields(limits) if field.name in given]
    assert {name: given[name] for name in shared} == {name: getattr(limits, name) for name in shared}
    assert len(shared) >= num_compared
