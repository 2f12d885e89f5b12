"""vLLM's entry point to Outrider: with OUTRIDER_HINTS in its environment a server takes hints, without any flag.

vLLM calls `register` in each of its processes, in every environment that Outrider is installed in. Without the variable
it does nothing. With it, vLLM's arguments are completed before vLLM makes its configuration of them.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

from outrider.engines.hint_settings import HintSettings
from outrider.engines.hints_variable import VARIABLE, settings_in
from outrider.engines.vllm.checks import ANY_VERSION, CONFIG_KEY, PROPOSER
from outrider.errors import ConfigurationError

SCHEDULER: Final = "outrider.engines.vllm.scheduler.HintScheduler"
NUM_SPECULATIVE_TOKENS: Final = "num_speculative_tokens"
NUM_SPECULATIVE_TOKENS_DEFAULT: Final = 7


def register() -> None:
    """Completes the arguments of each engine that this process makes, if the variable is set."""
    if not os.environ.get(VARIABLE, "").strip():
        return
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_engine_config
    if hasattr(make, "__wrapped__"):
        return  # vLLM may call this more than once

    @functools.wraps(make)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = settings_in(os.environ)
        if given is not None:
            complete(self, given)
        return make(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def complete(arguments: Any, given: dict[str, Any]) -> None:
    """Sets vLLM's arguments for hints. Raises ConfigurationError for wrong settings, which vLLM's engine process would
    find later and say in the middle of its own lines, and where an argument is set to something else."""
    given = dict(given)
    speculative = {
        "method": "custom_class",
        "model": PROPOSER,
        NUM_SPECULATIVE_TOKENS: given.pop(NUM_SPECULATIVE_TOKENS, NUM_SPECULATIVE_TOKENS_DEFAULT),
    }
    HintSettings.from_mapping({key: each for key, each in given.items() if key != ANY_VERSION})
    taken = [
        flag
        for flag, value in (
            ("--speculative-config", arguments.speculative_config),
            ("--scheduler-cls", arguments.scheduler_cls),
            ("--async-scheduling", arguments.async_scheduling or None),
            (f"--additional-config {CONFIG_KEY}", (arguments.additional_config or {}).get(CONFIG_KEY)),
        )
        if value is not None
    ]
    if taken:
        raise ConfigurationError(
            f"{VARIABLE} sets {', '.join(taken)}, and so do vLLM's own arguments: leave one of both out"
        )
    arguments.speculative_config = speculative
    arguments.scheduler_cls = SCHEDULER
    arguments.async_scheduling = False
    arguments.additional_config = {**(arguments.additional_config or {}), CONFIG_KEY: given}
