"""The speculative algorithm OUTRIDER as SGLang's registry holds it."""

from __future__ import annotations

import os
from typing import Any

import sglang
from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

from outrider.engines.sglang.checks import (
    ALGORITHM,
    check_configuration,
    check_version,
    hint_settings,
    set_defaults,
    settings_in,
)
from outrider.engines.sglang.contract import missing
from outrider.errors import ConfigurationError


class HintAlgorithm(CustomSpecAlgo):
    """Behaves as NGRAM wherever SGLang asks: its drafts come from the host, and it has no KV of its own."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        set_defaults(server_args)

    # SGLang 0.5.23 asks these of every algorithm, and its base class for plugins lacks them.
    create_future_map = SpeculativeAlgorithm.create_future_map

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False


def check(server_args: Any) -> None:
    """Raises ConfigurationError. SGLang calls it before it starts any process."""
    given = settings_in(os.environ)
    check_version(sglang.__version__, given)
    hint_settings(given)
    check_configuration(server_args)


def worker_class(server_args: Any) -> type:
    """The class of which each scheduler process of SGLang makes its worker. Raises ConfigurationError."""
    if lacks := list(missing()):
        raise ConfigurationError(f"SGLang {sglang.__version__} lacks what HintWorker relies on: {', '.join(lacks)}")
    from outrider.engines.sglang.worker import HintWorker

    return HintWorker


def register_algorithm() -> None:
    decorate = SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=check, spec_class=HintAlgorithm
    )
    decorate(worker_class)
