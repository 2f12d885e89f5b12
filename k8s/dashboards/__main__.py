"""`python -m k8s.dashboards [FOLDER]`: writes the dashboards' JSON, by default into the chart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from k8s.dashboards import pools, service, speculation
from k8s.dashboards.panel import Dashboard

FOLDER: Final = Path(__file__).resolve().parents[1] / "helm" / "outrider" / "files" / "dashboards"
DASHBOARDS: Final[dict[str, Dashboard]] = {
    "service": service.DASHBOARD,
    "speculation": speculation.DASHBOARD,
    "pools": pools.DASHBOARD,
}


def write(folder: Path = FOLDER) -> None:
    """Writes one file for each dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        text = json.dumps(dashboard.to_json(), indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:2]))
