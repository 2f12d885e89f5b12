"""Storage of files: a folder, and S3 through a real server (SeaweedFS)."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.access.api_keys import ANYBODY, Caller, Scope
from coordinator.batches import files as files_module
from coordinator.batches.batch_desk import PURPOSE
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.file_store import FileStore, FolderStore, S3Store, one_piece
from outrider.errors import ConfigurationError, InvalidRequest, NotFound, Unavailable
from outrider.local.free_ports import free_ports
from outrider.registry.registry import Registry
from tests.coordinator.batches.desks import EchoLines, created, desk_over, in_pieces, lines, names_in, results, until
from tests.s3_server import s3_environment, s3_server


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@pytest.fixture
async def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store in a bucket of a server that answers."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    store = S3Store("s3://batches/outrider")
    last: Exception | None = None
    for _ in range(120):  # SeaweedFS makes a bucket with its first file, once it has elected its master
        try:
            await store.write("probe", one_piece(b"x"))
            return store
        except Unavailable as error:
            last = error
            await asyncio.sleep(0.25)
    raise AssertionError(f"SeaweedFS does not answer: {last}")


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.thorough)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    if request.param == "s3":
        found: FileStore = request.getfixturevalue("s3")
        return found
    return FolderStore(tmp_path / "files")


async def content_of(store: FileStore, name: str) -> bytes:
    return b"".join([piece async for piece in store.pieces(name)])


class TestStores:
    @pytest.mark.parametrize("num_bytes", [0, 1, 700_000, 9 << 20])
    async def test_return_what_they_were_given(self, store: FileStore, num_bytes: int) -> None:
        content = os.urandom(num_bytes)
        assert await store.write("a/b", in_pieces(content, 100_000)) == num_bytes
        assert await content_of(store, "a/b") == content
        if num_bytes > 9:
            assert await store.read("a/b", 5, 9) == content[5:9]
        assert await store.read("a/b", 9, 9) == b""

    async def test_forget_what_is_deleted(self, store: FileStore) -> None:
        await store.write("a/b", one_piece(b"x"))
        for _ in range(2):
            await store.delete("a/b")
        with pytest.raises(NotFound):
            await store.read("a/b", 0, 1)
        with pytest.raises(NotFound):
            await content_of(store, "a/b")

    async def test_keep_nothing_of_a_write_that_breaks_off(self, store: FileStore) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"x" * 100
            raise InvalidRequest(None, "broken")

        with pytest.raises(InvalidRequest, match="broken"):
            await store.write("a/c", broken())
        with pytest.raises(NotFound):
            await store.read("a/c", 0, 1)

    async def test_take_no_name_that_leaves_them(self, store: FileStore) -> None:
        for name in ("../x", "/x", "a/../x", "", ".x"):
            with pytest.raises(ValueError, match="no name"):
                await store.read(name, 0, 1)


@pytest.mark.thorough
async def test_a_whole_batch_runs_over_s3(registry: Registry, s3: S3Store, tmp_path: Path) -> None:
    desk = desk_over(registry, tmp_path, store=s3)
    batch = await created(desk, lines(20))
    async with BatchRunner(desk, EchoLines(), poll_s=0.05):
        done = await until(desk, batch, lambda found: found.is_over)
    assert sorted(each["custom_id"] for each in await results(desk, done.output_file_id)) == sorted(
        f"r{number}" for number in range(20)
    )


async def test_s3_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(Unavailable, match="S3"):
        await S3Store("s3://bucket").read("a", 0, 1)


@pytest.mark.parametrize("url", ["s3://", "s3:///a", "s3://a?b", "http://a"])
def test_an_address_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="s3://BUCKET/PREFIX"):
        S3Store(url)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--batch-files"):
        FolderStore(tmp_path / "file")


async def test_only_the_owner_of_a_folder_reads_it(tmp_path: Path) -> None:
    await FolderStore(tmp_path / "files").write("a/b", one_piece(b"x"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "files").rglob("*")}
    assert modes == {0o600, 0o700}


class TestFiles:
    async def test_of_a_tenant_are_limited_together(self, registry: Registry, tmp_path: Path) -> None:
        files = desk_over(registry, tmp_path, bytes_max=100).files
        search = Caller("search", frozenset(Scope))
        first = await files.upload(search, "a", PURPOSE, one_piece(b"x" * 60))
        with pytest.raises(InvalidRequest, match="more than 100 bytes"):
            await files.upload(search, "b", PURPOSE, one_piece(b"x" * 60))
        await files.upload(ANYBODY, "b", PURPOSE, one_piece(b"x" * 60))
        assert len(names_in(tmp_path)) == 2, "the refused content is deleted"
        await files.delete(search, first.file_id)
        await files.upload(search, "b", PURPOSE, one_piece(b"x" * 60))

    async def test_of_a_tenant_are_limited_in_number(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files_module, "FILES_MAX", 1)
        files = desk_over(registry, tmp_path).files
        await files.upload(ANYBODY, "a", PURPOSE, one_piece(b"x"))
        with pytest.raises(InvalidRequest, match="1 files"):
            await files.upload(ANYBODY, "b", PURPOSE, one_piece(b"x"))

    async def test_that_have_expired_do_not_count(self, registry: Registry, tmp_path: Path) -> None:
        files = desk_over(registry, tmp_path, bytes_max=100).files
        await files.upload(ANYBODY, "a", PURPOSE, one_piece(b"x" * 60), life_s=0)
        await asyncio.sleep(0.01)
        await files.upload(ANYBODY, "b", PURPOSE, one_piece(b"x" * 60))
        assert [file.filename for file in await files.page(ANYBODY, "", 10, oldest_first=False)] == ["b"]

    async def test_are_listed_in_both_orders(self, registry: Registry, tmp_path: Path) -> None:
        files = desk_over(registry, tmp_path).files
        made = []
        for name in "abc":
            made.append(await files.upload(ANYBODY, name, PURPOSE, one_piece(b"x")))
            await asyncio.sleep(0.002)  # times are in ms
        assert await files.page(ANYBODY, "", 2, oldest_first=True) == made[:2]
        assert await files.page(ANYBODY, made[2].file_id, 5, oldest_first=False) == [made[1], made[0]]
        with pytest.raises(NotFound):
            await files.page(ANYBODY, "file-none", 5, oldest_first=False)

    async def test_belong_to_their_tenant(self, registry: Registry, tmp_path: Path) -> None:
        files = desk_over(registry, tmp_path).files
        file = await files.upload(Caller("search", frozenset(Scope)), "a", PURPOSE, one_piece(b"x"))
        for tenant in (None, "other"):
            with pytest.raises(NotFound):
                await files.get(tenant, file.file_id)
