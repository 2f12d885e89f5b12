"""Tests of the environment that Ray's processes inherit: no value from outside opens one of their ports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.hosting import ray_serve
from coordinator.hosting.ingress import Chosen
from coordinator.hosting.ray_environment import ray_environment
from coordinator.settings import Proxy

TOKEN = "n" * 64


def test_ray_asks_for_a_token_of_our_own_where_nobody_says_anything() -> None:
    environment, told = ray_environment({}, {"RAY_SERVE_X": "1"}, "/here", TOKEN)
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", TOKEN)
    assert environment["RAY_SERVE_X"] == "1"
    assert environment["PYTHONPATH"] == "/here"
    assert told == []


@pytest.mark.parametrize("mode", ["disabled", "", "k8s", "TOKEN"])
def test_an_inherited_mode_does_not_switch_rays_token_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_AUTH_MODE": mode})
    ray_serve._prepare_ray_environment(Chosen(Proxy.PYTHON, {}))
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32
    assert f"RAY_AUTH_MODE={mode} from the environment is not taken over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_enable_metrics_collection", "true"),
        ("DASHBOARD_METRIC_PORT", "44227"),
        ("AUTOSCALER_METRIC_PORT", "44217"),
    ],
)
def test_metrics_of_rays_own_stay_off_for_their_ports_know_no_token(name: str, value: str) -> None:
    environment, told = ray_environment({name: value}, {}, "/here", TOKEN)
    assert environment[name] not in (value, "")
    assert len(told) == 1
    assert name in told[0]


@pytest.mark.parametrize("weak", ["", " " * 40, "secret"])
def test_a_token_that_could_be_guessed_is_replaced_and_not_shown(weak: str) -> None:
    environment, told = ray_environment({"RAY_AUTH_TOKEN": weak}, {}, "/here", TOKEN)
    assert environment["RAY_AUTH_TOKEN"] == TOKEN
    assert "RAY_AUTH_TOKEN" in told[0]
    assert "secret" not in told[0]


def test_a_good_token_and_whatever_opens_nothing_stay_as_they_are() -> None:
    given = {
        "RAY_AUTH_TOKEN": "t" * 32,
        "RAY_worker_niceness": "5",
        "PYTHONPATH": os.pathsep.join(["/a", "/here"]),
    }
    environment, told = ray_environment(given, {}, "/here", TOKEN)
    assert told == []
    assert {name: environment[name] for name in given} == {
        **given,
        "PYTHONPATH": os.pathsep.join(["/here", "/a"]),
    }


def test_every_part_that_is_set_is_read_by_a_process_that_inherits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    ray_serve._prepare_ray_environment(Chosen(Proxy.PYTHON, {"RAY_SERVE_X": "1"}))
    assert os.environ["RAY_SERVE_X"] == "1"
    assert os.environ["PYTHONPATH"] == str(Path(ray_serve.__file__).resolve().parents[2])
