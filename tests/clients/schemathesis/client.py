"""Schemathesis, run from its command line as its documentation shows, on all operations of the server's document."""

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import check, equal, finish

URL = os.environ["OUTRIDER_URL"]
NUM_EXAMPLES = 40  # for each operation
OUTPUT: list[str] = []
# A request may choose a deadline that nothing can meet.
Path("schemathesis.toml").write_text(
    '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "504"]\n', encoding="utf-8"
)
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


@check("no 5xx and no violation")
def _() -> None:
    command = [
        *(Path(sys.executable).with_name("schemathesis"), "--no-color", "run", f"{URL}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--phases", "fuzzing", "--max-examples", str(NUM_EXAMPLES)),
        *("--seed", "1", "--generation-database", "none", "--request-timeout", "60", "--continue-on-failure"),
    ]
    done = subprocess.run(command, check=False, timeout=550, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    OUTPUT.append(done.stdout)
    equal(done.returncode, 0)


@check("every operation was tested")
def _() -> None:
    selected, total = re.findall(r"Selected: (\d+)/(\d+)", OUTPUT[0])[0]
    (tested,) = re.findall(r"Tested: (\d+)", OUTPUT[0])
    equal({selected, tested}, {total})


finish()
