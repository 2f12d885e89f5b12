"""The folder by which commands find the system that runs on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider.local.system_folder import new_system_folder, redis_url_files, write_redis_url


def test_a_running_system_is_found_by_its_file_which_only_its_user_reads(tmp_path: Path) -> None:
    folder = new_system_folder(tmp_path)
    assert redis_url_files(tmp_path) == [], "it has no Redis yet"
    path = write_redis_url(folder, "redis://:secret@127.0.0.1:1/0")
    assert redis_url_files(tmp_path) == [path]
    assert path.read_text() == "redis://:secret@127.0.0.1:1/0"
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_what_a_killed_system_left_is_not_found_and_goes_with_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"outrider-{ended.pid}-abc"
    left.mkdir()
    write_redis_url(left, "redis://127.0.0.1:1/0")
    for other in ("outrider-x-abc", "else"):
        (tmp_path / other).mkdir()
    assert redis_url_files(tmp_path) == []
    folder = new_system_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "outrider-x-abc", "else"}
    assert folder.name.startswith(f"outrider-{os.getpid()}-")
