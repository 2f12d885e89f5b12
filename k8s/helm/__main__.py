"""`python -m k8s.helm PRESET [VALUES …] > manifests.yaml`: renders the chart for `kubectl apply` or a kustomization.

Secrets are not rendered, except for empty ones that a Job fills: those that apply the manifests make them first
(docs/operations/kubernetes.md). The release is rendered as a new one: values have to say what an installation of an
older chart is to keep (docs/operations/upgrades.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python import HelmError

from k8s.helm.chart import PRESETS, merged, preset, render

SECRETS: Final[dict[str, Any]] = {
    "redis": {"existingSecret": "outrider-redis"},
    "apiKeys": {"existingSecret": "outrider-api-keys"},
    "coordinator": {"ray": {"faultTolerance": {"existingSecret": "outrider-ray-redis"}}},
}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, so that people can read them."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def manifests(name: str, *files: Path) -> str:
    """Objects of a preset with further values, as YAML, without Helm's hooks.

    Raises OSError, YAMLError or HelmError.
    """
    values = merged(preset(name), SECRETS)
    for file in files:
        values = merged(values, yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    objects = [each for each in render(values) if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=200)


def main(words: list[str]) -> int:
    if not words or words[0] not in PRESETS:
        print(f"{__doc__}\nPRESET: {', '.join(PRESETS)}", file=sys.stderr)
        return 2
    try:
        print(manifests(words[0], *map(Path, words[1:])), end="")
    except (OSError, yaml.YAMLError, HelmError) as error:
        print(f"k8s.helm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
