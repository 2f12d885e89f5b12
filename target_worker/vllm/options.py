"""Settings of a target worker on vLLM. Everything else is vLLM's own, behind `--`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.engine.options import EngineOptions
from outrider.errors import ConfigurationError
from outrider.settings import MODEL, REQUIRED, check, same_as, setting
from target_worker.limits import SchedulerLimits

OWNED: Final = {
    "--model": "give --model before the --",
    "--served-model-name": "give --served-model-name before the --",
    "--scheduler-cls": "the worker has a scheduler of its own",
    "--worker-extension-cls": "the worker has one of its own",
    "--additional-config": "the worker uses it itself",
    "--async-scheduling": "hints follow the tokens of the last step",
    "--disable-log-stats": "the worker's load comes from them",
}
"""Flags of vLLM that the worker sets itself, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Settings of the engine. Raises ConfigurationError, naming the flag."""

    model: str = setting(
        REQUIRED, "model folder in Hugging Face format, or a name at its hub that vLLM downloads", MODEL, "model"
    )
    max_num_waiting: int = same_as(SchedulerLimits, "max_num_waiting")
    num_speculative_tokens: int = same_as(
        SchedulerLimits,
        "num_speculative_tokens",
        help="most hints verified per sequence and step; 0: no draft workers, and then vLLM serves min_p, logit_bias, "
        "pipeline parallelism and its own --speculative-config",
    )
    hint_wait_ms_max: float = same_as(SchedulerLimits, "hint_wait_ms_max")
    may_pause: bool = same_as(SchedulerLimits, "may_pause")
    cpu_affinity: str | None = same_as(EngineOptions, "cpu_affinity")
    is_any_version: bool = setting(
        False, "run with a release of vLLM that was not tested", MODEL, flag="--any-vllm-version"
    )
    vllm_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        for flag in self.vllm_flags:
            if why := OWNED.get(flag.partition("=")[0].replace("_", "-")):
                raise ConfigurationError(f"{flag} cannot be passed to vLLM: {why}")
        if self.num_speculative_tokens and setting_given(self.vllm_flags, "--speculative-config"):
            raise ConfigurationError(
                "vLLM drafts by its own --speculative-config or takes hints of draft workers: add "
                "--num-speculative-tokens 0 before the -- for the first, or leave --speculative-config out"
            )

    @property
    def takes_hints(self) -> bool:
        return self.num_speculative_tokens > 0


def setting_given(flags: Sequence[str], *names: str) -> bool:
    """Whether one of these flags of vLLM, or a part of it (--name.key), is among the given ones."""
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    return any(each == name or each.startswith(f"{name}.") for each in given for name in names)


def split_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before the first `--`, which are ours, and those behind it, which are vLLM's."""
    where = words.index("--") if "--" in words else len(words)
    return [*words[:where]], tuple(words[where + 1 :])
