"""What a signal does to a command that runs for long."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outrider.cli.system import run_until_signalled


@pytest.mark.parametrize(("may_finish", "status"), [(True, 7), (False, 128 + signal.SIGINT)])
def test_a_command_that_may_finish_does_so_and_another_is_cancelled(may_finish: bool, status: int) -> None:
    asked = asyncio.Event()

    def ask() -> bool:
        asked.set()
        return may_finish

    async def command() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        await asked.wait()
        await asyncio.sleep(0)  # where a cancellation comes
        return 7

    assert run_until_signalled(command, ask) == status
