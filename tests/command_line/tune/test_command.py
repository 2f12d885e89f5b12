"""`outrider tune` from flags to advice, on tiny models."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from command_line import app
from command_line.tune.findings import ModelProfile, Settings
from command_line.tune.profile import TARGET_SIZES, loaded, longest_sequence, step_times
from command_line.tune.texts import GeneratedText, generate, ranks
from command_line.tune.times import StepTimes
from draft_worker.__main__ import parse_arguments as parse_draft_arguments
from outrider.engine.loading.machine import usable_cores
from outrider.errors import ConfigurationError, InvalidRequest, OutriderError, TokenizerMismatch
from outrider.text.tokenizer import fingerprint
from target_worker.__main__ import parse_arguments as parse_target_arguments
from tests.models import MAX_MODEL_LEN, copy_of, engine, model_dir, random_model

TARGET, DRAFT = model_dir("llama"), model_dir("llama", seed=1)
QUICK = (
    "--dtype",
    "float32",
    "--budget-s",
    0.5,
    "--max-tokens",
    24,
    "--batch-sizes",
    "1,4",
    "--context-len",
    32,
)
SETTINGS = Settings("float32", "none", 1, context_len=32, num_tokens=20, budget_s=0.5)


def run(*arguments: object) -> Result:
    environment = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner(env=environment).invoke(app, ["tune", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    result = run("--target", TARGET, *QUICK, *arguments, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    read: dict[str, Any] = json.loads(result.stdout)
    return read


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("def f(x):", "import os", "return x")))
    return path


class TestWholeCommand:
    @pytest.mark.thorough
    def test_a_model_that_drafts_for_itself_is_always_right(
        self, prompts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Of one and the same model; measured twice they differ by what else the machine does.
        same = ModelProfile(StepTimes((1, 32), (1.0, 2.0)), 1, 0.0, 32)
        command = importlib.import_module("command_line.tune.command")
        monkeypatch.setattr(command, "step_times", lambda *_, **__: same)
        read = document("--draft", TARGET, "--prompts", prompts, "--max-speculative-tokens", 4)
        texts = read["texts"]
        assert (texts["num_prompts"], texts["acceptance_rate"]) == (3, 1.0)
        assert 24 < texts["num_tokens"] <= 3 * 24  # a text may end before
        assert [each["mean_length"] for each in read["acceptance"]] == [2.0, 3.0, 4.0, 5.0]
        assert [each["iid_length"] for each in read["acceptance"]] == [2.0, 3.0, 4.0, 5.0]
        assert [each["batch"] for each in read["advice"]] == [1, 4]
        # It costs as much as the target: taking turns cannot gain anything.
        assert all(each["synchronous"] < 1.0 < each["bound"] for each in read["advice"])

    def test_a_stranger_is_never_recommended(self, prompts: Path) -> None:
        read = document("--draft", DRAFT, "--prompts", prompts)
        assert read["texts"]["acceptance_rate"] < 0.3
        assert [each["num_speculative_tokens"] for each in read["advice"]] == [0, 0]
        assert "Do not speculate" in " ".join(read["verdict"])
        assert all("--no-draft" in command for command in read["flags"] if "serve" in command)
        placements = {each["name"]: each for each in read["placements"]["placements"]}
        assert placements["target on 1 core, draft on another"]["num_speculative_tokens"] == [0, 0]
        alternative = placements.get("target alone on 2 cores")  # not on a machine with one core
        assert (alternative is None) is (len(usable_cores()) == 1)
        assert alternative is None or alternative["is_equal_cost"]

    @pytest.mark.thorough
    def test_what_is_said_to_a_person(self, prompts: Path) -> None:
        result = run("--target", TARGET, "--draft", DRAFT, *QUICK, "--prompts", prompts)
        assert result.exit_code == 0, result.stderr
        for words in (
            "Milliseconds of a step",
            "Where the draft runs",
            "Tokens a step",
            "Predicted",
            "The target is ",
            "The draft's first candidate",
        ):
            assert words in result.stdout
        assert "tokens were compared" in result.stdout
        assert "Loading" in result.stderr

    @pytest.mark.thorough
    def test_flags_are_ones_that_the_commands_know(self) -> None:
        # No overhead and a long step make even a twin pay, so that every flag is there.
        overheads = ("--overhead-ms", 0, "--link-ms", 0)
        result = run("--target", TARGET, "--draft", TARGET, *QUICK, *overheads, "--flags")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("outrider serve ")
        for line in result.stdout.splitlines():
            name, command, *arguments = shlex.split(line)
            assert name == "outrider"
            if command == "serve":
                known = get_command(app).commands["serve"]  # type: ignore[attr-defined]
                known.make_context("serve", arguments)
            else:
                parse = {"target-worker": parse_target_arguments, "draft-worker": parse_draft_arguments}[command]
                parse(arguments)

    @pytest.mark.thorough
    def test_it_leaves_threads_and_cores_as_they_were(self, prompts: Path) -> None:
        cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        torch.set_num_threads(num_threads + 1)
        try:
            document("--draft", DRAFT, "--prompts", prompts, "--cpu-affinity", min(cores))
            assert torch.get_num_threads() == num_threads + 1
            assert os.sched_getaffinity(0) == cores
        finally:
            torch.set_num_threads(num_threads)

    def test_help_does_not_wait_for_torch(self) -> None:
        code = "import sys, command_line.tune.command; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
        assert "acceptance" in run("--help").stdout.lower()


class TestBadInput:
    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        result = run("--target", TARGET, "--draft", tmp_path / "nothing")
        assert isinstance(result.exception, ConfigurationError)
        assert "--draft" in result.exception.message
        assert "no such folder" in result.exception.message

    def test_tokenizers_that_differ_are_named_by_their_fingerprints(self, tmp_path: Path) -> None:
        other = copy_of("llama", tmp_path / "other")
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        result = run("--target", TARGET, "--draft", other)
        assert isinstance(result.exception, TokenizerMismatch)
        assert fingerprint(TARGET) in result.exception.message
        assert fingerprint(other) in result.exception.message

    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_a_file_without_prompts(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "prompts.txt"
        path.write_text(content)
        result = run("--target", TARGET, "--draft", DRAFT, "--prompts", path)
        assert result.exit_code == 2
        assert "no prompt" in result.stderr

    @pytest.mark.parametrize(
        ("flag", "value"),
        [
            ("--batch-sizes", "0"),
            ("--batch-sizes", "1,many"),
            ("--batch-sizes", ""),
            ("--max-tokens", MAX_MODEL_LEN),
            ("--overhead-ms", "nan"),
            ("--link-ms", "inf"),
            ("--prompts", "/no/such/file"),
            ("--budget-s", 0),
            ("--prices", "h100"),
            ("--draft-gpu", "abacus"),
        ],
    )
    def test_a_wrong_flag_is_named(self, flag: str, value: object) -> None:
        result = run("--target", TARGET, "--draft", DRAFT, flag, value)
        assert result.exit_code == 2
        assert flag in result.stderr

    def test_cores_that_are_not_there(self) -> None:
        result = run("--target", TARGET, "--draft", DRAFT, "--cpu-affinity", "4000")
        assert isinstance(result.exception, OutriderError)
        assert "--cpu-affinity 4000" in result.exception.message

    def test_more_threads_than_cores(self) -> None:
        core = min(os.sched_getaffinity(0))
        result = run("--target", TARGET, "--draft", DRAFT, "--cpu-affinity", core, "--num-threads", 2)
        assert result.exit_code == 2
        assert "--num-threads" in result.stderr

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there(self) -> None:
        result = run("--target", TARGET, "--draft", DRAFT, "--device", "cuda")
        assert isinstance(result.exception, ConfigurationError)
        assert "--device cuda" in result.exception.message

    def test_sources_are_not_compared_on_a_gpu(self) -> None:
        result = run("--target", TARGET, "--draft", DRAFT, "--all-sources", "--device", "cuda")
        assert result.exit_code == 2
        assert "--device" in result.stderr

    def test_two_kinds_of_output(self) -> None:
        assert run("--json", "--flags").exit_code == 2


class TestMeasuring:
    def test_no_time_at_all_leaves_the_smallest_step(self) -> None:
        own = Settings("float32", "none", 1, context_len=32, num_tokens=4, budget_s=0.0)
        found = step_times(engine(), TARGET_SIZES, own, is_target=True)
        assert found.times.num_tokens == (1,)
        assert generate(engine(), [[1, 2, 3]], own, lambda _: None) == []

    def test_a_context_that_does_not_fit_is_cut(self) -> None:
        own = Settings("float32", "none", 1, context_len=10_000, num_tokens=4, budget_s=0.5)
        found = step_times(engine(), TARGET_SIZES, own, is_target=True)
        assert found.context_len == MAX_MODEL_LEN // 2
        assert found.times.num_tokens[-1] <= MAX_MODEL_LEN // 2

    def test_blocks_are_given_back(self) -> None:
        num_free = engine().allocator.num_free
        step_times(engine(), (1, 4), SETTINGS, is_target=False)
        texts = generate(engine(), [[5, 6, 7]] * 20, SETTINGS, lambda _: None)
        ranks(engine(), texts[0])
        assert len(texts) == 20
        assert engine().allocator.num_free == num_free

    def test_texts_and_ranks_are_transformers_own(self) -> None:
        prompt = [11, 22, 33, 44]
        [found] = generate(engine(), [prompt], SETTINGS, lambda _: None)
        target, draft = random_model("llama"), random_model("llama", seed=1)
        written = list(prompt)
        with torch.inference_mode():
            for _ in range(SETTINGS.num_tokens):
                written.append(int(target(torch.tensor([written])).logits[0, -1].argmax()))
            expected = draft(torch.tensor([written])).logits[0, len(prompt) - 1 : -1].topk(4).indices.tolist()
        assert found == GeneratedText(tuple(prompt), tuple(written[len(prompt) :]))
        assert ranks(engine(seed=1), found) == tuple(
            row.index(token_id) if token_id in row else 4
            for row, token_id in zip(expected, found.token_ids, strict=True)
        )

    def test_ranks_across_the_stretches_of_a_long_text(self) -> None:
        prompt = [(7 * i) % 250 for i in range(300)]
        own = Settings("float32", "none", 1, context_len=32, num_tokens=60, budget_s=20.0)
        [found] = generate(engine(), [prompt], own, lambda _: None)
        assert ranks(engine(), found) == (0,) * 60

    def test_a_token_that_the_draft_has_no_row_for_ends_the_text(self) -> None:
        found = ranks(engine(), GeneratedText((1, 2, 3), (4, 5, 100_000, 6)))
        assert len(found) == 2

    def test_a_loaded_model_is_cut_to_its_own_limit(self) -> None:
        with loaded(TARGET, SETTINGS, is_target=True, longest=10**6) as own:
            assert own.max_model_len == MAX_MODEL_LEN == longest_sequence(TARGET)

    def test_nothing_generated_is_an_error_that_names_the_flag(self) -> None:
        from command_line.tune.texts import check_texts

        with pytest.raises(InvalidRequest, match="--budget-s"):
            check_texts([], 0.1)
