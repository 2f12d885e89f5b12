"""The sources of hints by the names that metrics and statistics show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from protos.outrider.v1 import common_pb2

SOURCE_NAMES: Final[Mapping[int, str]] = {
    value: name.removeprefix("HINT_SOURCE_").lower() for name, value in common_pb2.HintSource.items() if value
}
