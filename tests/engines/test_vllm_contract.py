"""The installed vLLM has what the scheduler relies on; a release that moves some of it fails here, by name."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.vllm_server import PYTHON, ROOT, environment, needs_vllm

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(600)]


def said_by_vllm(code: str) -> str:
    """The last line that code prints in vLLM's environment."""
    words = [PYTHON, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_nothing_that_is_relied_on_has_moved() -> None:
    assert said_by_vllm("from outrider.engines.vllm.contract import missing; print(list(missing()))") == "[]"
    code = "from outrider.engines.vllm.contract import *; print(list(missing(SESSION_METHODS, SESSION_SOURCES)))"
    assert said_by_vllm(code) == "[]"


def test_the_release_is_one_that_is_said_to_be_tested() -> None:
    code = "import vllm; from outrider.engines.vllm.checks import check_version; check_version(vllm.__version__, {})"
    assert said_by_vllm(f"{code}; print('ok')") == "ok"


def test_the_scheduler_overrides_methods_that_vllm_has_and_no_others() -> None:
    """A method of vLLM's that is renamed would leave its override without effect."""
    code = """
from vllm.v1.core.sched.scheduler import Scheduler
from outrider.engines.vllm.scheduler import HintScheduler
own = {name for name in vars(HintScheduler) if not name.startswith(('__', '_abc'))}
print(sorted(name for name in own if hasattr(Scheduler, name)))
"""
    assert said_by_vllm(code) == str(
        ["_free_request", "add_request", "schedule", "shutdown", "update_draft_token_ids", "update_from_output"]
    )


def test_vllm_accepts_the_proposer() -> None:
    code = """
from types import SimpleNamespace
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from outrider.engines.vllm.checks import PROPOSER
speculative = SimpleNamespace(model=PROPOSER, num_speculative_tokens=7)
print(create_custom_proposer(SimpleNamespace(speculative_config=speculative)).propose([[1], []]))
"""
    assert said_by_vllm(code) == "[[], []]"
