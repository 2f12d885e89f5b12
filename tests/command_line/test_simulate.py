"""`outrider simulate` from flags to tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from command_line import app
from command_line.simulator.fleet import Fleet, parse_fleet
from tests.command_line.simulator.profile import PROFILE

SMALL = """
[target]
count = 2
max_num_seqs = 8
[draft]
count = 2
[traffic]
concurrency = 6
warmup_s = 1
seconds = 2
[[request]]
prompt_tokens = 20
output_tokens = [20, 40]
"""


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(SMALL)
    return path


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, (result.stderr, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_example_can_be_simulated(tmp_path: Path) -> None:
    shown = run("--example")
    assert shown.exit_code == 0
    assert parse_fleet(shown.stdout) == Fleet()
    assert not [line for line in shown.stdout.splitlines() if "=" in line and "#" not in line and "seed" not in line]
    path = tmp_path / "example.toml"
    path.write_text(shown.stdout)
    result = run(path, "--targets", 1, "--drafts", 1, "--concurrency", 2, "--seconds", 1, "--warmup-s", 0)
    assert result.exit_code == 0, result.stderr


def test_a_fleet_is_shown_beside_its_plain_self(fleet: Path) -> None:
    result = run(fleet)
    assert result.exit_code == 0, (result.stderr, result.exception)
    for words in (
        "2 targets",
        "plain",
        "2 drafts",
        "TTFT, ms",
        "TPOT, ms",
        "E2EL, ms",
        "targets busy",
        "drafts busy",
    ):
        assert words in result.stdout
    assert re.search(r"against the first.*\d\.\d\d×", result.stdout)
    assert "6 at once, 2 s after 1 s of warm-up, seed 0" in result.stdout
    assert "raise --seconds" in result.stdout, "a few dozen requests say little about percentiles"
    assert "plain" not in run(fleet, "--no-plain").stdout


@pytest.mark.thorough
def test_flags_take_the_place_of_the_file(fleet: Path) -> None:
    flags = {"--targets": 3, "--drafts": 1, "--rate": 20, "--seconds": 9, "--warmup-s": 2, "--seed": 9}
    found = document(fleet, *(word for flag in flags.items() for word in flag))
    [plain, both] = found["outcomes"]
    assert (plain["num_targets"], plain["num_drafts"]) == (3, 0)
    assert (both["num_targets"], both["num_drafts"]) == (3, 1)
    traffic = found["fleet"]["traffic"]
    assert (traffic["rate"], traffic["concurrency"], traffic["seconds"], traffic["warmup_s"]) == (
        20,
        None,
        9,
        2,
    )
    assert found["fleet"]["seed"] == 9
    assert both["tokens_per_s"] == pytest.approx(20 * 30, rel=0.2), "an open loop gets what it asks for"
    assert found["best"] is None


@pytest.mark.thorough
def test_a_run_can_be_repeated(fleet: Path) -> None:
    def outcomes(seed: int) -> list[dict[str, Any]]:
        return [each | {"wall_s": 0} for each in document(fleet, "--seed", seed)["outcomes"]]

    assert outcomes(1) == outcomes(1) != outcomes(2)


def test_ratios_are_compared_for_the_same_money_and_the_best_is_named(fleet: Path, tmp_path: Path) -> None:
    result = run(fleet, "--ratios", "0:1,1:1,2:1", "--json", tmp_path / "ratios.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "ratios.json").read_text())
    pools = [(each["num_targets"], each["num_drafts"]) for each in found["outcomes"]]
    assert pools == [(2, 0), (2, 2), (1, 2)], "the fleet's money is 2 × 4 + 2 × 1"
    best = max(found["outcomes"], key=lambda each: each["tokens_per_s"])
    assert (found["best"]["targets"], found["best"]["drafts"]) == (best["num_targets"], best["num_drafts"])
    assert f"best draft : target ratio: 1 : 1 ({best['num_drafts']} drafts" in result.stdout


@pytest.mark.thorough
def test_processes_share_the_ratios_and_find_the_same(fleet: Path) -> None:
    def outcomes(jobs: int) -> list[dict[str, Any]]:
        found = document(fleet, "--ratios", "auto", "--seconds", 0.5, "--jobs", jobs)["outcomes"]
        return [each | {"wall_s": 0} for each in found]

    assert outcomes(2) == outcomes(1)


def test_a_measured_pair_is_taken(fleet: Path, tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(PROFILE))
    found = document(fleet, "--pair", path, "--no-plain")
    assert found["fleet"]["target"]["step_ms"] == {
        "num_tokens": [1, 8], "step_ms": [pytest.approx(1.15), pytest.approx(2.15)], "sequence_ms": 0.0,
    }  # fmt: skip
    assert found["fleet"]["texts"] == 2
    assert found["outcomes"][0]["num_ended"] > 100


@pytest.mark.thorough
def test_a_fleet_that_does_not_keep_up_is_pointed_out(fleet: Path) -> None:
    assert "more requests come than end" in run(fleet, "--rate", 60, "--no-plain").stdout
    fleet.write_text(f"{SMALL}\n[network]\nmax_queue_wait_s = 0.3\n")
    assert "requests were refused" in run(fleet, "--rate", 200, "--no-plain").stdout


def test_a_fleet_whose_steps_are_too_many_for_its_coordinators_is_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "fast.toml"
    quick = SMALL.replace("[target]", "[target]\nfixed_ms = 0.5\ntoken_ms = 0.0\nsequence_ms = 0.0")
    path.write_text(f"{quick}\n[network]\ncoordinator_ms = 0\n")
    flags = ("--drafts", 0, "--seconds", 0.2, "--warmup-s", 0.2)
    [without] = document(path, *flags)["outcomes"]
    assert without["coordinator_steps_per_s"] > 5000
    assert without["coordinator_utilisation"] is None
    assert re.search(r"steps of all streams a second need about \d+ coordinator replicas", run(path, *flags).stdout)
    path.write_text(f"{quick}\n[network]\ncoordinator_ms = 0\nstep_us = 200\n")
    [busy] = document(path, *flags)["outcomes"]
    assert busy["coordinator_utilisation"] > 0.9
    assert busy["tokens_per_s"] < 0.6 * without["tokens_per_s"]
    shown = run(path, *flags).stdout
    assert "coordinators busy" in shown
    assert "raise [network] coordinators" in shown
    path.write_text(f"{quick}\n[network]\ncoordinator_ms = 0\nstep_us = 200\ncoordinators = 20\n")
    assert "coordinator" not in run(path, *flags).stdout.replace("coordinators busy", "")


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("[target]\ncuont = 3", (), ["cuont", "count"]),
        ("[draft]\ncount = -1", (), ["[draft] count is -1", "a whole number from 0"]),
        (SMALL, ("--rate", "1", "--concurrency", "2"), ["--rate"]),
        (SMALL, ("--rate", "nan"), ["--rate"]),
        (SMALL, ("--seconds", "inf"), ["--seconds"]),
        (SMALL, ("--ratios", "4"), ["--ratios", "1:4"]),
        (SMALL, ("--ratios", "1:0"), ["--ratios", "1:4"]),
        (SMALL, ("--ratios", "500:1"), ["--ratios", "money"]),
        (SMALL + "[target]", (), ["not TOML"]),
        (SMALL + "[network.x]", (), ["[network] has no setting 'x'"]),
        ("[target]\nprice = 0", ("--ratios", "auto"), ["--ratios", "prices"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, flags: tuple[str, ...], words: list[str]) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    result = run(path, *flags)
    assert result.exit_code == 2
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.stderr).split())
    assert not [word for word in words if word not in shown], shown


def test_a_file_that_is_no_pair_is_refused(fleet: Path) -> None:
    result = run(fleet, "--pair", fleet)
    assert result.exit_code == 2
    assert "--pair" in result.stderr
