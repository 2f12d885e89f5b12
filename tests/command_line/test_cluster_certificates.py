"""Certificates in a release's secrets: made once, renewed halfway, by an account that may do nothing else."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from command_line.certificates.cluster import ApiError, Secrets, main, part_of, renew
from k8s.helm.chart import render
from outrider.errors import ConfigurationError
from outrider.security.tls import KeyMaterial, read_folder
from tests.cluster.accounts import Accounts
from tests.cluster.api_server import Store, serving

PARTS: Final = ("coordinator", "target", "draft", "operator", "redis")
NOW: Final = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
ACCOUNT: Final = "outrider-certificates"


def empty() -> Store:
    """The secrets as the chart makes them."""
    return Store({each["metadata"]["name"]: {} for each in render() if each["kind"] == "Secret"})


@asynccontextmanager
async def api_of(store: Store, folder: Path, account: str = ACCOUNT) -> AsyncIterator[Secrets]:
    """A client with the account of a pod, of a server that asks the chart's roles."""
    accounts, objects = Accounts("127.0.0.1"), render()
    folder.mkdir(exist_ok=True)
    for name, content in accounts.files(account).items():
        (folder / name).write_bytes(content)
    may = lambda request: accounts.may(objects, request)  # noqa: E731
    async with serving(lambda: store, tls=accounts.server_tls, may=may) as port:
        yield Secrets(("127.0.0.1", port), folder)


async def renewed(store: Store, folder: Path, now: datetime.datetime = NOW) -> list[str]:
    async with api_of(store, folder) as secrets:
        return await asyncio.to_thread(renew, secrets, "outrider", PARTS, now)


def material(store: Store, part: str, folder: Path) -> KeyMaterial:
    own = folder / part
    own.mkdir(exist_ok=True)
    for name, content in store.secrets[f"outrider-{part}-tls"].items():
        (own / name).write_bytes(content)
    return read_folder(own)


async def test_the_first_run_fills_every_secret_and_the_next_changes_none(tmp_path: Path) -> None:
    store = empty()
    assert await renewed(store, tmp_path) == [*PARTS]
    for part in PARTS:
        found = material(store, part, tmp_path)
        assert f"{part}.outrider.internal" in found.names
        assert found.authorities == store.secrets["outrider-ca"]["ca.crt"]
        assert store.secrets[f"outrider-{part}-tls"].keys() == {"tls.crt", "tls.key", "ca.crt"}
    assert "outrider-redis" in material(store, "redis", tmp_path).names
    assert store.secrets["outrider-ca"].keys() == {"ca.crt", "ca.key"}
    before = {**store.secrets}
    assert await renewed(store, tmp_path, NOW + datetime.timedelta(days=14)) == []
    assert store.secrets == before


async def test_they_are_renewed_halfway_by_the_same_authority(tmp_path: Path) -> None:
    store = empty()
    await renewed(store, tmp_path)
    before = {**store.secrets}
    assert await renewed(store, tmp_path, NOW + datetime.timedelta(days=15)) == [
        "coordinator",
        "target",
        "draft",
        "operator",
    ]
    assert store.secrets["outrider-ca"] == before["outrider-ca"]
    assert store.secrets["outrider-redis-tls"] == before["outrider-redis-tls"], "Redis reads its own at a start only"
    assert store.secrets["outrider-target-tls"]["tls.key"] != before["outrider-target-tls"]["tls.key"]
    assert "redis" in await renewed(store, tmp_path, NOW + datetime.timedelta(days=183))


@pytest.mark.parametrize(
    "damage",
    [{"tls.key": b""}, {"tls.crt": b"no certificate"}, {"ca.crt": b"-"}],
    ids=["key", "certificate", "authority"],
)
async def test_a_damaged_secret_is_made_anew(tmp_path: Path, damage: Mapping[str, bytes]) -> None:
    store = empty()
    await renewed(store, tmp_path)
    store.secrets["outrider-draft-tls"] = {**store.secrets["outrider-draft-tls"], **damage}
    assert await renewed(store, tmp_path) == ["draft"]
    assert "draft.outrider.internal" in material(store, "draft", tmp_path).names


async def test_a_certificate_of_another_part_or_of_another_authority_is_replaced(tmp_path: Path) -> None:
    store, others = empty(), empty()
    await renewed(store, tmp_path)
    await renewed(others, tmp_path)
    store.secrets["outrider-draft-tls"] = store.secrets["outrider-target-tls"]
    store.secrets["outrider-coordinator-tls"] = others.secrets["outrider-coordinator-tls"]
    assert await renewed(store, tmp_path) == ["coordinator", "draft"]


async def test_the_authority_of_another_issuer_is_left_alone(tmp_path: Path) -> None:
    store = empty()
    cert_managers = {"ca.crt": b"a", "tls.crt": b"b", "tls.key": b"c"}
    store.secrets["outrider-ca"] = cert_managers
    with pytest.raises(ConfigurationError, match=r"outrider-ca has ca\.crt, tls\.crt, tls\.key.*tls\.issuer"):
        await renewed(store, tmp_path)
    assert store.secrets["outrider-ca"] == cert_managers
    assert store.secrets["outrider-target-tls"] == {}


async def test_of_two_runs_at_once_one_makes_the_authority(tmp_path: Path) -> None:
    store = empty()
    async with api_of(store, tmp_path) as secrets:
        _, version = await asyncio.to_thread(secrets.get, "outrider-ca")
        await renewed(store, tmp_path / "other")
        made = store.secrets["outrider-ca"]
        with pytest.raises(ApiError, match="409"):
            await asyncio.to_thread(secrets.put, "outrider-ca", {"ca.crt": b"second"}, version)
        assert store.secrets["outrider-ca"] == made


async def test_another_account_is_refused(tmp_path: Path) -> None:
    async with api_of(empty(), tmp_path, "outrider-target") as secrets:
        with pytest.raises(ApiError, match=r"403, no GET of .*/outrider-ca"):
            await asyncio.to_thread(secrets.get, "outrider-ca")


async def test_a_server_that_does_not_answer_names_the_policy_that_may_be_the_cause(tmp_path: Path) -> None:
    async with api_of(empty(), tmp_path) as secrets:
        pass
    with pytest.raises(ApiError, match=r"networkPolicy\.apiServerPorts"):
        await asyncio.to_thread(secrets.get, "outrider-ca")


def test_an_engine_has_both_of_its_names() -> None:
    assert {part_of("engine", "a").role.value, *part_of("engine", "a").names} == {
        *("target.outrider.internal", "coordinator.outrider.internal"),
    }


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no part ray"):
        part_of("ray", "outrider")


def test_outside_of_a_pod_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["outrider", "target"]) == 2
    assert "a pod of Kubernetes" in capsys.readouterr().err
