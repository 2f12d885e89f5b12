"""Settings of an engine's hints: each mistake is refused by name, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.engines.hint_settings import HintSettings
from outrider.errors import ConfigurationError

WORKERS = ["127.0.0.1:7001", "[fd00::2]:7001"]


def test_an_address_is_enough() -> None:
    settings = HintSettings.from_mapping({"draft_workers": WORKERS})
    assert settings.draft_workers == tuple(WORKERS)
    assert settings.reached_at == "127.0.0.1"
    assert settings.may_pause


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "draft_workers is empty"),
        ({"draft_workers": []}, "draft_workers is empty"),
        ({"draft_workers": "127.0.0.1:7001"}, "draft_workers is"),
        ({"draft_workers": ["somewhere"]}, "draft_workers: 'somewhere' is not host:port"),
        ({"draft_workers": [7]}, "draft_workers is"),
        ({"draft_workers": WORKERS, "port": 70000}, "port is 70000"),
        ({"draft_workers": WORKERS, "port": "7100"}, "port is '7100'"),
        ({"draft_workers": WORKERS, "port": None}, "port is None"),
        ({"draft_workers": WORKERS, "metrics_port": -1}, "metrics_port is -1"),
        ({"draft_workers": WORKERS, "may_pause": 1}, "may_pause is 1"),
        ({"draft_workers": WORKERS, "hint_wait_ms": True}, "hint_wait_ms is True"),
        ({"draft_workers": WORKERS, "hint_wait_ms": -1}, "hint_wait_ms is -1"),
        ({"draft_workers": WORKERS, "hots": "::"}, "unknown setting of hints: hots"),
        ({"draft_workers": WORKERS, "announce": "0.0.0.0"}, "draft workers cannot reach 0.0.0.0"),
        ({"draft_workers": WORKERS, "host": "10.0.0.1"}, "without tls_dir lets whoever reaches it in"),
        ("127.0.0.1:7001", "an object is required"),
    ],
)
def test_a_mistake_is_named(given: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("[", r"\[")):
        HintSettings.from_mapping(given)


def test_on_all_addresses_it_announces_one() -> None:
    given = {"draft_workers": WORKERS, "host": "0.0.0.0", "announce": "10.0.0.1", "is_insecure": True}
    assert HintSettings.from_mapping(given).reached_at == "10.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_on_all_addresses_it_may_leave_open_which_one_it_is_reached_at(host: str) -> None:
    given = {"draft_workers": WORKERS, "host": host, "is_insecure": True}
    assert HintSettings.from_mapping(given).reached_at is None
