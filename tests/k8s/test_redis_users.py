"""Redis' users as `k8s/redis_users.sh` makes them, at a real Redis: what each part may, and that it needs no more."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from k8s.helm.chart import render
from outrider.errors import RegistryUnavailable
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.redis_connection import without_password
from outrider.registry.registry import ENDED_AT_ONCE_MAX, WORKERS_MAX, JournalUpdate, JournalWriter, Registry
from outrider.registry.worker_record import Pool
from tests.coordinator.fakes import record_of
from tests.k8s.test_manifests import first

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
            client.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "+@all", "~*")
        (made / "url-admin").write_text(f"redis://admin:admin@{plain.rpartition('@')[2]}")
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


OLD_HEARTBEAT = """
redis.call('SET', KEYS[1], redis.call('GET', KEYS[1]) or redis.call('TIME')[1])
return redis.call('ZADD', KEYS[2], 1, 'a')
"""
"""A script as workers of the previous release run."""
FORBIDDEN = [
    # It may run for ever, and Redis answers nobody else meanwhile.
    *("EVAL 'return 1' 0", "EVALSHA {sha} 0", "SCRIPT LOAD 'return 1'", "SCRIPT FLUSH", "SCRIPT KILL"),
    # Goes through everything, or through all of a key that may hold anything.
    *("KEYS *", "SCAN 0", "RANDOMKEY", "SORT {{or:POOL}}:k", "DBSIZE", "HGETALL {{or:POOL}}:k", "LCS {{or:POOL}}:k a"),
    *("ZRANGE {{or:POOL}}:k 0 -1", "ZUNIONSTORE {{or:POOL}}:k 1 {{or:POOL}}:k", "SMEMBERS {{or:POOL}}:k"),
    # Is for administrators, or touches others.
    *("CONFIG GET *", "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT PAUSE 100", "DEBUG SLEEP 1", "SHUTDOWN", "MONITOR"),
    *("FLUSHALL", "SWAPDB 0 1", "ACL LIST", "SLAVEOF localhost 1", "MODULE LIST", "BGSAVE", "OBJECT HELP"),
    # Is heard by all, or waits.
    *("PUBLISH c x", "SUBSCRIBE c", "PSUBSCRIBE *", "BLPOP {{or:POOL}}:k 0", "WAIT 1 0", "XREAD BLOCK 0 STREAMS k $"),
    # Another pool, a stream of a client.
    *("HGET {{or:OTHER}}:w:a x", "HGET or:journal:r payload", "SET {{or:POOL}}:k x", "SETRANGE {{or:POOL}}:k 9 x"),
]  # fmt: skip


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_a_worker_may_do_nothing_that_stops_redis_for_others(folder: Path, pool: Pool) -> None:
    other = "draft" if pool == "target" else "target"
    with redis.Redis.from_url(url_of(folder, "coordinator")) as coordinator:
        sha = coordinator.script_load("return 1")
    permitted = []
    with redis.Redis.from_url(url_of(folder, pool)) as worker:
        for command in FORBIDDEN:
            words = command.format(sha=sha).replace("POOL", pool).replace("OTHER", other)
            try:
                worker.execute_command(*shlex.split(words))
            except redis.exceptions.NoPermissionError:
                continue
            except redis.exceptions.ResponseError as error:
                if "unknown command" in str(error).lower():  # of a newer Redis
                    continue
            permitted.append(command)
    assert not permitted


async def test_a_worker_needs_every_command_that_it_may_use_and_no_other(folder: Path) -> None:
    users = (folder / "users.conf").read_text()
    (allowed,) = re.findall(r"user target .* -@all (.*) ~", users)
    with redis.Redis.from_url(url_of(folder, "admin")) as admin:
        admin.config_resetstat()
        worker = Registry(url_of(folder, "target"))
        record = record_of("target", "127.0.0.1:1", "fingerprint")
        try:
            await worker.ping()
            joined = await worker.join("target")
            assert await worker.write(record, joined)
            assert await worker.write(replace(record, state="draining"), joined)
            assert not await worker.write(replace(record, incarnation="b"), joined)
            assert await worker.remove(record)
        finally:
            await worker.close()
        used = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
    spare = {"select", "discard"}  # of another database, and of an error between MULTI and EXEC
    assert {word.removeprefix("+") for word in allowed.split()} - spare == used - {
        "auth",
        "hello",
        "config",
        "client",
        "info",
    }


async def test_workers_keep_their_leases_whatever_scripts_redis_has(folder: Path) -> None:
    """It has none after a restart, and a worker may load none."""
    worker, coordinator = Registry(url_of(folder, "target")), Registry(url_of(folder, "coordinator"))
    record = record_of("target", "127.0.0.1:1", "fingerprint")
    try:
        with redis.Redis.from_url(url_of(folder, "admin")) as admin:
            for _ in range(2):
                admin.flushall()
                admin.script_flush()
                assert await worker.write(record, await worker.join("target"))
                assert [each.worker_id for each in (await coordinator.read("target")).workers] == [record.worker_id]
    finally:
        await worker.close()
        await coordinator.close()


async def test_what_a_worker_writes_keeps_nobody_else_waiting(folder: Path) -> None:
    """A coordinator reads a pool in a script: however much a worker writes there, the script reads a bounded part."""
    worker, coordinator = Registry(url_of(folder, "target")), Registry(url_of(folder, "coordinator"))
    honest = record_of("target", "127.0.0.1:1", "fingerprint")
    soon_ms = int(time.time() * 1000) + 3_600_000
    try:
        with redis.Redis.from_url(url_of(folder, "target")) as hostile:
            for first in range(0, 20_000, 1000):
                ids = range(first, first + 1000)
                hostile.zadd("{or:target}:leases", {f"live-{each}": soon_ms for each in ids})
                hostile.zadd("{or:target}:leases", {f"ended-{each}": 1 for each in ids})
            hostile.hset("{or:target}:w:live-19999", mapping={f"f{each}": "x" for each in range(10_000)})
        assert await worker.write(honest, await worker.join("target"))
        with redis.Redis.from_url(url_of(folder, "admin")) as admin:
            admin.config_resetstat()
            assert not (await coordinator.read("target")).unreadable, "a record of 10,000 fields is not read"
            calls = {name: each["calls"] for name, each in admin.info("commandstats").items()}
            assert calls["cmdstat_hlen"] == WORKERS_MAX
            assert calls["cmdstat_zrem"] == ENDED_AT_ONCE_MAX
            admin.flushall()
    finally:
        await worker.close()
        await coordinator.close()


def test_an_upgrade_may_leave_old_workers_their_scripts(folder: Path) -> None:
    secret = first(render({"redis": {"allowWorkerScripts": True}}), "Secret", "redis")["stringData"]
    _, rules = re.findall(r"^user (target|draft) (.*)$", secret["users.conf"], re.MULTILINE)[0]
    with redis.Redis.from_url(url_of(folder, "admin")) as admin:
        admin.execute_command("ACL", "SETUSER", "old", *rules.split(), ">old")
        sha = admin.script_load(OLD_HEARTBEAT)
    with redis.Redis.from_url(url_of(folder, "admin").replace("admin:admin", "old:old")) as old:
        assert old.evalsha(sha, 2, "{or:target}:joined", "{or:target}:leases")
        assert old.script_load(OLD_HEARTBEAT) == sha
        with pytest.raises(redis.exceptions.NoPermissionError):
            old.eval("return 1", 0)


def test_the_chart_makes_the_same_users(folder: Path) -> None:
    secret = first(render({"tls": {"enabled": False}}), "Secret", "redis")["stringData"]
    found, made = (
        re.sub("#[0-9a-f]{64}", "#", text).strip().splitlines()
        for text in (secret["users.conf"], (folder / "users.conf").read_text())
    )
    assert found == made


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
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir() if path.name != "url-admin")


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
