"""Redis' users as `k8s/redis_users.sh` makes them, at a real Redis: what each part may, and that it needs no more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from outrider.errors import RegistryUnavailable
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.redis_connection import without_password
from outrider.registry.registry import JournalUpdate, JournalWriter, Registry
from outrider.registry.worker_record import Pool
from tests.coordinator.fakes import record_of

UPDATE = JournalUpdate(JournalWriter("a replica", 1), {"payload": "a prompt"}, 10, 0)
SCRIPT = Path(__file__).parents[2] / "k8s" / "redis_users.sh"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With the URLs of a server that has the users."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    try:
        plain = server.start()
        made = tmp_path_factory.mktemp("users")
        subprocess.run(["sh", SCRIPT, made, "redis://" + plain.rpartition("@")[2].partition("/")[0]], check=True)
        with redis.Redis.from_url(plain) as client:
            for line in (made / "users.conf").read_text().splitlines():
                client.execute_command("ACL", "SETUSER", *line.split()[1:])
        yield made
    finally:
        server.stop()


def url_of(folder: Path, part: str) -> str:
    return (folder / f"url-{part}").read_text().strip()


@pytest.mark.parametrize("pool", ["target", "draft"])
async def test_a_worker_keeps_its_lease_and_sees_nothing_else(folder: Path, pool: Pool) -> None:
    other: Pool = "draft" if pool == "target" else "target"
    worker, coordinator = Registry(url_of(folder, pool)), Registry(url_of(folder, "coordinator"))
    record = record_of(pool, "127.0.0.1:1", "fingerprint")
    try:
        await coordinator.write_journals([("r", UPDATE)])
        assert (await coordinator.exchange_losses(["a"], [])).keys() == {"a"}
        assert await worker.write(record, await worker.join(pool))
        assert [each.worker_id for each in (await coordinator.read(pool)).workers] == [record.worker_id]
        for refused in (
            worker.read(other),
            worker.join(other),
            worker.read_journal("r"),
            worker.write_journals([("r", UPDATE)]),
            worker.exchange_losses([], []),
        ):
            with pytest.raises(RegistryUnavailable, match="no permissions"):
                await refused
        assert await worker.remove(record)
    finally:
        await worker.close()
        await coordinator.close()


def test_nobody_comes_in_without_a_password_and_none_stands_in_the_file(folder: Path) -> None:
    users = (folder / "users.conf").read_text()
    assert "user default off\n" in users
    for part in ("coordinator", "target", "draft"):
        url = url_of(folder, part)
        password = url.partition(f"redis://{part}:")[2].partition("@")[0]
        assert len(password) == 64
        assert password not in users
        assert password not in without_password(url)
        bare = redis.Redis.from_url(url.replace(f"{part}:{password}@", ""))
        with pytest.raises(redis.exceptions.AuthenticationError), bare:
            bare.ping()
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_with_certificates_urls_name_them_where_the_manifests_mount_them(tmp_path: Path) -> None:
    subprocess.run(["sh", SCRIPT, tmp_path], check=True)
    url = url_of(tmp_path, "target")
    assert url.startswith("rediss://target:")
    for name in ("ssl_certfile=/etc/outrider/tls/tls.crt", "ssl_keyfile=/etc/outrider/tls/tls.key", "ca.crt"):
        assert name in url


def test_another_address_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(["sh", SCRIPT, tmp_path, "redis:6379"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "neither" in done.stderr
    assert not list(tmp_path.iterdir())
