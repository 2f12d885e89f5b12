"""Main loop of a peer's process: loads a model once, then answers JSON lines on stdin with JSON lines on stdout.

It uses only the standard library, because it also runs in a peer's own environment. Libraries' output goes to stderr.
The first line is `{"ready": facts}` or `{"error": why}`. Each input line `{"prompts": [[token id]], "num_tokens": n}`
is one batch, answered by `{"seconds": s, "texts": [[token id]], "decoding": [[tokens, seconds]]}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Batch = list[list[int]]
# Per request: its new tokens, and how many of them came after the first ones in how many seconds.
Replies = list[tuple[list[int], int, float]]
Generate = Callable[[Batch, int], Replies]


def bind_to_cores(cores: list[int]) -> None:
    """Binds all existing threads and, by inheritance, later ones. Does nothing on systems without affinity."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def run(load: Callable[[dict[str, Any]], tuple[dict[str, Any], Generate]]) -> None:
    """Runs the loop. `load` gets the settings, the process's only argument, and returns facts for the report."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        facts, generate = load(json.loads(sys.argv[1]))
    except ImportError as error:
        send({"error": str(error)})
        sys.exit(1)
    send({"ready": facts})
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        answers = generate(asked["prompts"], asked["num_tokens"])
        seconds = time.perf_counter() - began
        send({
            "seconds": seconds,
            "texts": [token_ids for token_ids, _, _ in answers],
            "decoding": [[num_tokens, took] for _, num_tokens, took in answers],
        })  # fmt: skip
