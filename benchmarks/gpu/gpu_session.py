"""Measures everything that needs a GPU in one run of some 20 minutes, and prints one page.

Parts, in the order of their worth: the device's speeds; tests/engine/test_cuda.py; checkpoints of the shapes of Llama
3.1 8B and Llama 3.2 1B, with random weights that agree as often as real pairs do (`benchmarks/gpu/checkpoints.py`);
steps, prompts and bits of the target's engine; target and draft workers on the same GPU, with one stream and eight;
the draft on a second GPU, where there is one, and on the CPU. Each part runs in a process of its own with a limit of
its own. An error or a limit ends that part alone, and keeps what it had found. The page is printed, and --json
written, after every part, so that a run that is broken off leaves both.

It needs neither Ray nor a network nor a trained model: torch and transformers, pytest for the tests, and for the
workers what pyproject.toml lists for their image; the page names what is missing. A machine that lends less time at
once takes several runs: --minutes 9, then --parts with the rest and the same --scratch, where the checkpoints stay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.language import made_language
from benchmarks.gpu.outcome import Figures, Outcome, Setting, read, say
from benchmarks.gpu.page import page
from benchmarks.gpu.schedule import PARTS, Part, turn
from benchmarks.shared.machine import commit

ERROR_LINES: Final = 12
GRACE_S: Final = 10.0  # for a part's workers to end, before it is killed
NO_GPU_STATUS: Final = 2


def run_part(name: str, setting: Setting, outcome: Outcome) -> None:
    """Runs one part in this process."""
    if name == "device":
        from benchmarks.gpu import device_part

        device_part.run(setting, outcome)
    elif name == "tests":
        from benchmarks.gpu import tests_part

        tests_part.run(setting, outcome)
    elif name == "checkpoints":
        from benchmarks.gpu import models_part

        models_part.run(setting, outcome)
    elif name == "engine":
        from benchmarks.gpu import engine_part

        engine_part.run(setting, outcome)
    else:
        from benchmarks.gpu import pair_part

        places = {"pair": pair_part.same_gpu, "own_gpu": pair_part.own_gpu, "cpu_draft": pair_part.on_cpu}
        pair_part.run(setting, outcome, places[name](setting))


def start_part(part: Part, arguments: argparse.Namespace, seconds: float, scratch: Path) -> dict[str, Any]:
    """Runs a part in a process of its own, for at most `seconds`. Returns its entry in the report."""
    result = scratch / f"{part.name}.json"
    result.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.gpu.gpu_session", "--part", part.name, "--seconds", f"{seconds:.1f}"]
    words += ["--scratch", str(scratch), *(["--tiny"] if arguments.tiny else [])]
    began = time.monotonic()
    # A session of its own, so that a part that is stopped takes its own processes along.
    process = subprocess.Popen(words, start_new_session=True)
    entry: dict[str, Any] = {"status": "done", "why": ""}
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        entry |= {"status": "stopped", "why": f"it took longer than {seconds:.0f} s"}
        _end(process)
    except BaseException:
        _end(process)
        raise
    else:
        if status:
            entry |= {"status": "failed", "why": f"exit status {status}"}
    figures = read(result)
    if "error" in figures:
        *lines, last = figures.pop("error")
        entry |= {"status": "failed", "why": last, "error": lines[-ERROR_LINES:]}
    return entry | {"seconds": round(time.monotonic() - began, 1), "figures": figures}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a part: asked first, so that it ends its workers, then killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def be_part(arguments: argparse.Namespace) -> int:
    """Runs as the process of a part. Returns its exit status."""
    outcome = Outcome(arguments.scratch / f"{arguments.part}.json")
    try:
        run_part(arguments.part, Setting(arguments.scratch, arguments.seconds, arguments.tiny), outcome)
    except Exception as error:  # whatever it is, the page shows it and the other parts run
        traceback.print_exc()
        lines = [line for each in traceback.format_exception(error) for line in each.rstrip().splitlines()]
        outcome.put("error", [*lines, f"{type(error).__name__}: {error}"])
        return 1
    return 0


@contextmanager
def scratch_folder(given: Path | None) -> Iterator[Path]:
    """The folder of the checkpoints: the given one stays, another is deleted."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix="outrider-gpu-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def earlier_parts(arguments: argparse.Namespace, commit: str | None) -> dict[str, Figures]:
    """Entries that --json has of an earlier run, for a run of some --parts: of the same commit and models."""
    found = read(arguments.json) if arguments.parts else {}
    is_same = found.get("commit") == commit and found.get("tiny") == arguments.tiny
    kept: dict[str, Figures] = found.get("parts", {}) if is_same else {}
    return {name: entry for name, entry in kept.items() if name not in arguments.parts}


def session(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Runs all parts, and writes the report after each of them."""
    began = time.monotonic()
    tree = arguments.commit or commit()
    report: dict[str, Any] = {"commit": tree, "minutes": arguments.minutes, "tiny": arguments.tiny, "parts": {}}
    parts: dict[str, Figures] = report["parts"]
    earlier = earlier_parts(arguments, tree)
    for part in PARTS:
        left_s = 60.0 * arguments.minutes - (time.monotonic() - began)
        succeeded = {name for name, entry in parts.items() if entry["status"] == "done"}
        if "checkpoints" in arguments.kept:
            succeeded |= {"checkpoints"}
        num_gpus = int(parts.get("device", {}).get("figures", {}).get("num_gpus", 0))
        decision = turn(part, left_s, arguments.parts, succeeded, num_gpus)
        if decision.why_not and part.name in earlier:
            parts[part.name] = earlier[part.name]
        elif decision.why_not:
            parts[part.name] = {"status": "skipped", "why": decision.why_not, "seconds": 0.0, "figures": {}}
        else:
            say(f"{part.name}: {part.purpose}, at most {decision.seconds:.0f} s")
            parts[part.name] = start_part(part, arguments, decision.seconds, scratch)
            say(f"{part.name}: {parts[part.name]['status']} after {parts[part.name]['seconds']} s")
        report["seconds"] = round(time.monotonic() - began, 1)
        _write(report, arguments)
    try:
        from benchmarks.gpu import prediction

        parts["prediction"] = prediction.entry(parts, made_language(is_tiny=arguments.tiny))
    except ImportError as error:  # it needs the packages of the command line
        parts["prediction"] = {"status": "failed", "why": str(error), "seconds": 0.0, "figures": {}}
    _write(report, arguments)
    return report


def _write(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    arguments.page.write_text(page(report))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=18.0, help="of the whole run (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the script itself")
    parser.add_argument(
        "--parts", nargs="+", default=[], choices=[part.name for part in PARTS], help="run these alone (default: all)"
    )
    parser.add_argument("--scratch", type=Path, help="folder for 19 GB of checkpoints, which stay there (default: a "
                        "temporary one, deleted at the end)")  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("gpu_session.json"), help="file (default %(default)s)")
    parser.add_argument("--page", type=Path, default=Path("gpu_session.txt"), help="file (default %(default)s)")
    parser.add_argument("--commit", help="of this tree, where git cannot tell (default: git's)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.kept = [] if arguments.scratch is None else [
        name for name in ("checkpoints",) if (arguments.scratch / "draft" / "made.json").is_file()
    ]  # fmt: skip
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.part:
        return be_part(arguments)
    if not arguments.tiny:
        from outrider.engine.device import DeviceError, choose_device, read_facts

        try:
            choose_device("cuda", read_facts())
        except DeviceError as error:
            print(f"{error}. --tiny tries the script without a GPU", file=sys.stderr)
            return NO_GPU_STATUS
    with scratch_folder(arguments.scratch) as scratch:
        report = session(arguments, scratch)
    print(page(report), flush=True)
    return 0 if all(entry["status"] in ("done", "skipped") for entry in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
