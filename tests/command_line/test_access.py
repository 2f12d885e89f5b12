"""Doors do not stand open by mistake: whoever listens beyond this machine says how it is closed, or that it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command_line import app
from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.start.deployment import Deployment, coordinator_spec
from command_line.start.preflight import check_access
from coordinator.__main__ import main as coordinator_main
from coordinator.access.api_keys import KeyFile
from coordinator.hosting.app import application
from outrider.errors import ConfigurationError
from outrider.security.tls import Role, TlsFiles, check_worker_id, worker_name
from outrider.settings import SettingError
from outrider.worker.worker_options import WorkerOptions


def serve(host: str, *, is_insecure: bool) -> None:
    check_access(Deployment(DEMO_TARGET, DEMO_DRAFT, host=host, is_insecure=is_insecure))


def work(host: str, *, is_insecure: bool) -> None:
    WorkerOptions(host, 0, None, 0, "w", 1.0, is_insecure=is_insecure)


@pytest.mark.parametrize("start", [serve, work])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7"])
def test_a_door_does_not_stand_open_by_mistake(start: Callable[..., None], host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"lets whoever reaches it in.*--insecure"):
        start(host, is_insecure=False)
    start(host, is_insecure=True)
    for own in ("127.0.0.1", "::1", "localhost"):
        start(own, is_insecure=False)


def test_nor_the_coordinators(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokenizer", str(DEMO_TARGET), "--redis-url", "redis://127.0.0.1:1/0", "--host", "0.0.0.0"]
    with pytest.raises(SystemExit):
        coordinator_main(words)
    assert "without --api-keys lets whoever reaches it in" in capsys.readouterr().err


def test_keys_that_come_in_the_clear_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    words = ["--tokenizer", str(DEMO_TARGET), "--redis-url", "redis://127.0.0.1:1/0", "--redis-wait-s", "0"]
    words += ["--api-keys", str(keys)]
    assert coordinator_main([*words, "--host", "0.0.0.0"]) == 1  # there is no Redis
    assert "keys and texts come to 0.0.0.0 in the clear" in capsys.readouterr().err
    assert coordinator_main(words) == 1
    assert "in the clear" not in capsys.readouterr().err


def test_nor_that_of_a_serve_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEYS", raising=False)
    monkeypatch.delenv("OUTRIDER_INSECURE", raising=False)
    url = tmp_path / "url"
    url.write_text("redis://:secret@redis:6379/0\n")
    monkeypatch.setenv("OUTRIDER_REDIS_URL_FILE", str(url))
    arguments = {"tokenizer_dir": str(DEMO_TARGET)}
    with pytest.raises(ValueError, match="whoever reaches the coordinator may ask"):
        application(arguments)
    monkeypatch.setenv("OUTRIDER_INSECURE", "1")
    application(arguments)
    monkeypatch.delenv("OUTRIDER_INSECURE")
    monkeypatch.setenv("OUTRIDER_API_KEYS", str(tmp_path / "keys.toml"))
    application(arguments)
    monkeypatch.setenv("OUTRIDER_REQUIRE_WORKER_IDS", "1")
    with pytest.raises(ValueError, match="require_worker_ids needs tls_dir"):
        application(arguments)
    monkeypatch.delenv("OUTRIDER_REQUIRE_WORKER_IDS")
    monkeypatch.setenv("OUTRIDER_REDIS_URL_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="none cannot be read"):
        application(arguments)


ISSUER = "https://login.example.com/realms/main"


def test_an_identity_provider_closes_the_door_as_keys_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check_access(Deployment(DEMO_TARGET, DEMO_DRAFT, host="0.0.0.0", oidc_issuer=ISSUER, oidc_audience="outrider"))
    words = ["--tokenizer", str(DEMO_TARGET), "--redis-url", "redis://127.0.0.1:1/0", "--oidc-issuer", ISSUER]
    with pytest.raises(SystemExit):
        coordinator_main(words)
    assert "--oidc-issuer needs --oidc-audience" in capsys.readouterr().err
    assert coordinator_main([*words, "--host", "0.0.0.0", "--oidc-audience", "outrider"]) == 1  # there is no Redis
    assert "keys and texts come to 0.0.0.0 in the clear" in capsys.readouterr().err
    missing = ["--oidc-audience", "outrider", "--oidc-ca-file", str(tmp_path / "ca.crt")]
    assert coordinator_main([*words, *missing]) == 1
    assert "ca.crt cannot be read" in capsys.readouterr().err
    monkeypatch.delenv("OUTRIDER_API_KEYS", raising=False)
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://redis:6379/0")
    arguments = {"tokenizer_dir": str(DEMO_TARGET)}
    application(arguments | {"oidc_issuer": ISSUER, "oidc_audience": "outrider"})
    monkeypatch.setenv("OUTRIDER_OIDC_ISSUER", ISSUER)
    with pytest.raises(ValueError, match="--oidc-issuer needs --oidc-audience"):
        application(arguments)
    monkeypatch.setenv("OUTRIDER_OIDC_AUDIENCE", "outrider")
    application(arguments)
    monkeypatch.setenv("OUTRIDER_OIDC_ISSUER", "http://login.example.com")
    with pytest.raises(ValueError, match="has to be https://"):
        application(arguments)


def test_serve_passes_the_identity_provider_on() -> None:
    given: dict[str, Any] = {
        "oidc_issuer": ISSUER,
        "oidc_audience": "outrider",
        "oidc_jwks_url": f"{ISSUER}/keys",
        "oidc_tenant_claim": "azp",
        "oidc_ca_file": "/etc/ca.crt",
    }
    words = coordinator_spec(Deployment(DEMO_TARGET, DEMO_DRAFT, **given), Path("/tmp/ray")).command
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        assert words[words.index(flag) + 1] == value
    with pytest.raises(SettingError, match="--oidc-audience needs --oidc-issuer"):
        Deployment(DEMO_TARGET, DEMO_DRAFT, oidc_audience="outrider")


def test_keys_are_made_added_and_printed_once(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.toml", CliRunner()
    made = [
        runner.invoke(app, ["keys", str(path), "--tenant", tenant, "--scope", scope, "--expires-days", "30"])
        for tenant, scope in (("search", "generate"), ("prometheus", "metrics"))
    ]
    assert [each.exit_code for each in made] == [0, 0]
    assert path.stat().st_mode & 0o077 == 0
    file = KeyFile(path)
    for each, tenant in zip(made, ("search", "prometheus"), strict=True):
        key = each.stdout.strip()
        assert key not in path.read_text()
        assert file.authenticate(f"Bearer {key}").tenant == tenant


def test_a_key_shares_prefixes_where_that_was_asked_for(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.toml", CliRunner()
    made = [
        runner.invoke(app, ["keys", str(path), "--tenant", "search", *more]) for more in ([], ["--shares-prefixes"])
    ]
    callers = [KeyFile(path).authenticate(f"Bearer {each.stdout.strip()}") for each in made]
    assert [caller.shares_prefixes for caller in callers] == [False, True]


def test_a_key_is_for_the_models_that_were_named_and_else_for_all(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.toml", CliRunner()
    made = [
        runner.invoke(app, ["keys", str(path), "--tenant", "search", *more])
        for more in ([], ["--model", "small", "--model", 'a "b"'])
    ]
    callers = [KeyFile(path).authenticate(f"Bearer {each.stdout.strip()}") for each in made]
    assert [caller.models for caller in callers] == [None, frozenset({"small", 'a "b"'})]
    assert [caller.may_use("large") for caller in callers] == [True, False]


def test_a_file_of_keys_that_is_broken_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys")
    assert CliRunner().invoke(app, ["keys", str(path), "--tenant", "a"]).exit_code == 1
    assert path.read_text() == "[[keys"


def test_certificates_are_made_for_every_part_and_made_anew(tmp_path: Path) -> None:
    runner = CliRunner()
    before = None
    for _ in range(2):
        assert runner.invoke(app, ["certificates", str(tmp_path), "--name", "llm.internal"]).exit_code == 0
        materials = {role: TlsFiles(tmp_path / role.name.lower()).current() for role in Role}
        assert all(role in material.names for role, material in materials.items())
        assert "llm.internal" in materials[Role.COORDINATOR].names
        authority = (tmp_path / "ca.crt").read_bytes()
        assert before is None or (before[0] == authority and before[1] != materials[Role.TARGET])
        before = authority, materials[Role.TARGET]
    workers = ["--worker", "target=large-0", "--worker", "draft=Small 0"]
    assert runner.invoke(app, ["certificates", str(tmp_path), *workers]).exit_code == 0
    assert worker_name(Role.TARGET, "large-0") in TlsFiles(tmp_path / "target-large-0").current().names
    check_worker_id(TlsFiles(tmp_path / "target").current(), Role.TARGET, "of any name")
    label = worker_name(Role.DRAFT, "Small 0").partition(".")[0]
    check_worker_id(TlsFiles(tmp_path / f"draft-{label}").current(), Role.DRAFT, "Small 0")
    for wrong in ("large-0", "redis=r", "target="):
        done = runner.invoke(app, ["certificates", str(tmp_path), "--worker", wrong])
        assert done.exit_code == 1
    deployment = Deployment(DEMO_TARGET, DEMO_DRAFT, tls_dir=tmp_path)
    check_access(deployment)
    (tmp_path / "draft" / "tls.key").unlink()
    with pytest.raises(ConfigurationError, match=r"draft/tls\.key cannot be read"):
        check_access(deployment)
