"""The engine's part of a worker's command line."""

from __future__ import annotations

import argparse

from outrider.engine.options import EngineOptions as EngineOptions
from outrider.settings import from_flags


def engine_config(arguments: argparse.Namespace) -> EngineOptions:
    """Raises ConfigurationError, naming the flag."""
    early_exit_layer = getattr(arguments, "early_exit_layer", None)  # of a draft worker only
    return from_flags(EngineOptions, arguments, has_trees=arguments.role == "draft", early_exit_layer=early_exit_layer)
