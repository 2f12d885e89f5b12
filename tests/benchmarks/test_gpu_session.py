"""The session on a GPU: its models agree as often as is asked for, its time is shared out, and its page says it all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import engine_part, gpu_session, prediction, tests_part
from benchmarks.gpu.checkpoints import TINY_DRAFT, TINY_TARGET, chosen_tokens, write
from benchmarks.gpu.device_part import copy_gb_per_s, data_sheet
from benchmarks.gpu.engine_part import COMPOSITIONS, changed_compositions, logits_in
from benchmarks.gpu.language import END_TOKEN_ID, made_language, make_language
from benchmarks.gpu.models_part import prompts_of
from benchmarks.gpu.outcome import Outcome, Setting, read
from benchmarks.gpu.page import WIDTH, goals, page
from benchmarks.gpu.pair_part import DraftPlace, same_outputs, started
from benchmarks.gpu.schedule import PARTS, TAIL_S, Part, turn
from benchmarks.shared.machine import ROOT
from benchmarks.shared.options import load
from benchmarks.shared.worker_pair import Generation
from outrider.engine.model import Engine, SequenceChunk
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import fingerprint

Z = 4.5
"""Standard errors that a count may be off: a fair one is further off in 7 of a million tests."""


class TestLanguage:
    @pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
    def test_the_draft_agrees_after_the_share_of_tokens_that_is_asked_for(self, acceptance: float) -> None:
        language = make_language(1001, acceptance, 0.5, seed=3)
        assert language.acceptance == pytest.approx(acceptance, abs=0.001)
        is_wrong = language.guesses != language.successors
        assert END_TOKEN_ID not in language.successors
        is_foreseen = language.seconds == language.successors
        assert not (is_foreseen & ~is_wrong).any()
        assert is_foreseen.sum() == round(0.5 * is_wrong.sum())

    def test_an_output_visits_every_token_before_it_comes_back(self) -> None:
        language = make_language(500, 0.8, 0.0, seed=1)
        walk = language.walk(17, 499)
        assert sorted(walk) == list(range(1, 500))
        assert walk[-1] == 17

    def test_ranks_say_whose_candidate_the_next_token_is(self) -> None:
        language = make_language(500, 0.7, 0.4, seed=2)
        ranks = language.ranks(17, 499)
        assert ranks.count(0) / 499 == pytest.approx(0.7, abs=0.002)
        assert ranks.count(1) / (499 - ranks.count(0)) == pytest.approx(0.4, abs=0.01)

    @pytest.mark.parametrize("wrong", [(3, 0.5, 0.5), (100, 1.5, 0.5), (100, 0.5, -0.1)])
    def test_what_cannot_be_is_refused(self, wrong: tuple[int, float, float]) -> None:
        with pytest.raises(ValueError, match=r"must lie|too few"):
            make_language(*wrong, seed=1)


def choices(engine: Engine, token_ids: Sequence[int]) -> list[int]:
    """The likeliest token after each token of a sequence."""
    found: list[int] = []
    kv = engine.new_sequence()
    for start in range(0, len(token_ids), 250):
        part = list(token_ids[start : start + 250])
        kv.extend(len(part))
        found += engine.forward([SequenceChunk(kv, part, len(part))]).argmax(dim=-1).tolist()
    kv.free()
    return found


class TestCheckpoints:
    @pytest.mark.parametrize("acceptance", [0.6, 0.9])
    def test_both_models_follow_the_language_in_context(self, tmp_path: Path, acceptance: float) -> None:
        """The target says its successors; the draft's hints are accepted at the rate that was asked for."""
        language = make_language(TINY_TARGET.vocab_size, acceptance, 0.5, seed=5)
        for name, shape, is_target in (("target", TINY_TARGET, True), ("draft", TINY_DRAFT, False)):
            write(tmp_path / name, shape, language, is_target=is_target, seed=int(is_target), device="cpu")
        assert fingerprint(tmp_path / "target") == fingerprint(tmp_path / "draft")
        text = language.walk(9, 1000)
        target, draft = (load(tmp_path / name, max_num_seqs=1) for name in ("target", "draft"))
        said, guessed = choices(target, text), choices(draft, text)
        assert np.mean(np.array(said) == language.successors[text]) > 0.995
        num_accepted = int(np.sum(np.array(said) == np.array(guessed)))
        # Where a wrong first candidate is close to the right second one, some change places: 10 % are allowed for.
        likely = acceptance + 0.1 * 0.5 * (1.0 - acceptance)
        for rate, sign in ((acceptance, 1), (likely, -1)):
            error = Z * (len(text) * rate * (1.0 - rate)) ** 0.5
            assert sign * (num_accepted - len(text) * rate) >= -error, (num_accepted, rate)
        alone = chosen_tokens(tmp_path / "draft", text, "cpu")
        assert np.mean(np.array(alone) == np.array(guessed)) > 0.98  # the context changes few choices

    def test_an_equal_folder_is_kept_and_another_replaced(self, tmp_path: Path) -> None:
        language = make_language(TINY_DRAFT.vocab_size, 0.8, 0.5, seed=5)

        def written(seed: int) -> float:
            return write(tmp_path / "draft", TINY_DRAFT, language, is_target=False, seed=seed, device="cpu")

        assert written(1) > 0.0
        before = (tmp_path / "draft" / "output.safetensors").read_bytes()
        assert written(1) == 0.0
        assert written(2) > 0.0
        assert (tmp_path / "draft" / "output.safetensors").read_bytes() != before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The session's tiny target, loaded as the session does."""
    folder = tmp_path_factory.mktemp("session") / "target"
    language = made_language(is_tiny=True)
    write(folder, TINY_TARGET, language, is_target=True, seed=1, device="cpu")
    return engine_part.load(folder, "cpu", 0.1)


class TestBits:
    TOKENS = tuple(range(1, 306))

    def test_compositions_leave_the_bits_alone(self, tiny: Engine) -> None:
        num_free = tiny.allocator.num_free
        assert changed_compositions(tiny, self.TOKENS) == []
        assert tiny.allocator.num_free == num_free
        assert logits_in(tiny, self.TOKENS, COMPOSITIONS[0]).shape == (5, tiny.vocab_size)

    def test_a_composition_that_changes_a_bit_is_named(self, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = tiny.forward

        def changed(chunks: Sequence[SequenceChunk]) -> torch.Tensor:
            logits = forward(chunks)
            return logits + 1e-3 if len(chunks) == 8 else logits

        monkeypatch.setattr(tiny, "forward", changed)
        assert changed_compositions(tiny, self.TOKENS) == [each.name for each in COMPOSITIONS if len(each.others) == 7]


class TestSchedule:
    PART = Part("engine", "steps", most_s=100.0, least_s=30.0, needs="checkpoints")

    def test_a_part_gets_its_limit_or_what_is_left(self) -> None:
        assert turn(self.PART, 1000.0, (), {"checkpoints"}, 1).seconds == 100.0
        assert turn(self.PART, 50.0 + TAIL_S, (), {"checkpoints"}, 1).seconds == 50.0

    @pytest.mark.parametrize(
        ("left_s", "wanted", "succeeded", "words"),
        [
            (20.0, (), {"checkpoints"}, "no time: 20 s are left"),
            (-3.0, (), {"checkpoints"}, "no time: 0 s are left"),
            (1000.0, (), set(), "needs the part checkpoints"),
            (1000.0, ("device",), {"checkpoints"}, "not asked for"),
        ],
    )
    def test_why_a_part_does_not_run(
        self, left_s: float, wanted: tuple[str, ...], succeeded: set[str], words: str
    ) -> None:
        assert words in turn(self.PART, left_s, wanted, succeeded, 1).why_not

    def test_a_second_gpu_is_only_used_where_there_is_one(self) -> None:
        own = next(part for part in PARTS if part.is_for_gpus)
        assert "two GPUs" in turn(own, 1000.0, (), {"checkpoints"}, 1).why_not
        assert not turn(own, 1000.0, (), {"checkpoints"}, 2).why_not

    def test_a_part_needs_only_one_that_comes_before_it(self) -> None:
        names = [part.name for part in PARTS]
        assert all(part.needs in ("", *names[: names.index(part.name)]) for part in PARTS)


def entry(figures: dict[str, Any], status: str = "done", why: str = "", **more: Any) -> dict[str, Any]:
    return {"status": status, "why": why, "seconds": 12.0, "figures": figures, **more}


STEP = {
    "ms": 5.0,
    "spread_ms": 0.2,
    "plan_ms": 0.1,
    "choice_ms": 0.1,
    "share_of_limit": 0.9,
    "weights_gb_per_s": 3000.0,
}
SPEED = {"median": 100.0, "quartiles": [90.0, 110.0], "rounds": 3}
STREAM = {
    "plain_tokens_per_s": SPEED, "draft_tokens_per_s": SPEED, "speedup": SPEED, "tokens_per_step": 3.1,
    "acceptance": 0.8, "num_judged": 900, "plain_tpot_ms": 6.0, "draft_tpot_ms": 2.5, "same_outputs": True,
}  # fmt: skip


def a_report(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"commit": "abc", "minutes": 18.0, "seconds": 600.0, "tiny": False, "parts": parts}


WHOLE = a_report(
    device=entry({"device": "NVIDIA H100 80GB HBM3", "read_gb_per_s": 3000.0, "data_sheet_gb_per_s": 3350.0}),
    tests=entry({"passed": 16, "failed": 1, "skipped": 0, "failures": {"test_x": ["E  assert 1 == 2"]}}),
    checkpoints=entry({"target_parameters": 8030000000, "acceptance_wanted": 0.8}),
    engine=entry({
        "target_steps": {"1x1": STEP, "8x1": STEP}, "share_of_measured_bandwidth": 0.9, "eight_over_one": 1.3,
        "changed_compositions": [], "self_test_failures": [], "skipped": ["prompt_of_2000_ms: no time"],
    }),
    pair=entry({"draft": "on the target's device", "equal_outputs": True, "1": STREAM}),
    cpu_draft=entry({}, "stopped", "it took longer than 150 s"),
)  # fmt: skip


class TestPage:
    def test_it_has_every_goal_and_figure(self) -> None:
        text = page(WHOLE)
        for words in (
            "NVIDIA H100 80GB HBM3, commit abc",
            "90% of the data sheet's 3350",
            "NO  tests/engine/test_cuda.py is green: 16 passed, 1 failed",
            "yes a plain step uses at least 80% of the measured bandwidth: 90%",
            "NO  a step of 8 rows takes at most 1.15× one of 1 row: 1.30×",
            "yes bits of a sequence are equal",
            "yes greedy outputs through workers are equal with the draft and without it: 2 of 2",
            "test_x:",
            "E  assert 1 == 2",
            "cpu_draft: stopped: it took longer than 150 s",
            "engine, prompt_of_2000_ms: no time",
            "100 (90 to 110) → 100 (90 to 110) tokens/s",
        ):
            assert words in text
        assert max(map(len, text.splitlines())) <= WIDTH + 40

    def test_nothing_measured_is_no_goal_met(self) -> None:
        empty = a_report(device=entry({}, "failed", "no device", error=["Traceback"]))
        assert [goal.is_met for goal in goals(empty["parts"])] == [None] * 5
        assert "device: failed: no device" in page(empty)

    def test_a_changed_bit_and_an_unequal_output_are_seen(self) -> None:
        parts = {
            "engine": entry({"changed_compositions": ["the last of 8 sequences"], "self_test_failures": []}),
            "pair": entry({"equal_outputs": True, "8": STREAM | {"same_outputs": False}}),
        }
        found = {goal.words.split()[0]: goal.is_met for goal in goals(parts)}
        assert found["bits"] is False
        assert found["greedy"] is False

    def test_tests_that_were_all_skipped_are_not_green(self) -> None:
        parts = {"tests": entry({"passed": 0, "failed": 0, "skipped": 17})}
        assert goals(parts)[0].is_met is False


def steps(**ms: float) -> dict[str, dict[str, float]]:
    return {kind.removeprefix("s"): STEP | {"ms": each} for kind, each in ms.items()}


class TestPrediction:
    LANGUAGE = make_language(1024, 0.8, 0.5, seed=1)
    TARGET = steps(s1x1=5.0, s1x4=5.1, s1x8=5.2, s8x1=5.9, s8x5=7.0)
    DRAFT = steps(s1x1=1.0, s1x4=1.0, s1x8=1.1)

    def test_steps_become_times_by_rows_and_by_sequence(self) -> None:
        times = prediction.step_times(self.TARGET)
        assert times.num_tokens == (1, 4, 8, 40)
        assert times.sequence_ms == pytest.approx(0.1)
        assert times.at(40, 8) == pytest.approx(7.0)
        assert prediction.step_times(self.DRAFT).at(8) == pytest.approx(1.1)

    def test_the_page_has_what_tune_predicts(self) -> None:
        figures = {"target_steps": self.TARGET, "draft_steps": self.DRAFT}
        parts = {"device": entry({"device": "NVIDIA H100 80GB HBM3"}), "engine": entry(figures)}
        parts["prediction"] = prediction.entry(parts, self.LANGUAGE)
        text = page(a_report(**parts))
        assert "draft on the target's GPU, in turns with it: " in text
        assert "= 1.07 × the target alone, as replicas: " in text
        assert "Not compared: the draft was not measured on the CPU." in text

    def test_without_steps_there_is_none(self) -> None:
        assert prediction.entry({}, self.LANGUAGE)["status"] == "skipped"


class TestParts:
    def test_a_junit_report_is_counted(self) -> None:
        found = tests_part.read_report(
            '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>'
            '<testcase name="c"><failure message="m">one\n\nE   two</failure></testcase>'
            '<testcase name="d"><error>three</error></testcase></testsuite></testsuites>'
        )
        assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
        assert found["failures"] == {"c": ["one", "E   two"], "d": ["three"]}

    def test_figures_stay_when_the_next_one_fails(self, tmp_path: Path) -> None:
        outcome = Outcome(tmp_path / "part.json")
        outcome.put("one", 1)
        outcome.skip("two", "no time")
        assert read(tmp_path / "part.json") == {"one": 1, "skipped": ["two: no time"]}
        assert read(tmp_path / "nothing.json") == {}

    def test_outputs_of_one_prompt_are_compared_as_far_as_they_go(self) -> None:
        def generation(*token_ids: int) -> Generation:
            return Generation(token_ids=list(token_ids))

        alike = [([1], generation(5, 6)), ([1], generation(5, 6, 7)), ([2], generation(9)), ([1], generation(5))]
        assert same_outputs(alike)
        assert not same_outputs([*alike, ([1], generation(5, 6, 8))])

    def test_the_longest_name_on_a_data_sheet_counts(self) -> None:
        assert data_sheet("NVIDIA H100 80GB HBM3") == 3350.0
        assert data_sheet("NVIDIA H100 PCIe") == 2000.0
        assert data_sheet("NVIDIA L40S") == 864.0
        assert data_sheet("Unknown") is None

    def test_prompts_have_no_end_token(self) -> None:
        prompts = prompts_of(make_language(50, 0.8, 0.5, seed=1), 20, 30)
        assert {len(each) for each in prompts} == {30}
        assert END_TOKEN_ID not in set().union(*prompts)

    def test_a_copy_is_timed(self) -> None:
        assert copy_gb_per_s("cpu", num_tries=1) > 0.0


WITHOUT_PACKAGES = """
import sys
from importlib import metadata

MISSING = ("llguidance", "pydantic", "redis")


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def version(name, known=metadata.version):
    if name in MISSING:
        raise metadata.PackageNotFoundError(name)
    return known(name)


metadata.version = version
sys.meta_path.insert(0, Finder())
"""


def run_session(*words: object, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu_session", *map(str, words)],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


async def is_drafted_through_a_command(setting: Setting) -> bool:
    """Whether a draft worker that a command starts, as that of a second GPU, attaches to the target."""
    place = DraftPlace("elsewhere", ("--device", "cpu"), ("env", "CUDA_VISIBLE_DEVICES="))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    language = made_language(is_tiny=True)
    async with started(setting, place) as pair:
        assert pair.draft_stub is not None
        found = await pair.generate([5, 9], params, attach_first=True)
    return found.token_ids == language.walk(9, 8)


class TestWholeSession:
    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_everything_but_the_gpu_runs_on_tiny_models(self, tmp_path: Path) -> None:
        """The parts that have nothing to do without a GPU say so."""
        scratch = tmp_path / "scratch"
        parts = ["device", "tests", "checkpoints", "engine", "pair", "own_gpu"]
        done = run_session("--tiny", "--scratch", scratch, "--parts", *parts, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads((tmp_path / "gpu_session.json").read_text())
        status = {name: part["status"] for name, part in report["parts"].items()}
        assert status == dict.fromkeys(parts, "done") | {
            "own_gpu": "skipped",
            "cpu_draft": "skipped",
            "prediction": "done",
        }
        assert (tmp_path / "gpu_session.txt").read_text() in done.stdout
        found = {goal.words.split()[0]: goal.is_met for goal in goals(report["parts"])}
        assert found["bits"]
        assert found["greedy"]
        # A later run of another part keeps what this one found, and its checkpoints.
        again = run_session("--tiny", "--scratch", scratch, "--parts", "checkpoints", cwd=tmp_path)
        assert again.returncode == 0, again.stderr[-3000:]
        later = json.loads((tmp_path / "gpu_session.json").read_text())["parts"]
        assert later["pair"] == report["parts"]["pair"]
        assert later["checkpoints"]["figures"]["target_written_in_s"] == 0.0
        assert asyncio.run(is_drafted_through_a_command(Setting(scratch, 60.0, is_tiny=True)))

    def test_a_bare_machine_is_told_what_is_missing(self, tmp_path: Path) -> None:
        """The session starts where packages of the workers are not installed, and names them."""
        blocked = tmp_path / "blocked"
        blocked.mkdir()
        (blocked / "sitecustomize.py").write_text(WITHOUT_PACKAGES)
        done = run_session("--tiny", "--parts", "device", "checkpoints", cwd=tmp_path, path=blocked)
        assert done.returncode == 1, done.stderr[-3000:]
        text = (tmp_path / "gpu_session.txt").read_text()
        assert "packages of a worker that are missing here: llguidance, redis" in text
        assert "device: failed: ModuleNotFoundError" in text
        assert "prediction: failed:" in text
        report = json.loads((tmp_path / "gpu_session.json").read_text())
        assert report["parts"]["checkpoints"]["status"] == "done"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_it_says_so_at_once(self, tmp_path: Path) -> None:
        done = run_session(cwd=tmp_path)
        assert done.returncode == gpu_session.NO_GPU_STATUS
        assert "--device cuda" in done.stderr
        assert "--tiny tries the script" in done.stderr
        assert not list(tmp_path.iterdir())

    def test_a_part_that_breaks_is_shown_and_ends_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str, *_: object) -> None:
            raise ValueError("no such thing")

        monkeypatch.setattr(gpu_session, "run_part", broken)
        arguments = gpu_session.parse(["--tiny", "--part", "engine", "--scratch", str(tmp_path), "--seconds", "5"])
        assert gpu_session.be_part(arguments) == 1
        assert read(tmp_path / "engine.json")["error"][-1] == "ValueError: no such thing"

    def test_a_part_that_hangs_is_ended_and_keeps_its_figures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = tmp_path / "hanging"
        program.write_text(
            f"#!{sys.executable}\nimport json, pathlib, signal\n"
            f"signal.signal({signal.SIGINT.value}, signal.SIG_IGN)\n"
            f"pathlib.Path({str(tmp_path / 'engine.json')!r}).write_text(json.dumps({{'one': 1}}))\nsignal.pause()\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr(gpu_session, "GRACE_S", 0.2)
        part = next(each for each in PARTS if each.name == "engine")
        arguments = gpu_session.parse(["--tiny"])
        found = gpu_session.start_part(part, arguments, 3.0, tmp_path)
        assert (found["status"], found["figures"]) == ("stopped", {"one": 1})
        assert Setting(tmp_path, 1.0, is_tiny=True).device == "cpu"
