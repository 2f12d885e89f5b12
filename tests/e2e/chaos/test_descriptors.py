"""A process whose descriptors are exhausted keeps what it has and gets nothing more, until it may again."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.chaos.descriptors import exhausted

CODE = """
import os
kept = open(os.devnull)
print("up", flush=True)
while input():
    try:
        open(os.devnull).close()
        os.fstat(kept.fileno())
        print("opened", flush=True)
    except OSError as error:
        os.fstat(kept.fileno())
        print(error.strerror, flush=True)
"""


def test_nothing_more_is_opened_until_it_may_be() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def answer() -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("again\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        assert process.stdout.readline().strip() == "up"
        with exhausted(process.pid) as num_held:
            assert num_held >= 4
            assert answer() == "Too many open files"
        assert answer() == "opened"
    finally:
        process.kill()
        process.communicate(timeout=10)
