"""A poisonous prompt kills the worker that computes it, at the step that it is to, and no other prompt does."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from random import Random

import pytest

from tests.e2e.chaos import poison
from tests.e2e.system import ROOT

# A step with one sequence of the prompt, as often as asked, on an engine that does nothing.
CODE = """
import sys, types
from target_worker import runner
class Engine:
    def forward(self, chunks):
        raise InterruptedError
def step(name, ids, num_decided):
    item = types.SimpleNamespace(session_id=name, context=types.SimpleNamespace(token_ids=ids), num_decided=num_decided)
    item.kv, item.token_ids, item.num_logits, item.branches = None, ids, 1, ()
    try:
        runner.run_step(Engine(), types.SimpleNamespace(items=[item]))
    except InterruptedError:
        print(name, num_decided, flush=True)
prompt = [int(word) for word in sys.argv[1].split()]
step("plain", [5, 6, 7], 1)
step("poison", prompt, 0)
for _ in range(6):
    step("poison", prompt, 1)
"""


def died_after(prompt: list[int], *, is_preloaded: bool = True) -> tuple[int, list[str]]:
    """Exit status, and the steps that were run."""
    more = poison.environment() if is_preloaded else {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", CODE, " ".join(map(str, prompt))]
    done = subprocess.run(words, env=os.environ | more, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.timeout(130)
@pytest.mark.parametrize(
    ("num_steps", "steps"),
    [(poison.AT_ONCE, []), (poison.AFTER_A_FEW, ["poison 0", *["poison 1"] * poison.AFTER_A_FEW])],
    ids=["before the first token", "after a few"],
)
def test_a_process_dies_of_the_step_it_is_to_die_of(num_steps: int, steps: list[str]) -> None:
    prompt = poison.prompt(num_steps, Random(1))
    assert died_after(prompt) == (-signal.SIGKILL, ["plain 1", *steps])


@pytest.mark.timeout(130)
def test_without_what_is_preloaded_nobody_dies() -> None:
    status, steps = died_after(poison.prompt(poison.AT_ONCE, Random(1)), is_preloaded=False)
    assert (status, len(steps)) == (0, 8)


def test_another_start_of_the_same_process_counts_anew() -> None:
    spec = importlib.util.spec_from_file_location("poisoned", poison.FOLDER / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = module.Poison([((1, 2), 2)])
    assert [before.kills("a", [0, 1, 2], 1) for _ in range(3)] == [False, False, True]
    assert not before.kills("b", [0, 1, 2], 1), "another session has its own count"
    assert not before.kills("c", [2, 1, 0, 1], 1)
    assert not module.Poison([((1, 2), 2)]).kills("a", [0, 1, 2], 1)


def test_prompts_differ_between_injections() -> None:
    rng = Random(1)
    assert poison.prompt(poison.AT_ONCE, rng) != poison.prompt(poison.AT_ONCE, rng)
