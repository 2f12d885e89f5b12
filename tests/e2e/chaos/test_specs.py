"""Processes that are started with something else about them."""

from __future__ import annotations

import subprocess
import time

from outrider.local.child_spec import ChildSpec
from tests.e2e.chaos.specs import delayed, with_environment

SPEC = ChildSpec("one", "target", ("printf", "%s", "two words"), {"KEPT": "1", "CHANGED": "1"})


def test_a_delayed_process_is_the_same_process_later() -> None:
    began_s = time.monotonic()
    spec = delayed(SPEC, 0.3)
    done = subprocess.run(spec.command, capture_output=True, text=True, check=True)
    assert done.stdout == "two words"
    assert time.monotonic() - began_s >= 0.3
    assert spec.ready_timeout_s > SPEC.ready_timeout_s


def test_variables_come_on_top_of_those_that_there_are() -> None:
    changed = with_environment(SPEC, {"CHANGED": "2"})
    assert changed.environment == {"KEPT": "1", "CHANGED": "2"}
    assert SPEC.environment["CHANGED"] == "1"
