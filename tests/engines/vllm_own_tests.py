"""`python -m tests.engines.vllm_own_tests SOURCE`: vLLM's own tests of its OpenAI server, without hints and with.

SOURCE is vLLM's source at the release that `OUTRIDER_VLLM_PYTHON` has (`git clone --branch v0.32.0 --depth 1
https://github.com/vllm-project/vllm`). None of it is kept here. Its tests ask for models of a hub; here all names stand
for the demo target, so that some tests fail in both runs: those that expect a certain model's words, length or
tokenizer. What passes without hints must pass with hints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from outrider.local.free_ports import free_ports
from tests.engines.vllm_server import (
    PYTHON,
    TARGET,
    VllmServer,
    hint_flags,
    running,
    start_draft_worker,
    wait_ready,
)

FILES: Final = (
    "completion/test_completion.py",
    "completion/test_prompt_validation.py",
    "chat_completion/test_batched_chat_completions.py",
    "chat_completion/test_chat.py",
    "chat_completion/test_chat_completion.py",
    "chat_completion/test_chat_echo.py",
    "chat_completion/test_chat_logit_bias_validation.py",
    "chat_completion/test_logprob_token_ids.py",
    "test_chunked_prompt.py",
    "test_return_token_ids.py",
    "test_return_tokens_as_ids.py",
)
"""Below tests/entrypoints/openai. Left out: other tasks than text (audio, images, embeddings, reasoning and tool models
that the demo target is not, the responses API of such models), and files that test no running server."""
NAMES: Final = (
    "m", "facebook/opt-125m", "openai-community/gpt2", "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B", "HuggingFaceH4/zephyr-7b-beta", "zephyr-lora",
)  # fmt: skip
REFUSED: Final = ("logit_bias", "min_p")
"""vLLM refuses these with any speculation: tests that have one of them in their names may fail with hints."""
NUM_TRIES: Final = 3
"""Some tests expect things of sampled text that are only likely. One that fails with hints is tried again."""
FLAGS: Final = ("--served-model-name", *NAMES, "--enable-prompt-tokens-details", "--no-enable-prefix-caching")


def outcomes(source: Path, server: VllmServer, folder: Path, tests: list[str]) -> dict[str, str]:
    """Outcomes by test, of files or ids relative to the source. Raises FileNotFoundError if pytest did not run."""
    shutil.copy(Path(__file__).with_name("vllm_own_plugin.py"), folder / "outrider_own_plugin.py")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    file = folder / "outcomes.json"
    file.unlink(missing_ok=True)
    words = [
        PYTHON,
        "-m",
        "pytest",
        "-p",
        "outrider_own_plugin",
        "-p",
        "tests.entrypoints.conftest",
        "-c",
        str(folder / "pytest.ini"),
        "--noconftest",
    ]
    words += ["--rootdir", str(source), "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{source / 'tests' / '..'}",
        "HF_HUB_OFFLINE": "1",
        "OUTRIDER_OWN_TESTS_URL": server.url,
        "OUTRIDER_OWN_TESTS_MODEL": str(TARGET),
        "OUTRIDER_OWN_TESTS_OUTCOMES": str(file),
    }
    # The source's folder `vllm` would win over the installed package: pytest starts beside it.
    subprocess.run(words, cwd=folder, env=environment, check=False, timeout=1800)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def isolated(source: Path, folder: Path) -> Path:
    """A folder with the source's tests alone: beside them its package `vllm` would win over the installed one."""
    made = folder / "source"
    made.mkdir()
    (made / "tests").symlink_to((source / "tests").resolve())
    return made


def main(words: list[str]) -> int:
    (source,) = map(Path, words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = isolated(source, folder)
        files = [str(alone / "tests" / "entrypoints" / "openai" / file) for file in FILES]
        with running(folder, "plain", *FLAGS) as plain:
            wait_ready(plain)
            without = outcomes(alone, plain, folder, files)
        draft_port, hints_port = free_ports(2)
        flags = hint_flags([draft_port], hints_port, may_pause=False)
        with running(folder, "hinted", *flags, *FLAGS, hints_port=hints_port) as hinted:
            draft = start_draft_worker(draft_port, folder)
            try:
                wait_ready(hinted)
                hints = outcomes(alone, hinted, folder, files)
                for _ in range(NUM_TRIES - 1):
                    if worse := lost(without, hints):
                        hints |= outcomes(alone, hinted, folder, [str(alone / test) for test in worse])
                num_accepted = hinted.num_accepted
            finally:
                draft.stop()
    return report(without, hints, num_accepted)


def lost(without: dict[str, str], hints: dict[str, str]) -> list[str]:
    """Tests that pass without hints alone."""
    passed = [test for test, outcome in without.items() if outcome == "passed"]
    return [test for test in passed if hints.get(test) != "passed" and not any(word in test for word in REFUSED)]


def report(without: dict[str, str], hints: dict[str, str], num_accepted: float) -> int:
    for test in sorted(without.keys() | hints.keys()):
        one, other = without.get(test, "missing"), hints.get(test, "missing")
        if (one, other) != ("passed", "passed"):
            print(f"{one:8s} without, {other:8s} with hints: {test}")
    num_passed = sum(outcome == "passed" for outcome in without.values())
    worse = lost(without, hints)
    print(f"{len(without)} tests: {num_passed} pass without hints, {num_passed - len(worse)} of these with hints;")
    print(f"{num_accepted:.0f} hints were accepted")
    return 1 if worse or not num_accepted or not num_passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
