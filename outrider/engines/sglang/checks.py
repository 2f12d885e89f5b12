"""Refuses a configuration of SGLang with which hints cannot work, in one line that says what to change. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.engines import hints_variable
from outrider.engines.hint_settings import HintSettings
from outrider.engines.hints_variable import EXAMPLE, VARIABLE
from outrider.engines.sglang.contract import TESTED_VERSIONS
from outrider.errors import ConfigurationError

ALGORITHM: Final = "OUTRIDER"
ANY_VERSION: Final = "is_any_version"
NUM_DRAFT_TOKENS: Final = 8
"""Tokens that a step feeds per request, the last committed one included, where no flag says how many."""
MAX_RUNNING_REQUESTS: Final = 48
"""As SGLang's own default for NGRAM."""


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings as they are given. Raises ConfigurationError, where there are none, too."""
    given = hints_variable.settings_in(environment)
    if given is None:
        raise ConfigurationError(
            f"--speculative-algorithm {ALGORITHM} needs the environment variable {VARIABLE}, such as {EXAMPLE}"
        )
    return given


def check_version(version: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a release that was not tried, unless the settings permit any."""
    if version not in TESTED_VERSIONS and not given.get(ANY_VERSION):
        raise ConfigurationError(
            f"Outrider's hints were tried with SGLang {', '.join(TESTED_VERSIONS)}, and this is {version}; "
            f'"{ANY_VERSION}": true in {VARIABLE} tries it all the same'
        )


def hint_settings(given: Mapping[str, Any]) -> HintSettings:
    """Raises ConfigurationError."""
    return HintSettings.from_mapping({key: each for key, each in given.items() if key != ANY_VERSION})


# Flag, its only values, and why no others.
_ONLY: Final = (
    ("pp_size", (1,), "hints are taken by one pipeline stage alone"),
    ("enable_dp_attention", (False, None), "SGLang's n-gram worker, which this one extends, does not support it"),
    ("disaggregation_mode", ("null", None), "requests that another server has prefilled were not tried"),
    ("enable_two_batch_overlap", (False, None), "hints follow the tokens of the whole last step"),
    ("enable_pdmux", (False, None), "hints follow the tokens of the whole last step"),
    ("device", ("cuda", "cpu", None), "no other device was tried"),
    ("speculative_eagle_topk", (1, None), "hints are one chain per request"),
    ("speculative_accept_threshold_single", (1.0, None), "below 1 the output is not the target's"),
    ("speculative_accept_threshold_acc", (1.0, None), "below 1 the output is not the target's"),
    ("speculative_use_rejection_sampling", (False, None), "a hint has no distribution"),
    ("speculative_adaptive", (False, None), "the number of tokens per step is fixed"),
    ("speculative_draft_model_path", (None,), f"the draft model belongs to draft workers, which {VARIABLE} names"),
    ("speculative_ngram_external_corpus_path", (None,), f"--speculative-algorithm {ALGORITHM} reads no corpus"),
)  # fmt: skip


def check_configuration(server_args: Any) -> None:
    """Raises ConfigurationError, which names the flag. SGLang calls it before any process is started."""
    for name, permitted, reason in _ONLY:
        value = getattr(server_args, name, None)
        if value not in permitted:
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"{flag} {value} does not go with --speculative-algorithm {ALGORITHM}: {reason}; leave it out"
            )
    width, num_steps = server_args.speculative_num_draft_tokens, server_args.speculative_num_steps
    if width is not None and width < 2:
        raise ConfigurationError(
            f"--speculative-num-draft-tokens {width} leaves no room for a hint: the last token counts, too; at least 2"
        )
    width = width or NUM_DRAFT_TOKENS
    if num_steps not in (None, width - 1):
        raise ConfigurationError(
            f"--speculative-num-steps {num_steps} has no effect of its own here: leave it out; "
            f"--speculative-num-draft-tokens {width} verifies {width - 1} hints per step"
        )


def set_defaults(server_args: Any) -> None:
    """Sets what SGLang itself sets for NGRAM."""
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = NUM_DRAFT_TOKENS
    server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
    server_args.speculative_eagle_topk = 1
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if server_args.device == "cpu":  # SGLang has no overlap with speculation there
        server_args.disable_overlap_schedule = True
