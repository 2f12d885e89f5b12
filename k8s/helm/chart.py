"""Renders the chart as `helm template` does, without a helm program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python import Chart

FOLDER: Final = Path(__file__).parent / "outrider"
PRESETS: Final = ("demo", "llama-70b", "llama-405b", "draft-pool")
REGISTRY: Final = "registry.example.com/outrider"
"""Registry of the images, in renderings of a chart that has not been published."""


_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has libyaml


@cache
def chart() -> Chart:
    return Chart.load(FOLDER)


def preset(name: str) -> dict[str, Any]:
    """Values of a preset. Raises FileNotFoundError for a name that there is not."""
    path = FOLDER / "presets" / f"{name}.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Values as Helm merges several files: maps by their keys, everything else replaced."""
    result = dict(below)
    for key, value in above.items():
        earlier = result.get(key)
        if isinstance(earlier, Mapping) and isinstance(value, Mapping):
            result[key] = merged(earlier, value)
        else:
            result[key] = value
    return result


def render(
    values: Mapping[str, Any] | None = None, *, release: str = "outrider", namespace: str = "outrider"
) -> list[dict[str, Any]]:
    """Objects of an installation with these values, in the order of their templates.

    Raises HelmError with the reason for values that the schema or a template refuses.
    """
    given = merged({"images": {"registry": REGISTRY}}, values or {})
    chart().validate_schema(given)
    return objects_of(chart().render(given, name=release, namespace=namespace, is_install=True))


def objects_of(files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Objects of rendered templates, in the order of these."""
    objects = []
    for path in sorted(files):
        if path.endswith(".yaml"):
            objects += [each for each in yaml.load_all(files[path], Loader=_LOADER) if each]
    return objects


def notes(values: Mapping[str, Any] | None = None) -> str:
    """The text that Helm prints after an installation."""
    given = merged({"images": {"registry": REGISTRY}}, values or {})
    return notes_of(chart().render(given, name="outrider", namespace="outrider", is_install=True))


def notes_of(files: Mapping[str, str]) -> str:
    """The text that Helm prints, of rendered templates."""
    return next(text for path, text in files.items() if path.endswith("NOTES.txt"))
