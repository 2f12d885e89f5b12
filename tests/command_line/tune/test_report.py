"""Tests of the report on a profile, in words and as commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from command_line.tune.advice import advise
from command_line.tune.agreement import acceptances
from command_line.tune.document import as_dict, flags
from command_line.tune.findings import Findings, ModelProfile, Settings
from command_line.tune.model import Pair
from command_line.tune.report import acceptance_table, advice_table, steps_table, verdict, warnings
from command_line.tune.times import StepTimes
from tests.command_line.tune.test_model import MIXED, flat

TARGET = StepTimes.measured([(1, 40.0), (8, 45.0), (64, 200.0)])


def findings(pair: Pair, *batches: int, spread: float = 0.02, num_prompts: int = 2) -> Findings:
    return Findings(
        Path("big model"),
        Path("small"),
        Settings("bfloat16", "int8", 4, context_len=256, num_tokens=400, budget_s=10.0),
        "a machine",
        ModelProfile(pair.target, 1000, spread, 256),
        ModelProfile(pair.draft, 10, spread, 256),
        pair,
        acceptances(pair.texts, 6),
        tuple(advise(pair, batch, 6) for batch in batches),
        num_prompts=num_prompts,
    )


PAYING = findings(replace(MIXED, target=TARGET), 1, 8)


def shown(found: Findings) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for table in (steps_table(found), acceptance_table(found), advice_table(found)):
            console.print(table)
    return capture.get()


def test_tables_hold_what_was_measured_and_predicted() -> None:
    text = shown(PAYING)
    advice = PAYING.advice[0]
    for words in (
        "40.00",
        "45.00",
        "200.00",
        f"{advice.speedup:.2f}×",
        f"{advice.bound:.2f}×",
        "independent",
    ):
        assert words in text


def test_a_pair_that_pays_is_recommended_with_its_range() -> None:
    advice, said = PAYING.advice[0], " ".join(verdict(PAYING))
    assert f"about {advice.speedup:.2f}× at batch 1 with γ = {advice.num_speculative_tokens}" in said
    assert f"{advice.speedup_low:.2f}× to {advice.speedup_high:.2f}×" in said
    assert "memory-bound" in said


def test_where_it_does_not_pay_is_said_too() -> None:
    # Beyond 8 tokens every further one costs as much as a step of its own.
    steep = StepTimes.measured([(1, 40.0), (8, 45.0), (9, 85.0)])
    found = findings(replace(MIXED, target=steep), 1, 8)
    assert [bool(each.num_speculative_tokens) for each in found.advice] == [True, False]
    assert "does not pay at batch 8;" in " ".join(verdict(found))


def test_why_a_pair_does_not_pay() -> None:
    wrong = findings(replace(MIXED, texts=((4,) * 400,)), 1)
    assert "seldom right" in verdict(wrong)[-1]
    slow = findings(replace(MIXED, draft=flat(60.0)), 1)
    assert "too late" in verdict(slow)[-1]


def test_commands_bear_the_settings_and_quote_names() -> None:
    serve, target, draft = flags(PAYING)
    num_hints = max(each.num_speculative_tokens for each in PAYING.advice)
    assert serve.startswith("outrider serve --target 'big model' --draft small --dtype bfloat16")
    assert f"--num-speculative-tokens {num_hints}" in serve
    assert "--quantization int8" in target
    assert "--num-threads 4" in target
    assert draft == "outrider draft-worker --model small --dtype bfloat16 --num-threads 1"


def test_a_wait_longer_than_the_workers_own_is_asked_for() -> None:
    patient = findings(replace(MIXED, target=flat(400.0), draft=flat(15.0)), 1)
    assert patient.advice[0].num_waited
    assert "--hint-wait-ms" in flags(patient)[1]
    assert "--hint-wait-ms" not in flags(PAYING)[1]


def test_doubts_are_named() -> None:
    assert warnings(PAYING) == []
    doubtful = findings(replace(MIXED, target=TARGET, texts=((0,) * 20,)), 1, 200, spread=0.5)
    said = " ".join(warnings(doubtful))
    for words in ("differ by ±50%", "1 of 2 prompts", "only 20 tokens", "batch 200 is beyond 64"):
        assert words in said


def test_machines_get_everything_rounded() -> None:
    read = as_dict(PAYING)
    assert read["target"]["step_ms_by_num_tokens"] == {"1": 40.0, "8": 45.0, "64": 200.0}
    assert read["advice"][0]["batch"] == 1
    assert read["advice"][0]["drafts_per_target"] >= 1
    assert read["flags"] == flags(PAYING)
    assert read["texts"]["acceptance_rate"] == round(read["texts"]["acceptance_rate"], 4)
