"""The engine of a worker, as far as its shell knows it, and the engine's part of the command line."""

from __future__ import annotations

import argparse
from typing import Protocol

from outrider.engine.options import EngineOptions as EngineOptions
from outrider.settings import from_flags


def engine_config(arguments: argparse.Namespace) -> EngineOptions:
    """Raises ConfigurationError, naming the flag."""
    early_exit_layer = getattr(arguments, "early_exit_layer", None)  # of a draft worker only
    return from_flags(EngineOptions, arguments, has_trees=arguments.role == "draft", early_exit_layer=early_exit_layer)


class ServedEngine(Protocol):
    """An engine of a worker (`outrider.engine.model.Engine`, `outrider.engine.heads.head_engine.HeadEngine`)."""

    config: EngineOptions
    vocab_size: int
    max_model_len: int  # tokens
    num_parameters: int
    numerics: str
    eos_token_ids: frozenset[int]

    def dismiss(self) -> None:
        """Lets its other processes end."""
