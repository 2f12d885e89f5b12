"""Files that change while they are in use."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from outrider.errors import ConfigurationError
from outrider.security import watched_files
from outrider.security.watched_files import SMALL_BYTES, WatchedFiles
from tests.e2e.system import eventually


@pytest.fixture(autouse=True)
def looks_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)


def written(path: Path, text: str, seconds_ago: float) -> None:
    path.write_text(text)
    at_s = time.time() - seconds_ago
    os.utime(path, (at_s, at_s))


def test_a_file_that_somebody_may_be_writing_is_left_to_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "SETTLED_S", 1000.0)
    path = tmp_path / "file"
    written(path, "all of it", 5000)
    files = WatchedFiles([path], path.read_text)
    written(path, "", 1)
    assert files.current() == "all of it"
    written(path, "all of it, anew", 2000)
    assert files.current() == "all of it, anew"
    written(path, "of a clock that goes ahead", -5000)
    assert files.current() == "of a clock that goes ahead"


def test_a_secret_of_kubernetes_is_followed_through_its_links(tmp_path: Path) -> None:
    """file -> ..data/file, ..data -> ..the_time; the folder of the time before is deleted."""
    for name, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "file", text, 100)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "file").symlink_to("..data/file")
    files = WatchedFiles([tmp_path / "file"], (tmp_path / "file").read_text)
    assert files.current() == "old"
    (tmp_path / "..next").symlink_to("..2")
    (tmp_path / "..next").rename(tmp_path / "..data")
    (tmp_path / "..1" / "file").unlink()
    assert files.current() == "new"


def test_what_cannot_be_read_leaves_what_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    written(path, "1", 100)

    def read() -> int:
        try:
            return int(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(str(error)) from error

    files = WatchedFiles([path], read)
    written(path, "one", 50)
    assert [files.current() for _ in range(3)] == [1, 1, 1]
    assert caplog.text.count("stays in force") == 1
    path.unlink()
    assert files.current() == 1
    written(path, "2", 50)
    assert files.current() == 2


def test_a_large_file_is_read_by_a_thread_while_what_was_before_is_in_force(tmp_path: Path) -> None:
    path, threads, may_read = tmp_path / "file", list[int](), threading.Event()
    written(path, "1", 100)

    def read() -> str:
        if threads:
            assert may_read.wait(30)
        threads.append(threading.get_ident())
        return path.read_text()

    files = WatchedFiles([path], read)
    written(path, "2" * (SMALL_BYTES + 1), 50)
    assert [files.current() for _ in range(3)] == ["1"] * 3
    assert files.refused_for_s() is None
    may_read.set()
    eventually(files.current, lambda content: content[0] == "2", "it was read")
    assert len(threads) == 2, "once, however many asked meanwhile"
    assert threads[1] != threading.get_ident()


def test_a_large_file_that_fails_to_be_read_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    written(path, "1", 100)
    files = WatchedFiles([path], lambda: {"1": 1}[path.read_text()])
    written(path, "2" * (SMALL_BYTES + 1), 50)
    eventually(files.refused_for_s, lambda for_s: for_s is not None, "it is refused")
    assert files.current() == 1
    assert "stays in force" in caplog.text


def test_what_was_refused_is_not_read_anew_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, num_read, is_good = tmp_path / "file", 0, True

    def read() -> str:
        nonlocal num_read
        num_read += 1
        if not is_good:
            raise ConfigurationError("no good")
        return path.read_text()

    written(path, "1", 100)
    files = WatchedFiles([path], read)
    is_good = False
    written(path, "2", 50)
    assert [files.current() for _ in range(5)] == ["1"] * 5
    assert num_read == 2
    written(path, "3", 40)
    assert files.current() == "1"
    assert num_read == 3, "a change is read at once"
    monkeypatch.setattr(watched_files, "AGAIN_S", 0.0)
    written(path, "4", 30)
    files.current()
    is_good = True
    assert files.current() == "4", "and without a change from time to time"
    assert files.refused_for_s() is None
