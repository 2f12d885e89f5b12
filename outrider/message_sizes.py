"""The size of a message between processes. It imports nothing, so that an engine may import it without gRPC."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message that one process sends another one, in either direction."""
