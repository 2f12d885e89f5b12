"""A short run of what `make rollout` does: everything is replaced under load, and nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rollout.__main__ import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_everything_is_replaced_under_load_and_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--openai",
        "2",
        "--grpc",
        "1",
        "--pause-s",
        "1",
        "--think-s",
        "0.5",
        "--logs",
        str(tmp_path / "logs"),
    ]
    status = main([*words, "--no-node", "--no-prometheus"])
    shown, why_not = capsys.readouterr()
    assert status == 0, f"{shown}\n{why_not}"
    assert shown.count("replaced ") == 9
    for step in (
        "served target-v2 beside target:",
        "clients ask target and target-v2:",
        "clients ask target-v2 alone:",
    ):
        assert step in shown
    assert "drained target-" in shown
    assert " 0 failed\n" in shown
