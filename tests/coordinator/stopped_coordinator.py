"""A coordinator as a process of its own, in front of workers that somebody else serves: `python -m … MODEL_DIR
TARGET_ADDRESS…`. It says on which port it listens.

So that a test can stop it with SIGSTOP while its workers go on.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import uvicorn

from coordinator.api.http.application import create_app
from coordinator.request.environment import Outside
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.registry.worker_record import Snapshot
from tests.coordinator.fakes import record_of

SILENCE_MAX_S = 1.0


async def serve(model_dir: Path, addresses: list[str]) -> None:
    settings = CoordinatorSettings(
        tokenizer_dir=str(model_dir),
        redis_url="unused",
        target_silence_max_s=SILENCE_MAX_S,
        quarantine_s=60.0,
    )
    outside = replace(Outside.real(settings), registry=None)
    (model,) = outside.models.current().models
    snapshot = Snapshot(tuple(record_of("target", each, model.fingerprint) for each in addresses), ())
    async with GenerationService(settings, lambda: snapshot, outside) as service:
        server = uvicorn.Server(uvicorn.Config(create_app(service), host="127.0.0.1", port=0, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it is asked, it does not tell
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2:]))
