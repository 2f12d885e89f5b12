"""Folders whose files run as their owner: nobody else may have placed something there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from outrider.errors import ConfigurationError
from outrider.local.private_files import claim_folder, open_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        claim_folder(tmp_path / "a" / "b")
        with open(tmp_path / "file", "w", opener=open_private) as file:
            file.write("x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "file") == 0o600


@pytest.mark.parametrize("given", [0o700, 0o750, 0o755])
def test_a_folder_that_others_may_only_read_is_closed(tmp_path: Path, given: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(given)
    claim_folder(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o700


@pytest.mark.parametrize("given", [0o777, 0o1777, 0o770, 0o722])
def test_a_folder_that_others_may_write_is_refused_and_stays(tmp_path: Path, given: int) -> None:
    """Its files may be theirs; and /tmp itself must not be closed to everybody."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(given)
    with pytest.raises(ConfigurationError, match="others may write into it"):
        claim_folder(tmp_path / "a")
    assert mode(tmp_path / "a") == given


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ConfigurationError, match="not this user's alone"):
        claim_folder(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    os.chown(tmp_path / "a", 65534, 65534)
    with pytest.raises(ConfigurationError, match="not this user's alone"):
        claim_folder(tmp_path / "a")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        claim_folder(tmp_path / "a" / "b")
