"""The environment variable OUTRIDER_HINTS: settings of hints for engines that are told of plugins by nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigurationError

VARIABLE: Final = "OUTRIDER_HINTS"
EXAMPLE: Final = f'{VARIABLE}=\'{{"draft_workers": ["HOST:PORT"]}}\''


def settings_in(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The settings as they are given: JSON, or the path of a file with it; None: the variable is not set.

    Raises ConfigurationError.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return None
    text, where = given, VARIABLE
    if not given.startswith("{"):
        where = f"the file {given} that {VARIABLE} names"
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{where} cannot be read: {error}; {VARIABLE} is JSON or a path") from error
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{where} is {settings!r}; an object is required")
    return settings
