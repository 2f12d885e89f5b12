"""The private folder of a system that runs on this machine, by which other commands of the same user find its Redis.

Its name carries the process id of its maker. What the folder of a killed maker left behind goes with the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

# Ray puts sockets below it, whose names the kernel bounds to 107 bytes: so a short path.
BASE: Final = Path("/tmp")
_REDIS_URL: Final = "redis-url"


def new_system_folder(base: Path = BASE) -> Path:
    """Makes the folder of this process' system, which only its user can read; those of dead makers go."""
    for folder, is_alive in _folders(base):
        if not is_alive:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-", dir=base))


def write_redis_url(folder: Path, url: str) -> Path:
    """Writes the URL, which may hold a password, to the folder's file; returns the file."""
    path = folder / _REDIS_URL
    path.touch(mode=0o600)
    path.write_text(url, encoding="utf-8")
    return path


def redis_url_files(base: Path = BASE) -> list[Path]:
    """Files with the Redis URLs of this user's running systems."""
    return sorted(path for folder, is_alive in _folders(base) if is_alive and (path := folder / _REDIS_URL).is_file())


def _folders(base: Path) -> list[tuple[Path, bool]]:
    """This user's folders of systems, each with whether its maker runs."""
    found = []
    for folder in base.glob("outrider-*-*"):
        pid = folder.name.split("-")[1]
        try:
            is_own = folder.stat().st_uid == os.getuid()
        except OSError:  # it has just gone
            continue
        if pid.isdigit() and is_own:
            found.append((folder, _is_running(int(pid))))
    return found


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
