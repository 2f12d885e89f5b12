"""Models that go by the name of a demo model and are not it, and what such a target says to a request.

A fleet answers a request with either model's text where targets of both have joined; what it must not do is to go on
with the other's. So the other text has to be known, from a target that nobody else asks.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc.aio
from safetensors.torch import load_file, save_file

from outrider.child import Child
from outrider.child_log import ChildLog
from outrider.child_spec import ChildSpec, RestartPolicy
from outrider.cli.deployment import ROOT, flatten, module
from outrider.redis_server import EmbeddedRedis
from protos.outrider.v1 import common_pb2, target_pb2, target_pb2_grpc

FACTOR: Final = 0.5
NUM_AT_ONCE: Final = 8
_READY_TIMEOUT_S: Final = 120.0
_ANSWER_TIMEOUT_S: Final = 120.0
_NEVER: Final = RestartPolicy(first_delay_s=0.1, delay_s_max=0.1)


def write_changed(model: Path, folder: Path) -> Path:
    """A copy in a new folder of the same name below `folder`, with one tensor changed: another output."""
    copy = folder / model.name
    shutil.copytree(model, copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    name = sorted(each for each in tensors if each.endswith("mlp.down_proj.weight"))[-1]
    tensors[name] = tensors[name] * FACTOR
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


@asynccontextmanager
async def lone_target(
    model: Path, dtype: str, max_model_len: int, log_dir: Path
) -> AsyncIterator[grpc.aio.Channel]:
    """A target worker with a registry of its own, which no coordinator looks into."""
    folder = Path(tempfile.mkdtemp(prefix="lone-", dir="/tmp"))
    redis = EmbeddedRedis(folder)
    child = None
    try:
        flags = {
            "--model": model,
            "--port": 0,
            "--worker-id": "lone",
            "--dtype": dtype,
            "--max-num-seqs": NUM_AT_ONCE,
            "--max-model-len": max_model_len,
            "--kv-cache-gib": 0.25,
            "--num-threads": 1,
            "--redis-url": redis.start(),
        }
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        words = (*module("target_worker"), *flatten(flags))
        spec = ChildSpec("lone", "target", words, environment, _READY_TIMEOUT_S, stop_grace_s=5.0)
        child = Child(spec, ChildLog("lone", log_dir), _NEVER, lambda event: None)
        await child.start()
        async with grpc.aio.insecure_channel(str(child.ready_line["address"])) as channel:
            yield channel
    finally:
        if child is not None:
            await child.stop()
        redis.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def generated(
    channel: grpc.aio.Channel, prompts: Sequence[tuple[Sequence[int], common_pb2.SamplingParams]]
) -> list[list[int]]:
    """What the target generates by itself, without hints; the requests' limits and nothing else end it."""
    stub, room = target_pb2_grpc.TargetStub(channel), asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(prompt: Sequence[int], sampling: common_pb2.SamplingParams) -> list[int]:
        request = target_pb2.GenerateRequest(
            session_id=uuid.uuid4().hex,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            speculation=common_pb2.SpeculationParams(enabled=False, plain=True),
        )
        token_ids: list[int] = []
        async with room:
            async for event in stub.Generate(request, timeout=_ANSWER_TIMEOUT_S):
                token_ids += event.step.token_ids
        return token_ids

    async with asyncio.TaskGroup() as asking:
        tasks = [asking.create_task(ask(*each)) for each in prompts]
    return [task.result() for task in tasks]


def is_of_either(token_ids: Sequence[int], known: Sequence[Sequence[int]]) -> bool:
    """Whether a whole text begins one of those known: one that went on with the other's begins neither."""
    return any(list(token_ids) == list(each[: len(token_ids)]) for each in known)
