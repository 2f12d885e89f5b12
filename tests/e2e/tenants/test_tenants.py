"""The real thing, for as long as a test may take; `make tenants` runs every attack on both hostings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.reports import report_of
from tests.e2e.system import needs_the_pair

SECONDS_MAX = 300.0  # on a machine with other work; alone it takes less than two minutes


@needs_the_pair
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(SECONDS_MAX + 90)
def test_no_tenant_harms_another(tmp_path: Path) -> None:
    report = report_of("tenants", tmp_path, SECONDS_MAX, "--short", "--seed", "55")
    assert report["is_clean"]
    (run,) = report["runs"]
    assert all(row["num_requests"] and row["num_samples"] for row in run["rows"]), "an attack did not take place"
    refused = [row["name"] for row in run["rows"] if "401" in row["answers"]]
    assert not refused, "an attack with a key that is not valid harms nobody"
