"""Replaces the target's model while clients ask: new weights get a new name, clients move, old targets are drained."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file

from command_line.checkout import DEMO_TARGET
from outrider.errors import ConfigurationError
from tests.e2e.rollout.load import REQUEST_TIMEOUT_S, Case, Traffic, plain_cases
from tests.e2e.secured import SecuredSystem

NUM_NEW_TARGETS: Final = 2
"""A sequence moves only between targets of equal weights: one alone has nowhere to move it to."""
CHANGED_TENSOR: Final = "model.layers.7.mlp.down_proj.weight"

Step = Callable[[str, Callable[[], Awaitable[object]]], Awaitable[None]]


def write_new_model(folder: Path) -> Path:
    """The demo target with one tensor changed: same shape and tokenizer, another output."""
    shutil.copytree(DEMO_TARGET, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[CHANGED_TENSOR] *= 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def change_model(system: SecuredSystem, traffic: Traffic, model_dir: Path, step: Step) -> None:
    """From the one model that is served to the one in `model_dir`, which is served under its folder's name.

    The draft workers stay: those of another model version cost speed and nothing else.
    """
    name, old_targets = model_dir.name, system.names("target")
    old_name = traffic.cases[0].model

    async def serve_beside() -> None:
        for _ in range(NUM_NEW_TARGETS):
            await system.start_another("target", {"--model": model_dir, "--served-model-name": name})
        for index in range(len(system.names("coordinator"))):
            await _until_served(system, index, name)
        differ = {system.ready(each)["weights_fingerprint"] for each in system.names("target")}
        assert len(differ) == 2, differ

    async def move_some(old: Sequence[Case], new: Sequence[Case]) -> None:
        both = [case for pair in zip(old, new, strict=True) for case in pair]
        await traffic.turn_to(both, lambda models: {old_name, name} <= set(models))

    async def move_all(new: Sequence[Case]) -> None:
        await traffic.turn_to(new, lambda models: models[-1:] == [name])

    async def drain() -> None:
        for each in old_targets:
            await system.retire(each)

    await step(f"served {name} beside {old_name}", serve_beside)
    old, new = await _telling_cases(system, traffic.cases, name)
    await step(f"clients ask {old_name} and {name}", lambda: move_some(old, new))
    await step(f"clients ask {name} alone", lambda: move_all(new))
    await step(f"drained {', '.join(old_targets)}", drain)


async def _until_served(system: SecuredSystem, index: int, name: str) -> None:
    """Until this coordinator knows all new targets. Raises TimeoutError."""
    async with asyncio.timeout(REQUEST_TIMEOUT_S), system.http(system.key, index) as client:
        while True:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
            if {each["id"]: each["num_target_workers"] for each in models}.get(name) == NUM_NEW_TARGETS:
                return
            await asyncio.sleep(0.1)


async def _telling_cases(system: SecuredSystem, cases: Sequence[Case], name: str) -> tuple[list[Case], list[Case]]:
    """The cases whose answer tells which of two models gave it, and the new model's own. Raises ConfigurationError."""
    new = await plain_cases(system, name, [case.prompt for case in cases], cases[0].max_tokens)
    pairs = [pair for pair in zip(cases, new, strict=True) if pair[0].text != pair[1].text]
    if 2 * len(pairs) < len(cases):
        raise ConfigurationError(f"{name} answers most prompts as the old model does")
    return [old for old, _ in pairs], [new for _, new in pairs]
