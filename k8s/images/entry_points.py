"""Writes metadata of the package to a folder on PYTHONPATH, by which an engine finds Outrider's plugins there.

`python entry_points.py PYPROJECT FOLDER`: name, version and entry points, as an installation has them. It needs the
standard library alone.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(pyproject: Path, folder: Path) -> None:
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items())])
        for group, points in project["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text("\n\n".join(groups) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
