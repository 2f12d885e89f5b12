"""A supervisor with two fake children, run as a process so that a test can kill it. Prints their pids.

usage: supervisor_holder.py LOG_DIR FAMILY_FILE
"""

import asyncio
import signal
import sys
from pathlib import Path

from outrider.local.supervisor import Supervisor
from tests.command_line.fakes import fake_spec


async def main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(Path(sys.argv[1]))
    await supervisor.start([fake_spec("target-0"), fake_spec("coordinator", "--family", sys.argv[2])])
    print(*supervisor.pids().values(), flush=True)
    await stop.wait()
    await supervisor.stop()


asyncio.run(main())
