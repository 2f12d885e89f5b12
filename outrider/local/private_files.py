"""Files and folders that only their owner can read, whatever the process' umask permits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from outrider.errors import ConfigurationError


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An `opener` of the built-in `open`: a file that it creates is its owner's alone."""
    return os.open(path, flags, 0o600)


def claim_folder(path: Path) -> None:
    """Makes a folder that is this user's alone, or closes one of this user's to others.

    Raises ConfigurationError for a folder in which somebody else may have placed something, and one that cannot be
    made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigurationError(f"the folder {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(
            f"{path} is not this user's alone: others may write into it, and what lies in it would run as this user. "
            "Name a folder that does not exist yet, or remove this one"
        )
    path.chmod(0o700)
