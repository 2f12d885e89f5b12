"""Tests of the effect of a signal on a long-running command."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outrider.local.until_signalled import run_until_signalled


@pytest.mark.parametrize(("can_end_early", "status"), [(True, 7), (False, 128 + signal.SIGINT)])
def test_a_command_that_can_end_early_does_so_and_another_is_cancelled(can_end_early: bool, status: int) -> None:
    asked = asyncio.Event()

    def end_early() -> bool:
        asked.set()
        return can_end_early

    async def command() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        await asked.wait()
        await asyncio.sleep(0)  # where a cancellation comes
        return 7

    assert run_until_signalled(command, end_early) == status
