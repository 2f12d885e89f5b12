"""`outrider fetch` from the Hub: what is fetched, resumed, compared and refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line.fetch import transfer
from command_line.fetch.record import RECORD, Record
from outrider.errors import ConfigurationError, Unavailable
from tests.command_line.fetch.checkpoints import NEEDED, SHARD_BYTES, SHARDS, sharded_model, small_model
from tests.command_line.fetch.conftest import REPOSITORY, ROOT, Fetcher, content_of
from tests.command_line.fetch.hub_server import SIGNATURE, HubServer, Repository

ADDRESS = f"hf://{REPOSITORY}@main"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait as long as operators do."""
    monkeypatch.setattr(transfer, "pause_s", lambda num_failed, error: 0.01)


def test_what_serving_needs_is_fetched_and_nothing_else(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "model"
    outcome = fetch(ADDRESS, folder)
    files, commit = repository.commits[repository.refs["main"]], repository.refs["main"]
    found = content_of(folder)
    record = Record.read(folder)
    assert found.pop(RECORD)
    assert found == {name: files[name] for name in NEEDED}
    assert {each.path for each in hub.asked + hub.host.asked} == NEEDED, "nothing else is even asked for"
    assert record == outcome.record
    assert (record.source, record.revision) == (ADDRESS, commit)
    assert {file.path: file.sha256 for file in record.files} == {
        name: hashlib.sha256(files[name]).hexdigest() for name in NEEDED
    }
    assert {file.compared for file in record.files} == {"sha256", "git-sha1"}
    assert outcome.num_bytes_read == record.num_bytes == sum(len(files[name]) for name in NEEDED)
    assert fetch.shown.total == (len(NEEDED), record.num_bytes)
    assert fetch.shown.num_bytes == record.num_bytes
    assert any(commit in note for note in fetch.shown.notes), "the commit that main is, is shown"
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing is left beside it"


def test_a_second_run_does_nothing(repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path) -> None:
    fetch(ADDRESS, tmp_path / "model")
    before, requests = content_of(tmp_path / "model"), len(hub.requests)
    outcome = fetch(ADDRESS, tmp_path / "model")
    assert (outcome.state, outcome.num_bytes_read) == ("present", 0)
    assert content_of(tmp_path / "model") == before
    assert len(hub.requests) == requests + 1, "one question: which commit main is"


def test_a_pinned_commit_is_not_even_asked_for(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    address = f"hf://{REPOSITORY}@{repository.refs['main']}"
    fetch(address, tmp_path / "model")
    requests = len(hub.requests)
    assert fetch(address, tmp_path / "model", verify=True).state == "present"
    assert len(hub.requests) == requests
    # A folder that was fetched as main has that commit, too.
    fetch(ADDRESS, tmp_path / "main")
    requests = len(hub.requests)
    assert fetch(address, tmp_path / "main").state == "present"
    assert len(hub.requests) == requests


def test_a_file_that_breaks_off_goes_on_where_it_ended(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.host.faults.break_after = {SHARDS[0]: 2 << 20, SHARDS[1]: 100_000}
    fetch(ADDRESS, tmp_path / "model")
    size = len(repository.commits[repository.refs["main"]][SHARDS[0]])
    for shard in SHARDS:
        first, second = hub.host.starts(shard)
        assert first == 0 < second
        assert hub.host.sent(shard) < size + (64 << 10), "no byte is sent twice, but for what was on its way"
    assert any("goes on at 67%" in note for note in fetch.shown.notes)


def test_what_an_earlier_run_left_is_not_sent_again(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "TRIES_MAX", 1)
    hub.host.faults.break_after = {SHARDS[0]: 512 << 10}
    with pytest.raises(Unavailable, match=f"{SHARDS[0]}.*the same command goes on"):
        fetch(ADDRESS, tmp_path / "model", at_once=1)
    assert not (tmp_path / "model").exists()
    (part,) = (tmp_path / ".model.partial").glob("*.part")
    kept, sent = part.stat().st_size, len(hub.host.asked)
    assert 0 < kept <= 512 << 10
    outcome = fetch(ADDRESS, tmp_path / "model")
    assert [each.start for each in hub.host.asked[sent:] if each.path == SHARDS[0]] == [kept]
    assert outcome.num_bytes_read < outcome.record.num_bytes - kept + 1
    assert hub.starts("config.json") == [0], "a file that was whole is not asked for again"
    assert fetch(ADDRESS, tmp_path / "model", verify=True).state == "present"


def test_what_an_earlier_run_left_damaged_is_fetched_anew(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that lost its power leaves it."""
    monkeypatch.setattr(transfer, "TRIES_MAX", 1)
    hub.host.faults.break_after = {SHARDS[0]: 512 << 10}
    with pytest.raises(Unavailable):
        fetch(ADDRESS, tmp_path / "model", at_once=1)
    (part,) = (tmp_path / ".model.partial").glob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    fetch(ADDRESS, tmp_path / "model")
    assert any("fetched anew" in note for note in fetch.shown.notes)
    files = repository.commits[repository.refs["main"]]
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_a_file_with_wrong_bytes_is_refused_by_name(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.host.faults.corrupt[SHARDS[1]] = 1
    with pytest.raises(ConfigurationError, match=f"{SHARDS[1]} has the sha256"):
        fetch(ADDRESS, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not list((tmp_path / ".model.partial").glob(f"{SHARDS[1]}*")), "wrong bytes are not kept"
    assert fetch(ADDRESS, tmp_path / "model").state == "fetched"


def test_a_description_with_wrong_bytes_is_refused_by_name(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.faults.corrupt["tokenizer.json"] = 1
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json has the git-sha1"):
        fetch(ADDRESS, tmp_path / "model")


def test_a_server_without_ranges_is_read_from_the_start(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.host.faults.has_ranges = False
    hub.host.faults.break_after = {SHARDS[0]: 2 << 20}
    fetch(ADDRESS, tmp_path / "model")
    files = repository.commits[repository.refs["main"]]
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_a_busy_server_is_asked_again_and_a_dead_one_not_for_ever(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.host.faults.busy[SHARDS[0]] = 3
    assert fetch(ADDRESS, tmp_path / "model").state == "fetched"
    hub.host.faults.busy[SHARDS[0]] = 1000
    with pytest.raises(Unavailable, match=f"{SHARDS[0]}: .* answers 503; given up after {transfer.TRIES_MAX} tries"):
        fetch(ADDRESS, tmp_path / "other")
    assert hub.host.faults.busy[SHARDS[0]] == 1000 - transfer.TRIES_MAX


def test_a_gated_repository_says_where_to_ask(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.readers = frozenset({"hf_granted"})
    with pytest.raises(ConfigurationError, match=rf"gated \(401\): ask for access at {hub.url}/{REPOSITORY}.*HF_TOKEN"):
        fetch(ADDRESS, tmp_path / "model")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(ConfigurationError, match=r"gated \(403\): .* with the account of the token") as refused:
        fetch(ADDRESS, tmp_path / "model")
    assert "hf_stranger" not in str(refused.value)
    assert not (tmp_path / "model").exists()
    monkeypatch.delenv("HF_TOKEN")
    file = tmp_path / "token"
    file.write_text("hf_granted\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(file))
    monkeypatch.setenv("HF_TOKEN_PATH", str(file))
    assert fetch(ADDRESS, tmp_path / "model").state == "fetched"
    assert not [each for each in hub.host.asked if "authorization" in each.headers], "the token stays with the Hub"
    assert all(each.headers["authorization"] == "Bearer hf_granted" for each in hub.asked)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"HF_TOKEN_PATH=.*nowhere cannot be read"):
        fetch(ADDRESS, tmp_path / "other")


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("hf://some-org/unknown@main", None, r"knows no such model \(401\).*misspelt.*HF_TOKEN is not set"),
        ("hf://some-org/unknown@main", "hf_x", r"knows no such model \(404\).*the token has no access"),
        (f"hf://{REPOSITORY}@v9", None, f"no such revision; .*/{REPOSITORY}/commits/main"),
        ("hf://gpt2@main", None, "write hf://ORG/NAME@REVISION"),
        ("hf://a/b/c@main", None, "write hf://ORG/NAME@REVISION"),
        ("ftp://a/b", None, "only hf://, s3:// and gs://"),
    ],
)
def test_errors_name_the_way_out(
    repository: Repository,
    fetch: Fetcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    token: str | None,
    words: str,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigurationError, match=words):
        fetch(address, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_address_without_a_revision_is_refused_with_the_commit_to_write(
    repository: Repository, fetch: Fetcher, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"write hf://{REPOSITORY}@{repository.refs['main']}, which main is"):
        fetch(f"hf://{REPOSITORY}", tmp_path / "model")


def test_offline_mode_is_named_where_something_is_missing(
    repository: Repository, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = f"hf://{REPOSITORY}@{repository.refs['main']}"
    fetch(pinned, tmp_path / "complete")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "not-mounted"))
    assert fetch(pinned, tmp_path / "complete").state == "present"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        fetch(ADDRESS, tmp_path / "model")
    assert fetch(pinned, tmp_path / "complete").state == "present"
    assert fetch(ADDRESS, tmp_path / "complete").state == "present"
    assert any("is used as it was fetched" in note for note in fetch.shown.notes)


def test_a_revision_that_moves_is_left_alone_until_replaced(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    first = repository.refs["main"]
    fetch(ADDRESS, tmp_path / "model")
    files = sharded_model()
    second = repository.commit(files)
    assert fetch(ADDRESS, tmp_path / "model").record.revision == first
    assert any(second in note and "--replace" in note for note in fetch.shown.notes)
    outcome = fetch(ADDRESS, tmp_path / "model", replace=True)
    assert (outcome.state, outcome.record.revision) == ("fetched", second)
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]
    assert fetch(ADDRESS, tmp_path / "model", replace=True).state == "present", "--replace may stay in a manifest"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    # A commit that changes nothing that is served is no new version.
    repository.commit(files | {"README.md": b"# New words"})
    assert fetch(ADDRESS, tmp_path / "model", replace=True).state == "present"


def test_a_revision_that_moves_during_a_fetch_changes_nothing(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are asked for by commit; and the next run keeps of the first what both commits have."""
    monkeypatch.setattr(transfer, "TRIES_MAX", 1)
    old = repository.commits[repository.refs["main"]]
    hub.host.faults.break_after = {SHARDS[1]: 512 << 10}
    with pytest.raises(Unavailable):
        fetch(ADDRESS, tmp_path / "model", at_once=1)
    assert hub.host.starts(SHARDS[0]) == [0]
    new = sharded_model()
    second = repository.commit(new | {SHARDS[0]: old[SHARDS[0]]})
    assert fetch(ADDRESS, tmp_path / "model").record.revision == second
    assert hub.host.starts(SHARDS[0]) == [0], "the same file of another commit is not fetched again"
    assert hub.host.starts(SHARDS[1]) == [0, 0], "another file of the same name is not continued"
    assert (tmp_path / "model" / SHARDS[1]).read_bytes() == new[SHARDS[1]]


def test_another_model_in_the_folder_is_replaced_only_when_asked(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(ADDRESS, tmp_path / "model")
    hub.add("some-org/other", small_model())
    with pytest.raises(ConfigurationError, match=rf"has {ADDRESS} at \w+, and not hf://some-org/other@main.*--replace"):
        fetch("hf://some-org/other@main", tmp_path / "model")
    hub.host.faults.corrupt["model.safetensors"] = 1
    with pytest.raises(ConfigurationError, match="has the sha256"):
        fetch("hf://some-org/other@main", tmp_path / "model", replace=True)
    assert fetch(ADDRESS, tmp_path / "model", verify=True).state == "present", "the old one is there until then"
    fetch("hf://some-org/other@main", tmp_path / "model", replace=True)
    assert set(content_of(tmp_path / "model")) == {*small_model(), RECORD}


def test_a_damaged_folder_is_found_and_replaced(repository: Repository, fetch: Fetcher, tmp_path: Path) -> None:
    fetch(ADDRESS, tmp_path / "model")
    shard = tmp_path / "model" / SHARDS[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fetch(ADDRESS, tmp_path / "model").state == "present", "sizes do not show it"
    with pytest.raises(ConfigurationError, match=f"damaged: {SHARDS[0]} has another sha256.*--replace"):
        fetch(ADDRESS, tmp_path / "model", verify=True)
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigurationError, match=f"damaged: {SHARDS[0]} has {len(content) - 1} of {len(content)}"):
        fetch(ADDRESS, tmp_path / "model")
    assert fetch(ADDRESS, tmp_path / "model", replace=True).state == "fetched"
    assert shard.read_bytes() == content


def test_a_hub_that_cannot_be_reached_keeps_no_pod_from_starting(
    repository: Repository, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(ADDRESS, tmp_path / "model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(ADDRESS, tmp_path / "model").state == "present"
    assert any("cannot be reached" in note and "is used as it was fetched" in note for note in fetch.shown.notes)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1 cannot be reached"):
        fetch(ADDRESS, tmp_path / "other")


def test_a_repository_without_safetensors_is_refused_before_anything_is_fetched(
    hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    hub.add("some-org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ConfigurationError, match=r"no safetensors weights, only pickled weights.*Nothing was fetched"):
        fetch("hf://some-org/pickles@main", tmp_path / "model")
    assert not hub.asked
    assert not hub.host.asked


def test_a_shard_that_the_repository_lacks_is_named_before_weights_are_fetched(
    hub: HubServer, fetch: Fetcher, tmp_path: Path
) -> None:
    files = sharded_model()
    del files[SHARDS[1]]
    hub.add(REPOSITORY, files)
    with pytest.raises(ConfigurationError, match=f"lacks 1 of the 2 files of weights.*{SHARDS[1]}"):
        fetch(ADDRESS, tmp_path / "model")
    assert not hub.host.asked


def test_weights_that_do_not_fit_together_are_refused(hub: HubServer, fetch: Fetcher, tmp_path: Path) -> None:
    """Uploaded so: the checksums are right."""
    files = sharded_model()
    hub.add(REPOSITORY, files | {SHARDS[1]: files[SHARDS[1]][:-5]})
    with pytest.raises(ConfigurationError, match=f"{SHARDS[1]} has .* bytes, and its header promises .*cut off"):
        fetch(ADDRESS, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_full_disk_is_noticed_before_weights_are_fetched(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 64 * 1024 * 1024 + SHARD_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(ConfigurationError, match=r"has room for 0\.1 GB"):
        fetch(ADDRESS, tmp_path / "model")
    assert not hub.host.asked


def test_an_answer_of_something_else_is_refused(
    hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_describe", lambda handler, *_: hub.send_content(handler, "x", b"<html>"))
    hub.add(REPOSITORY, small_model())
    with pytest.raises(ConfigurationError, match="is a proxy between"):
        fetch(ADDRESS, tmp_path / "model")


def test_nothing_secret_is_in_notes_and_errors(
    repository: Repository, hub: HubServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.host.faults.break_after = {SHARDS[0]: 100_000, SHARDS[1]: 2 << 20}
    hub.host.faults.busy[SHARDS[1]] = 1
    fetch(ADDRESS, tmp_path / "model")
    told = " ".join([*fetch.shown.notes, (tmp_path / "model" / RECORD).read_text()])
    assert "hf_secret" not in told
    assert SIGNATURE not in told
    assert "?" not in told


@pytest.mark.thorough
def test_the_hub_of_these_tests_is_one_to_huggingface_hub_which_compares_no_checksums(
    repository: Repository, hub: HubServer, tmp_path: Path
) -> None:
    """If this fails because the checksum is compared, `command_line/fetch/hub.py` has one reason less."""
    hub.host.faults.corrupt[SHARDS[0]] = 1
    code = (
        "import json, sys, huggingface_hub as h\n"
        f"info = h.HfApi().model_info('{REPOSITORY}', revision='main', files_metadata=True)\n"
        f"h.snapshot_download('{REPOSITORY}', revision='main', local_dir=sys.argv[1])\n"
        "print(json.dumps([info.sha, {s.rfilename: s.lfs.sha256 for s in info.siblings if s.lfs}]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "theirs")], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=60, env={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PATH": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    commit, checksums = json.loads(result.stdout.splitlines()[-1])
    assert commit == repository.refs["main"]
    files = repository.commits[commit]
    assert checksums[SHARDS[0]] == hashlib.sha256(files[SHARDS[0]]).hexdigest()
    theirs = (tmp_path / "theirs" / SHARDS[0]).read_bytes()
    assert len(theirs) == len(files[SHARDS[0]])
    assert theirs != files[SHARDS[0]]
