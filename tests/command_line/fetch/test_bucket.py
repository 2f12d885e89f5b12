"""`outrider fetch` from buckets: S3 through a real server, and faults of both providers through a pretended one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from command_line.fetch import bucket as bucket_module
from command_line.fetch import transfer
from command_line.fetch.record import RECORD
from command_line.fetch.sources import CHUNK_BYTES
from outrider.buckets import open_bucket
from outrider.errors import ConfigurationError, Unavailable
from tests.command_line.fetch.bucket_server import BucketServer
from tests.command_line.fetch.checkpoints import NEEDED, SHARDS, sharded_model, small_model
from tests.command_line.fetch.conftest import Fetcher, content_of
from tests.s3_server import s3_environment, s3_server

PREFIX = "models/some/model"


@pytest.fixture(params=["s3", "gs"])
def address(request: pytest.FixtureRequest) -> str:
    return f"{request.param}://{PREFIX}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """A server to which both kinds of addresses lead."""
    made = BucketServer()
    for name, value in s3_environment(made.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_BASE_URL", made.url)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    monkeypatch.setattr(transfer, "pause_s", lambda num_failed, error: 0.01)
    with made.running():
        yield made


def test_what_serving_needs_is_fetched(address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path) -> None:
    files = sharded_model()
    server.put(PREFIX, files)
    server.put("models/some/model-2", small_model())  # another prefix that begins alike
    outcome = fetch(address, tmp_path / "model")
    found = content_of(tmp_path / "model")
    del found[RECORD]
    assert found == {name: files[name] for name in NEEDED}
    assert outcome.record.revision is None
    assert {file.compared for file in outcome.record.files} == {"md5"}
    assert {each.path.removeprefix(f"{PREFIX}/") for each in server.asked} == NEEDED
    asked = len(server.asked)
    assert fetch(address, tmp_path / "model").state == "present"
    assert {each.path for each in server.asked[asked:]} <= {f"{PREFIX}/config.json"}


def test_a_file_that_breaks_off_goes_on_where_it_ended(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path
) -> None:
    files = sharded_model()
    server.put(PREFIX, files)
    server.faults.break_after = {f"{PREFIX}/{SHARDS[0]}": 2 << 20}
    fetch(address, tmp_path / "model")
    path = f"{PREFIX}/{SHARDS[0]}"
    first, second = server.starts(path)
    assert first == 0 < second
    assert server.sent(path) <= len(files[SHARDS[0]]) + CHUNK_BYTES
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_a_large_file_is_read_in_pieces(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 1 << 20)
    files = sharded_model()
    server.put(PREFIX, files)
    fetch(address, tmp_path / "model")
    assert server.starts(f"{PREFIX}/{SHARDS[0]}") == [at << 20 for at in range(4)]
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_wrong_bytes_are_refused_by_name(address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path) -> None:
    server.put(PREFIX, sharded_model())
    server.faults.corrupt[f"{PREFIX}/{SHARDS[1]}"] = 1
    with pytest.raises(ConfigurationError, match=f"{SHARDS[1]} has the md5"):
        fetch(address, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_tags_that_are_no_checksums_are_not_taken_for_some(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path
) -> None:
    """As where a customer's key encrypts, or objects were uploaded in parts."""
    server.put(PREFIX, sharded_model())
    for name in server.objects:
        server.tags[name] = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
    assert {file.compared for file in fetch(address, tmp_path / "one").record.files} == {"size"}
    server.tags = {f"{PREFIX}/{shard}": f"{'0' * 32}-7" for shard in SHARDS}
    record = fetch(address, tmp_path / "other").record
    assert {file.path for file in record.files if file.compared == "size"} == set(SHARDS)


def test_a_record_that_was_uploaded_with_the_files_is_compared(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path
) -> None:
    server.put(PREFIX, sharded_model())
    fetch(address, tmp_path / "model")
    server.put("models/copy", content_of(tmp_path / "model"))
    server.tags = dict.fromkeys(server.objects, f"{'0' * 32}-7")
    copy = address.replace(PREFIX, "models/copy")
    assert {file.compared for file in fetch(copy, tmp_path / "copy").record.files} == {"sha256"}
    server.faults.corrupt[f"models/copy/{SHARDS[0]}"] = 1
    with pytest.raises(ConfigurationError, match=f"{SHARDS[0]} has the sha256"):
        fetch(copy, tmp_path / "other")


def test_an_object_that_changes_meanwhile_is_noticed(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(PREFIX, sharded_model())
    listed = bucket_module.BucketSource.list_files

    def list_and_change(source: bucket_module.BucketSource) -> object:
        found = listed(source)
        server.put(PREFIX, {SHARDS[0]: sharded_model()[SHARDS[0]]})
        return found

    monkeypatch.setattr(bucket_module.BucketSource, "list_files", list_and_change)
    with pytest.raises(ConfigurationError, match=f"{SHARDS[0]} was changed while it was fetched"):
        fetch(address, tmp_path / "model")


def test_a_bucket_that_changes_is_left_alone_until_replaced(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path
) -> None:
    server.put(PREFIX, sharded_model())
    fetch(address, tmp_path / "model")
    files = sharded_model()
    server.put(PREFIX, files)
    assert fetch(address, tmp_path / "model").state == "present"
    assert any("other files now" in note and "--replace" in note for note in fetch.shown.notes)
    assert fetch(address, tmp_path / "model", replace=True).state == "fetched"
    assert (tmp_path / "model" / SHARDS[0]).read_bytes() == files[SHARDS[0]]


def test_errors_name_the_way_out(address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no files; are bucket and prefix right"):
        fetch(address, tmp_path / "model")
    server.is_forbidden = True
    with pytest.raises(ConfigurationError, match="may not be read with these credentials") as refused:
        fetch(address, tmp_path / "model")
    assert "test-secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"):
        fetch("s3://", tmp_path / "model")


def test_a_prefix_of_something_else_is_refused(
    address: str, server: BucketServer, fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "FILES_MAX", 5)
    server.put(PREFIX, sharded_model())
    with pytest.raises(ConfigurationError, match="more than 5 files; name the folder of one model"):
        fetch(address, tmp_path / "model")


@pytest.mark.thorough
async def test_a_model_comes_from_a_real_s3(
    fetch: Fetcher, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sharded_model()
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        address = f"s3://{PREFIX}"
        bucket = open_bucket(address, address, ("s3",), timedelta(seconds=30))
        last: Exception | None = None
        for _ in range(120):  # SeaweedFS makes a bucket with its first file, once it has elected its master
            try:
                for name, content in files.items():
                    bucket.obstore.put(bucket.store, name, content)
                break
            except (bucket.errors.BaseError, OSError) as error:
                last = error
                await asyncio.sleep(0.25)
        else:
            raise AssertionError(f"SeaweedFS does not answer: {last}")
        outcome = fetch(address, tmp_path / "model")
        found = content_of(tmp_path / "model")
        del found[RECORD]
        assert found == {name: files[name] for name in NEEDED}
        assert {file.compared for file in outcome.record.files} == {"md5"}
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
        with pytest.raises(ConfigurationError, match="may not be read with these credentials"):
            fetch(address, tmp_path / "other")


@pytest.mark.thorough
def test_a_server_that_does_not_answer_is_given_up(
    fetch: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transfer, "TRIES_MAX", 1)
    with pytest.raises(Unavailable, match=f"s3://{PREFIX}"):
        fetch(f"s3://{PREFIX}", tmp_path / "model")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token", "needs credentials, and there are none"),
        (
            "Error performing GET http://metadata.google.internal/computeMetadata",
            "needs credentials, and there are none",
        ),
        (
            "GET https://x/y?X-Amz-Signature=abc - Server returned non-2xx status code: 400 Bad Request",
            r"https://x/y\?… ",
        ),
    ],
)
def test_errors_that_no_retry_cures_are_the_operators(
    server: BucketServer, words: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bucket_module.BucketSource(f"s3://{PREFIX}")
    errors = open_bucket(source.address, source.address, ("s3",), timedelta(seconds=1)).errors

    def refuse(*_: object) -> None:
        raise errors.GenericError(f"{words}\n\nDebug source: X-Amz-Signature=abc")

    monkeypatch.setattr("obstore.list", refuse)
    with pytest.raises(ConfigurationError, match=told) as refused:
        source.list_files()
    assert "abc" not in str(refused.value)
