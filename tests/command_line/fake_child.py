"""A process that honours the workers' contract and nothing else. `python -I -S` starts it at once.

usage: fake_child.py ROLE [--fail TEXT] [--silent] [--stubborn] [--family FILE] [--die-after-s S]
                     [--note FILE]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("role")
parser.add_argument("--fail", help="write this to stderr and exit with status 3")
parser.add_argument("--silent", action="store_true", help="never say that it is ready")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
parser.add_argument("--family", help="start a grandchild in its own session, pid into this file")
parser.add_argument("--die-after-s", type=float, help="exit with status 4 this long after being ready")
parser.add_argument("--note", help="append a line here on start and on an orderly stop")
options = parser.parse_args()


def note(word: str) -> None:
    if options.note:
        with open(options.note, "a") as file:
            file.write(f"{options.role} {word} {os.getpid()}\n")


def leave(number: int, frame: object) -> None:
    note("stopped")
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if options.stubborn else leave)
if options.fail:
    print(options.fail, file=sys.stderr)
    sys.exit(3)
if options.family:
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(options.family, "w") as file:
        file.write(str(grandchild.pid))
note("started")
print(f"{options.role} begins", file=sys.stderr, flush=True)
if not options.silent:
    ready = {"event": "ready", "role": options.role, "address": "127.0.0.1:1", "pid": os.getpid()}
    print(json.dumps(ready), flush=True)
if options.die_after_s is not None:
    time.sleep(options.die_after_s)
    sys.exit(4)
while True:
    time.sleep(600)
