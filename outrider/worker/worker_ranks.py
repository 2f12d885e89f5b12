"""A worker of several processes, for a model too large for one device: `torchrun --nproc-per-node N -m target_worker`.

Rank 0 is the worker that others know. The other ranks have its command line, load their shard of the model, and then
repeat what rank 0 does to its own (`engine.ranks.rank_group`). They end when rank 0 tells them to, is gone or silent.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal

from outrider.errors import OutriderError
from outrider.observability import logs
from outrider.worker.engine_options import engine_config
from outrider.worker.worker_options import worker_options
from outrider.worker.worker_process import pin_to_cores, report_cause

logger = logging.getLogger(__name__)

EXIT_ALONE = 75  # EX_TEMPFAIL: the group is broken, a new one may work


def follow(arguments: argparse.Namespace) -> int:
    """Runs a process that is not rank 0. Returns its exit status."""
    rank = os.environ["RANK"]
    logs.configure(logs.LogFormat.TEXT, origin=f"rank {rank} ")
    # Nothing is lost while a group loads. The system ends the process even while it waits inside a library.
    _on_stop(signal.SIG_DFL)
    try:
        pin_to_cores(own_cores(arguments.cpu_affinity))
        options, config = worker_options(arguments), engine_config(arguments)
        from outrider.engine.device import find_device
        from outrider.engine.loading.loading import load_model
        from outrider.engine.ranks.rank_group import join_ranks

        group = join_ranks(options.stall_exit_s, find_device(config.device))
        engine = load_model(config, group)
    except OutriderError as error:
        report_cause(f"rank {rank}: {error.message}")
        return 1
    # A group is stopped by a signal to every process; rank 0 has sessions to finish and needs the others for it.
    _on_stop(signal.SIG_IGN)
    try:
        engine.follow()
    except RuntimeError as error:
        logger.error("another rank has ended, so this one ends: %s", error)
        return EXIT_ALONE
    return 0


def _on_stop(handler: signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def own_cores(cores: str | None) -> str | None:
    """This process' part of `--cpu-affinity`, where several ranks share a machine."""
    if not cores:
        return None
    rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    listed = cores.split(",")
    own = listed[rank * len(listed) // size : (rank + 1) * len(listed) // size]
    return ",".join(own or listed)
