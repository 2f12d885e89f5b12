"""GuideLLM, run from its command line as its documentation shows: a small load of chats and one of completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import check, equal, finish

NUM_REQUESTS = 12
OUTPUT_TOKENS = 30
EXTRA = {"temperature": 0, "speculation": {"always": True}}


def run(request_format: str, file: Path) -> dict:
    """The benchmark in the report of one run."""
    backend = {"target": os.environ["OUTRIDER_URL"], "model": os.environ["OUTRIDER_MODEL"]}
    backend |= {"kind": "openai_http", "request_format": request_format, "extras": {"body": EXTRA}}
    command = [
        *(Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"),
        *("--backend", json.dumps(backend)),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=50,output_tokens={OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['OUTRIDER_TOKENIZER']}"),
        *("--output", f"kind=json,path={file}"),
    ]
    subprocess.run(command, check=True, timeout=140, stdout=sys.stderr)
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    return benchmark


for request_format in ("/v1/chat/completions", "/v1/completions"):

    @check(f"{request_format}: every request succeeded, with its speculation figures")
    def _(request_format: str = request_format) -> None:
        benchmark = run(request_format, Path(f"{request_format.replace('/', '_')}.json"))
        requests = benchmark["requests"]
        equal((len(requests["errored"]), len(requests["incomplete"])), (0, 0))
        equal(len(requests["successful"]), NUM_REQUESTS)
        equal({request["output_metrics"]["text_tokens"] for request in requests["successful"]}, {OUTPUT_TOKENS})
        stats = [request["response_metrics"]["speculative_decoding"] for request in requests["successful"]]
        assert all(each["mean_acceptance_length"] >= 1 for each in stats), stats
        assert sum(each["num_accepted_draft_tokens"] for each in stats) > 0, stats


finish()
