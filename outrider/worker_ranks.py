"""A worker of several processes, for a model too large for one device: `torchrun --nproc-per-node N -m target_worker`.

Rank 0 is the worker as everybody else knows it. The others have its command line, load their shard of the model, and
from then on do to it what rank 0 does to its own (`engine.rank_group`). They end when it says so, is gone or silent.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from outrider.errors import OutriderError
from outrider.worker_options import engine_config, worker_options
from outrider.worker_process import pin_to_cores, tell_cause

logger = logging.getLogger(__name__)

EXIT_ALONE = 75  # EX_TEMPFAIL: the group is broken, another one may do


def is_follower() -> bool:
    """Whether this process is one of a group's, and not its first."""
    return os.environ.get("RANK", "0") != "0"


def follow(arguments: argparse.Namespace) -> int:
    """The life of a process that is not rank 0. Returns its exit status."""
    rank = os.environ["RANK"]
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s",
    )
    # Whoever stops a group tells every process of it; rank 0 has sessions to finish, and needs the others for it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        pin_to_cores(own_cores(arguments.cpu_affinity))
        options, config = worker_options(arguments), engine_config(arguments)
        from outrider.engine.loading import load_model
        from outrider.engine.rank_group import join_ranks

        group = join_ranks(options.stall_exit_s)
        engine = load_model(config, group)
    except OutriderError as error:
        tell_cause(f"rank {rank}: {error.message}")
        return 1
    try:
        engine.follow()
    except RuntimeError as error:
        logger.error("rank 0 or another one is gone, so this one ends: %s", error)
        return EXIT_ALONE
    return 0


def own_cores(cores: str | None) -> str | None:
    """The part of `--cpu-affinity` that is this process's, where several of a group share a machine."""
    if not cores:
        return None
    rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    listed = cores.split(",")
    own = listed[rank * len(listed) // size : (rank + 1) * len(listed) // size]
    return ",".join(own or listed)
