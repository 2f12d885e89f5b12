"""The embedded Redis: a real server that needs nothing and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from outrider.errors import ConfigurationError
from outrider.local import redis_server
from outrider.local.redis_server import EmbeddedRedis


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def wait_until(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_it_serves_where_its_url_says_and_stops(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    pid = server.pid
    assert pid is not None
    assert url.startswith("redis://:")
    assert "@127.0.0.1:" in url
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
        assert client.get("key") == b"value"
    server.stop()
    assert not is_alive(pid)
    server.stop()


def test_who_knew_an_earlier_start_gets_in_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    password = server.start().partition("@")[0]
    server.stop()
    try:
        assert server.start().partition("@")[0] == password
    finally:
        server.stop()


def test_nobody_gets_in_without_the_password(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    try:
        with (
            redis.Redis.from_url("redis://" + url.partition("@")[2]) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
        assert url.split(":")[2].partition("@")[0] not in Path(f"/proc/{server.pid}/cmdline").read_text()
    finally:
        server.stop()


def test_it_keeps_nothing_on_disk_but_its_log(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with redis.Redis.from_url(server.start()) as client:
        client.set("key", "value")
    server.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time; from outrider.local.redis_server import EmbeddedRedis; "
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start(); "
        "print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until(lambda: not is_alive(pid)), "the server outlived its parent"


def test_a_missing_binary_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="OUTRIDER_REDIS_URL"):
        redis_server.find_redis_server()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(redis_server, "find_redis_server", lambda: broken)
    with pytest.raises(ConfigurationError, match="out of luck"):
        EmbeddedRedis(tmp_path).start()
