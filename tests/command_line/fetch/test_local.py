"""`outrider fetch` from folders, and the folders that it fetches into."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_line import app
from command_line.fetch import command
from command_line.fetch.place import Place
from command_line.fetch.record import RECORD, Record
from outrider.engine.loading.checkpoint_files import partial_folder
from outrider.errors import ConfigurationError
from tests.command_line.fetch.checkpoints import NEEDED, SHARDS, sharded_model, small_model
from tests.command_line.fetch.conftest import Fetcher, content_of

RUNNER = CliRunner()


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "source", sharded_model())


class TestFolders:
    def test_are_copied_as_far_as_serving_needs_them(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        outcome = fetch(str(source), tmp_path / "model")
        found = content_of(tmp_path / "model")
        del found[RECORD]
        assert found == {name: content for name, content in content_of(source).items() if name in NEEDED}
        assert {file.compared for file in outcome.record.files} == {"size"}
        assert fetch(str(source), tmp_path / "model").state == "present"

    def test_follow_links_as_the_caches_of_other_tools_have(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        shutil.move(source / SHARDS[0], tmp_path / "blob")
        (source / SHARDS[0]).symlink_to(tmp_path / "blob")
        fetch(str(source), tmp_path / "model")
        assert not (tmp_path / "model" / SHARDS[0]).is_symlink()

    def test_with_a_record_are_compared_with_it(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        fetch(str(source), tmp_path / "first")
        outcome = fetch(str(tmp_path / "first"), tmp_path / "second")
        assert {file.compared for file in outcome.record.files} == {"sha256"}
        path = tmp_path / "first" / SHARDS[0]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(ConfigurationError, match=f"{SHARDS[0]} has the sha256"):
            fetch(str(tmp_path / "first"), tmp_path / "third")

    def test_that_are_not_there_are_named(self, fetch: Fetcher, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"nowhere is no folder; name one, or hf://ORG/NAME@REVISION"):
            fetch(str(tmp_path / "nowhere"), tmp_path / "model")


class TestChecking:
    """The same folder twice."""

    def test_a_whole_folder_is_left_as_it_is(self, source: Path, tmp_path: Path) -> None:
        before = content_of(source)
        result = RUNNER.invoke(app, ["fetch", str(source), str(source), "--json", str(tmp_path / "out.json")])
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "out.json").read_text())["state"] == "present"
        assert content_of(source) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "source"]

    def test_a_folder_that_is_not_whole_is_refused(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        fetch(str(source), tmp_path / "model")
        model = str(tmp_path / "model")
        path = tmp_path / "model" / SHARDS[0]
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert RUNNER.invoke(app, ["fetch", model, model]).exit_code == 0
        refused = RUNNER.invoke(app, ["fetch", model, model, "--verify"])
        assert isinstance(refused.exception, ConfigurationError)
        assert "another sha256 than its record" in str(refused.exception)
        path.write_bytes(content[:-1])
        refused = RUNNER.invoke(app, ["fetch", model, model])
        assert "cut off" in str(refused.exception)
        path.unlink()
        refused = RUNNER.invoke(app, ["fetch", model, model])
        assert f"lacks 1 of its 2 files of weights, such as {SHARDS[0]}" in str(refused.exception)

    def test_checksums_need_a_record(self, source: Path) -> None:
        refused = RUNNER.invoke(app, ["fetch", str(source), str(source), "--verify"])
        assert "has no record" in str(refused.exception)


class TestPlaces:
    def test_with_files_of_others_are_not_touched(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        written(tmp_path / "mine", {"thesis.txt": b"x"})
        with pytest.raises(ConfigurationError, match="files that `outrider fetch` did not write"):
            fetch(str(source), tmp_path / "mine", replace=True)
        assert content_of(tmp_path / "mine") == {"thesis.txt": b"x"}

    def test_that_are_empty_are_used(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        assert fetch(str(source), tmp_path / "model").state == "fetched"

    def test_where_a_volume_is_mounted_are_refused(self, source: Path, fetch: Fetcher) -> None:
        with pytest.raises(ConfigurationError, match=r"where a volume is mounted.*such as /proc/model"):
            fetch(str(source), Path("/proc"))
        with pytest.raises(ConfigurationError, match="root of a file system"):
            fetch(str(source), Path("/"))

    def test_that_are_files_or_links_are_refused(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(source)
        for name in ("file", "link"):
            with pytest.raises(ConfigurationError, match="is no folder"):
                fetch(str(source), tmp_path / name)

    def test_with_a_record_that_cannot_be_read_are_refused(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        written(tmp_path / "model", {RECORD: b'{"version": 99}'})
        with pytest.raises(ConfigurationError, match="has version 99, and this release reads 1"):
            fetch(str(source), tmp_path / "model")


class TestKilledProcesses:
    """States of the disk that a process leaves which is killed at the worst moment."""

    def test_before_the_folder_is_renamed(
        self, source: Path, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed_at(monkeypatch, partial_folder(tmp_path / "model"))
        with pytest.raises(Killed):
            fetch(str(source), tmp_path / "model")
        assert not (tmp_path / "model").exists()
        monkeypatch.undo()
        outcome = fetch(str(source), tmp_path / "model")
        assert (outcome.state, outcome.num_bytes_read) == ("fetched", 0)
        assert set(content_of(tmp_path / "model")) == {*NEEDED, RECORD}

    def test_between_the_two_renames_of_a_replacement(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        old = written(tmp_path / "old", small_model())
        fetch(str(old), tmp_path / "model")
        fetch(str(source), tmp_path / "other")
        (tmp_path / "model").rename(tmp_path / ".model.old")
        (tmp_path / "other").rename(partial_folder(tmp_path / "model"))
        assert fetch(str(source), tmp_path / "model", replace=True).state == "fetched"
        assert set(content_of(tmp_path / "model")) == {*NEEDED, RECORD}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "old", "source"]

    def test_before_the_replaced_folder_is_removed(self, source: Path, fetch: Fetcher, tmp_path: Path) -> None:
        fetch(str(source), tmp_path / "model")
        shutil.copytree(tmp_path / "model", tmp_path / ".model.old")
        assert fetch(str(source), tmp_path / "model").state == "present"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]

    def test_a_replacement_that_fails_leaves_the_old_folder(
        self, source: Path, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = written(tmp_path / "old", small_model())
        fetch(str(old), tmp_path / "model")
        killed_at(monkeypatch, partial_folder(tmp_path / "model"))
        with pytest.raises(Killed):
            fetch(str(source), tmp_path / "model", replace=True)
        record = Record.read(tmp_path / "model")
        assert record is not None
        assert record.source == str(old)


class Killed(BaseException):
    """The end of a process."""


def killed_at(monkeypatch: pytest.MonkeyPatch, renamed: Path) -> None:
    """Ends a fetch where it would rename a folder."""
    rename = os.rename

    def ending(before: Path, after: Path) -> None:
        if before == renamed:
            raise Killed
        rename(before, after)

    monkeypatch.setattr(os, "rename", ending)


def test_a_journal_that_is_torn_is_read_as_far_as_it_goes(source: Path, fetch: Fetcher, tmp_path: Path) -> None:
    place = Place(tmp_path / "model")
    place.partial.mkdir()
    (place.partial / ".outrider-fetch.journal").write_text('{"path": "config.json", "si')
    outcome = fetch(str(source), tmp_path / "model", at_once=1)  # so that config.json follows what is torn
    assert outcome.num_bytes_read == outcome.record.num_bytes, "no file is read twice"


class TestWaiting:
    def test_ends_when_another_process_has_fetched_the_source(
        self, source: Path, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "WAIT_LOOK_S", 0.01)
        words = ["fetch", str(source), str(tmp_path / "model"), "--wait-only"]
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(fetch, str(source), tmp_path / "model")
            done = RUNNER.invoke(app, words)
            fetching.result(timeout=30)
        assert done.exit_code == 0, done.output
        assert "is complete" in done.output

    def test_ends_with_the_reason_when_nobody_does(
        self, source: Path, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(command, "WAIT_LOOK_S", 0.01)
        fetch(str(source), tmp_path / "model")
        words = ["fetch", "hf://org/name@main", str(tmp_path / "model"), "--wait-only", "--max-wait-s", "0.05"]
        done = RUNNER.invoke(app, words)
        assert done.exit_code == 1
        assert "nobody fetched hf://org/name@main" in str(done.exception or done.output)
