"""AIPerf, run from its command line as its documentation shows: a small load of streamed chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import check, equal, finish

NUM_REQUESTS = 16
EXTRA = json.dumps({"temperature": 0, "speculation": {"always": True}})
ARTIFACTS = Path("artifacts")
FIGURES = ARTIFACTS / "profile_export_aiperf.json"
RECORDS = ARTIFACTS / "profile_export.jsonl"


def metric(name: str) -> float:
    return json.loads(FIGURES.read_text())[name]["avg"]


@check("profile ends well")
def _() -> None:
    command = [
        *(Path(sys.executable).with_name("aiperf"), "profile", "--url", os.environ["OUTRIDER_URL"]),
        *("--model", os.environ["OUTRIDER_MODEL"], "--tokenizer", os.environ["OUTRIDER_TOKENIZER"]),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--per-chunk-usage"),
        *("--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--random-seed", "1"),
        *("--isl", "60", "--isl-stddev", "0", "--osl", "40", "--osl-stddev", "0", "--extra-inputs", EXTRA),
        *("--artifact-dir", ARTIFACTS, "--ui", "none", "--no-gpu-telemetry", "--workers-max", "1"),
    ]
    subprocess.run(command, check=True, timeout=240, stdout=sys.stderr)


@check("every request succeeded")
def _() -> None:
    figures = json.loads(FIGURES.read_text())
    equal(metric("request_count"), NUM_REQUESTS)
    assert not figures.get("error_summary"), figures["error_summary"]
    assert metric("time_to_first_token") > 0
    assert metric("inter_token_latency") > 0


@check("acceptance is read from the answers of all requests")
def _() -> None:
    records = [json.loads(line)["metrics"] for line in RECORDS.read_text().splitlines()]
    equal(len(records), NUM_REQUESTS)
    lengths = [record["spec_decode_acceptance_length"]["value"] for record in records]
    assert min(lengths) >= 1
    assert metric("total_draft_tokens") >= metric("total_accepted_draft_tokens") > 0
    assert metric("spec_decode_token_weighted_acceptance_length") > 1


@check("the server's metrics are read")
def _() -> None:
    text = "".join(path.read_text() for path in ARTIFACTS.glob("server_metrics_export*.json"))
    assert "vllm:spec_decode_num_accepted_tokens" in text


finish()
