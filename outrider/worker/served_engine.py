"""What a worker's shell knows of the engine that it serves, whether it runs a model or a draft head."""

from __future__ import annotations

from typing import Protocol

from outrider.engine.options import EngineOptions


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
