"""Bills of materials of the images in CycloneDX's format, one per lock file, in `build/sbom/` (`make sbom`).

cyclonedx-bom makes them from the lock, with the licences that `locks.py` found and our own requirements. The same
lock gives the same bytes, so that two bills can be compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cyclonedx.spdx import is_expression, is_supported_id

from k8s.images.locks import FOLDER, LICENCES, ROLES, ROOT, Pin, parse_lock

STEP_TIMEOUT_S: Final = 60


def completed(bill: dict[str, Any], pins: Sequence[Pin], licences: Mapping[str, str]) -> dict[str, Any]:
    """The bill with each package's licence and the root's requirements, without the lock's own lines.

    A package that states no licence gets none. Raises KeyError for one that `licences` does not know.
    """
    direct = {pin.name for pin in pins if pin.is_direct}
    for component in bill["components"]:
        del component["description"]
        if stated := licences[component["name"]]:
            component["licenses"] = [_licence(stated)]
    root = bill["metadata"]["component"]["bom-ref"]
    asked_for = sorted(each["bom-ref"] for each in bill["components"] if each["name"] in direct)
    others = [each for each in bill["dependencies"] if each["ref"] != root]
    return bill | {"dependencies": [*others, {"ref": root, "dependsOn": asked_for}]}


def _licence(stated: str) -> dict[str, Any]:
    if is_supported_id(stated):
        return {"license": {"id": stated}}
    return {"expression": stated} if is_expression(stated) else {"license": {"name": stated}}


def bill_of(lock: Path) -> dict[str, Any]:
    """The bill of one lock. Raises CalledProcessError with cyclonedx-bom's output."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--no-validate"),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", "1.6", str(lock)),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=STEP_TIMEOUT_S,
    )
    bill: dict[str, Any] = json.loads(result.stdout)
    return bill


def write_bills(folder: Path) -> list[Path]:
    """Writes all bills. Raises CalledProcessError, and KeyError as `completed`."""
    folder.mkdir(parents=True, exist_ok=True)
    licences = json.loads(LICENCES.read_text(encoding="utf-8"))
    written = []
    for name in ROLES:
        lock = FOLDER / f"{name}.txt"
        bill = completed(bill_of(lock), parse_lock(lock.read_text(encoding="utf-8")), licences)
        path = folder / f"{name}.cdx.json"
        path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sbom", description="Writes what is in the images.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sbom", help="default: build/sbom")
    given = parser.parse_args(arguments)
    try:
        for path in write_bills(given.folder):
            num_components = len(json.loads(path.read_text(encoding="utf-8"))["components"])
            print(f"{path}: {num_components} packages")
    except subprocess.CalledProcessError as error:
        print(f"make sbom: cyclonedx-py: {error.stderr[-2000:]}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"make sbom: the licence of {error} is not known; run make lock", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
