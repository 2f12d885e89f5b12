"""Processes for tests of several ranks, forked from one that has imported the engine already, which takes seconds."""

from __future__ import annotations

import multiprocessing
from typing import Final

forks: Final = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["outrider.engine.loading.loading"])
