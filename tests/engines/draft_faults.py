"""Draft workers that are killed, frozen and made to flood, and the memory of those who suffer it."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psutil

from tests.engines.vllm_server import Process, start, wait_until

FREEZE_S: Final = (0.1, 6.0)
"""Some freezes outlast the silence after which a draft worker is given up."""
MORE_MB: Final = 256
"""Most memory that an engine's processes and its hint server may gain."""


class DraftWorkers:
    """Draft workers that are started and restarted: those of `tests.engines.oracle_draft`, and others."""

    def __init__(
        self, folder: Path, ports: list[int], texts: Path, others: Mapping[int, Callable[[], Process]] | None = None
    ) -> None:
        """texts: for the oracles; others: by index of the port, how to start a worker that is none."""
        self._folder, self._ports, self._texts, self._others = folder, ports, texts, others or {}
        self.counts: Counter[str] = Counter()  # faults by kind
        self._workers: list[Process | None] = [None] * len(ports)
        self._lock = threading.Lock()
        self._healing: list[threading.Thread] = []

    def start(self, index: int) -> None:
        port = self._ports[index]
        if index in self._others:
            made = self._others[index]()
        else:
            words = [sys.executable, "-m", "tests.engines.oracle_draft", str(port), str(self._texts)]
            log = self._folder / f"oracle-{port}.log"
            before = log.read_text().count("ready") if log.exists() else 0
            made = start(words, log)
            # Before that a signal would end it.
            wait_until(lambda: log.read_text().count("ready") > before, "the draft worker is ready")
        with self._lock:
            self._workers[index] = made

    def inject(self, dice: random.Random, hints_port: int) -> None:
        """Does something bad to one worker, if one runs, and begins to heal it."""
        taken = self._take(dice)
        if taken is None:
            return
        kind = dice.choice(["kill", "freeze", "flood"])
        self.counts[kind] += 1
        if kind == "kill":
            self._kill(*taken, dice.uniform(0.0, 1.0))
        elif kind == "freeze":
            self._freeze(*taken, dice.uniform(*FREEZE_S))
        else:
            self._flood(*taken, hints_port)

    def _take(self, dice: random.Random) -> tuple[int, Process] | None:
        """One that runs and that no fault has; it is out of reach until `start` or `_give_back`."""
        with self._lock:
            there = [index for index, worker in enumerate(self._workers) if worker is not None]
            if not there:
                return None
            index = dice.choice(there)
            worker, self._workers[index] = self._workers[index], None
        assert worker is not None
        return index, worker

    def _heal(self, after_s: float, heal: Callable[[], None]) -> None:
        thread = threading.Timer(after_s, heal)
        thread.start()
        self._healing.append(thread)

    def _give_back(self, index: int, worker: Process) -> None:
        with self._lock:
            self._workers[index] = worker

    def _kill(self, index: int, worker: Process, pause_s: float) -> None:
        worker.stop()
        self._heal(pause_s, lambda: self.start(index))

    def _freeze(self, index: int, worker: Process, pause_s: float) -> None:
        os.kill(worker.process.pid, signal.SIGSTOP)

        def thaw() -> None:
            os.kill(worker.process.pid, signal.SIGCONT)
            self._give_back(index, worker)

        self._heal(pause_s, thaw)

    def _flood(self, index: int, worker: Process, hints_port: int) -> None:
        """By the draft worker itself if it can, and by a stranger that sends what is no HTTP/2."""
        if index not in self._others:
            os.kill(worker.process.pid, signal.SIGUSR1)
        self._give_back(index, worker)
        threading.Thread(target=rubbish, args=(hints_port,), daemon=True).start()

    def all_are_back(self) -> None:
        for thread in self._healing:
            thread.join()

    def stop(self) -> None:
        self.all_are_back()
        for worker in self._workers:
            if worker is not None:
                worker.stop()


def rubbish(port: int) -> None:
    """A connection that sends megabytes of nothing, and reads nothing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as peer:
            for _ in range(64):
                peer.sendall(os.urandom(1 << 16))
    except OSError:
        pass  # the port's owner has had enough


def memory_mb(pid: int) -> dict[str, float]:
    """Resident memory of a process' children, by kind: hint servers, and the engine with all others."""
    found: Counter[str] = Counter()
    for process in psutil.Process(pid).children(recursive=True):
        try:
            is_hint_server = "outrider.engines.hint_server" in process.cmdline()
            found["hint server" if is_hint_server else "engine"] += process.memory_info().rss / 1e6
        except psutil.Error:
            continue
    return dict(found)
