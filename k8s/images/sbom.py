"""Bills of materials of the images in CycloneDX's format, one per lock file, in `build/sbom/` (`make sbom`).

CycloneDX's library makes them from the lock, the licences that `locks.py` found and our own requirements. The same
lock gives the same bytes, so that two bills can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cyclonedx.contrib.hash.factories import HashTypeFactory
from cyclonedx.contrib.this.builders import this_component
from cyclonedx.model import ExternalReference, ExternalReferenceType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.spdx import is_expression, is_supported_id
from packageurl import PackageURL

from k8s.images.locks import FOLDER, LICENCES, ROLES, ROOT, Pin, parse_lock

INDEX: Final = "https://pypi.org/simple"


def bill_of(pins: Sequence[Pin], licences: Mapping[str, str]) -> dict[str, Any]:
    """The bill of a lock. A package that states no licence gets none. Raises KeyError for one that `licences` does not
    know."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bill = Bom(version=1)
    bill.serial_number = bill.metadata.timestamp = None  # type: ignore[assignment]  # they would differ each time
    bill.metadata.properties.add(Property(name="cdx:reproducible", value="true"))
    bill.metadata.tools.components.add(this_component())
    bill.metadata.component = root = Component(
        bom_ref="root-component",
        type=ComponentType.APPLICATION,
        name=about["name"],
        version=version("outrider"),
        description=about["description"],
        licenses=_licences(about["license"]),
    )
    components = {pin.name: _component(pin, licences[pin.name]) for pin in pins}
    bill.components.update(components.values())
    bill.register_dependency(root, [components[pin.name] for pin in pins if pin.is_direct])
    written: dict[str, Any] = json.loads(make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string())
    return written


def _component(pin: Pin, licence: str) -> Component:
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"{INDEX}/{pin.name}/"),
        comment="implicit dist url",
        hashes=[HashTypeFactory().from_composite_str(each) for each in pin.hashes],
    )
    return Component(
        bom_ref=f"{pin.name}=={pin.version}",
        type=ComponentType.LIBRARY,
        name=pin.name,
        version=pin.version,
        purl=PackageURL(type="pypi", name=pin.name, version=pin.version),
        external_references=[files],
        licenses=_licences(licence),
    )


def _licences(stated: str) -> Iterable[License]:
    if not stated:
        return ()
    if is_supported_id(stated):
        return (DisjunctiveLicense(id=stated),)
    return (LicenseExpression(stated) if is_expression(stated) else DisjunctiveLicense(name=stated),)


def write_bills(folder: Path) -> list[Path]:
    """Writes all bills. Raises KeyError as `bill_of`."""
    folder.mkdir(parents=True, exist_ok=True)
    licences = json.loads(LICENCES.read_text(encoding="utf-8"))
    written = []
    for name in ROLES:
        lock = FOLDER / f"{name}.txt"
        bill = bill_of(parse_lock(lock.read_text(encoding="utf-8")), licences)
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
    except KeyError as error:
        print(f"make sbom: the licence of {error} is not known; run make lock", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
