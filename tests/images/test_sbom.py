"""Bills of materials are CycloneDX, whole, and the same for the same lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from k8s.images.locks import ROLES, read_lock
from k8s.images.sbom import bill_of, main, write_bills


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_bills(tmp_path_factory.mktemp("bills"))


def test_a_bill_lists_every_package_of_its_lock_with_hashes_and_licence(bills: list[Path]) -> None:
    for name, path in zip(ROLES, bills, strict=True):
        listed = {each["name"]: each for each in json.loads(path.read_text())["components"]}
        pins = {pin.name: pin for pin in read_lock(name)}
        assert set(listed) == set(pins)
        for key, pin in pins.items():
            (reference,) = listed[key]["externalReferences"]
            assert {f"sha256:{each['content']}" for each in reference["hashes"]} == set(pin.hashes)
            assert listed[key]["version"] == pin.version
            assert ("licenses" in listed[key]) is (key != "cuda-toolkit")


def test_a_bill_says_what_we_asked_for_ourselves(bills: list[Path]) -> None:
    bill = json.loads(bills[list(ROLES).index("worker-cpu")].read_text())
    names = {each["bom-ref"]: each["name"] for each in bill["components"]}
    (root,) = [each for each in bill["dependencies"] if each["ref"] == bill["metadata"]["component"]["bom-ref"]]
    asked_for = {names[reference] for reference in root["dependsOn"]}
    assert {"torch", "grpcio"} <= asked_for
    assert "sympy" not in asked_for


def test_the_same_lock_gives_the_same_bytes(bills: list[Path], tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path)]) == 0
    assert [path.read_bytes() for path in bills] == [(tmp_path / path.name).read_bytes() for path in bills]


def test_bills_are_valid_by_cyclonedx_s_own_schema(bills: list[Path]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert [validator.validate_str(path.read_text()) for path in bills] == [None] * len(bills)


def test_a_package_whose_licence_nobody_looked_up_is_an_error() -> None:
    with pytest.raises(KeyError, match="setuptools"):
        bill_of(read_lock("build"), {})
