"""A file of API keys with damage, as a replica's clients and its metrics see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.access import api_keys
from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.service import housekeeping
from outrider.security import watched_files
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(watched_files, "SETTLED_S", 0.0)
    monkeypatch.setattr(housekeeping, "EVERY_S", 0.01)


def gauge(cluster: Cluster) -> float | None:
    return cluster.service.environment.metrics.registry.get_sample_value("outrider_api_keys_degraded")


async def status(cluster: Cluster, key: str) -> int:
    answer = await cluster.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return answer.status_code


async def test_damage_closes_one_key_is_told_by_the_metric_and_ends(clusters: ClusterFactory, tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", [new_key() for _ in range(2)]
    entries = [entry(key, f"t{i}", frozenset({Scope.GENERATE}), None, "") for i, key in enumerate(keys)]
    path.write_text("\n".join(entries))
    async with clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster:
        assert [await status(cluster, key) for key in keys] == [200, 200]
        await eventually(lambda: gauge(cluster) == 0, "all is well", 20.0)
        path.write_text(entries[0] + "\n" + entries[1].replace("[[keys]]", "[[keys]"))
        await eventually(lambda: gauge(cluster) == 1, "nobody had to ask for it to be found", 20.0)
        assert [await status(cluster, key) for key in keys] == [200, 401]
        path.write_text("\n".join(entries))
        await eventually(lambda: gauge(cluster) == 0, "it was mended", 20.0)
        assert [await status(cluster, key) for key in keys] == [200, 200]


async def test_without_a_file_for_too_long_it_is_the_servers_fault_and_not_the_keys(
    clusters: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = tmp_path / "keys.toml", new_key()
    path.write_text(entry(key, "a", frozenset({Scope.GENERATE}), None, ""))
    async with clusters.open([clusters.target()], settings={"api_keys_file": str(path)}) as cluster:
        path.unlink()
        assert await status(cluster, key) == 200
        monkeypatch.setattr(api_keys, "GRACE_S", 0.0)
        answer = await cluster.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert (await cluster.client.get("/livez")).status_code == 200
