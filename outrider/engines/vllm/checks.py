"""Refuses a configuration of vLLM with which hints cannot work, in one line that says what to change. Pure."""

from __future__ import annotations

from typing import Any, Final

from outrider.engines.vllm.contract import TESTED_VERSIONS
from outrider.errors import ConfigurationError

CONFIG_KEY: Final = "outrider"
"""The key of the settings in vLLM's `--additional-config`."""
PROPOSER: Final = "outrider.engines.vllm.no_drafts.NoDrafts"
SPECULATIVE_CONFIG: Final = f'{{"method": "custom_class", "model": "{PROPOSER}", "num_speculative_tokens": 7}}'
ANY_VERSION: Final = "is_any_version"


def check_version(version: str, given: dict[str, Any]) -> None:
    """Raises ConfigurationError for a release that was not tried, unless the settings permit any."""
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS and not given.get(ANY_VERSION):
        raise ConfigurationError(
            f"Outrider's hints were tried with vLLM {', '.join(TESTED_VERSIONS)}, and this is {version}; "
            f'"{ANY_VERSION}": true in --additional-config {CONFIG_KEY} tries it all the same'
        )


def settings_in(vllm_config: Any) -> dict[str, Any]:
    """The settings as they are given. Raises ConfigurationError where there are none."""
    additional = vllm_config.additional_config
    given = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    if not isinstance(given, dict):
        raise ConfigurationError(
            f'HintScheduler needs --additional-config \'{{"{CONFIG_KEY}": {{"draft_workers": ["HOST:PORT"]}}}}\''
        )
    return given


def check_configuration(vllm_config: Any) -> None:
    """Raises ConfigurationError, which names the flag."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "custom_class" or speculative.model != PROPOSER:
        raise ConfigurationError(f"HintScheduler needs --speculative-config '{SPECULATIVE_CONFIG}'")
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigurationError("HintScheduler needs --no-async-scheduling: hints follow the tokens of the last step")
    if vllm_config.use_v2_model_runner:
        raise ConfigurationError(
            "HintScheduler needs vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0): the other one takes no draft "
            "tokens from a scheduler"
        )
    if vllm_config.max_concurrent_batches > 1:
        raise ConfigurationError(
            f"HintScheduler runs one step after the other, and this engine has {vllm_config.max_concurrent_batches} "
            "batches under way at once: --pipeline-parallel-size 1"
        )
    if vllm_config.model_config.is_encoder_decoder or vllm_config.model_config.is_diffusion:
        raise ConfigurationError("HintScheduler serves models that generate one token after the other")
