"""Tests of the error of `make rollout` if its clients cannot be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigurationError
from tests.e2e.rollout.load import install_node_modules


@pytest.mark.parametrize("npm", [None, "#!/bin/sh\nexit 1\n"], ids=["no npm", "no registry"])
def test_without_the_packages_of_node_it_says_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, npm: str | None
) -> None:
    if npm is not None:
        (tmp_path / "npm").write_text(npm)
        (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="--no-node"):
        install_node_modules(tmp_path / "modules")
